// How a node is drawn. Its state is shown by shape, so that it does not hang on colour alone:
// suspected dashed, draining striped, lost crossed out, left empty; an alarm is a corner.

const night = matchMedia("(prefers-color-scheme: dark)");
let theme = "";
let colours = {};

/** The colours of style.css, as the theme has them now. */
export function colour(name) {
  const root = document.documentElement;
  const is = root.dataset.theme || (night.matches ? "dark" : "light");
  if (is !== theme) [theme, colours] = [is, {}];
  if (!(name in colours)) {
    const probe = document.createElement("i");
    probe.style.color = `var(--${name})`;
    document.body.append(probe);
    colours[name] = getComputedStyle(probe).color;
    probe.remove();
  }
  return colours[name];
}

export const taskColour = (line) => colour(line ? `task-${line.colour % 10}` : "task-none");

/** Draw a node whose square has its upper left corner at x, y. */
export function paint(pen, x, y, size, square, colourOf, only) {
  const state = square.state;
  if (state === "left") return frame(pen, x, y, size, colour("faint"), [2, 2]);
  pen.globalAlpha = state === "lost" ? 0.25 : state === "draining" ? 0.6 : 1;
  slots(pen, x, y, size, square.slots ?? [], colourOf, only);
  pen.globalAlpha = 1;
  if (state === "lost") cross(pen, x, y, size);
  if (state === "draining") stripes(pen, x, y, size);
  if (state === "suspected") frame(pen, x, y, size, colour("warn"), size > 12 ? [4, 3] : [2, 1], size > 12 ? 3 : 2);
  if (square.alarm) corner(pen, x, y, size);
}

/** Columns of so many slots: such that no place stays empty, where that makes no stripes of them. */
function columns(slots) {
  const least = Math.ceil(Math.sqrt(slots));
  for (let across = least; across <= 2 * Math.sqrt(slots); across += 1) if (slots % across === 0) return across;
  return least;
}

function slots(pen, x, y, size, held, colourOf, only) {
  const shade = (task) => {
    pen.fillStyle = task ? colourOf(task) : colour("free");
    return only && task !== only ? 0.15 : 1;
  };
  const alpha = pen.globalAlpha;
  if (held.length < 2 || (size <= 20 && held.every((task) => task === held[0]))) {
    pen.globalAlpha = alpha * shade(held[0] ?? "");
    pen.fillRect(x, y, size, size);
    return;
  }
  const across = columns(held.length);
  const down = Math.ceil(held.length / across);
  const gap = size > 20 ? 1 : 0;
  held.forEach((task, index) => {
    const left = x + ((index % across) * size) / across;
    const top = y + (Math.floor(index / across) * size) / down;
    pen.globalAlpha = alpha * shade(task);
    pen.clearRect(left, top, size / across, size / down);
    pen.fillRect(left, top, size / across - gap, size / down - gap);
    if (size / across >= 17) letter(pen, task, left, top, size / across - gap, size / down - gap);
  });
}

function letter(pen, task, x, y, width, height) {
  if (!task) return;
  pen.fillStyle = colour("on-task");
  pen.font = `${Math.min(13, height * 0.6)}px system-ui, sans-serif`;
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  pen.fillText([...task][0], x + width / 2, y + height / 2 + 0.5);
}

function frame(pen, x, y, size, stroke, dash, width = 1) {
  pen.strokeStyle = stroke;
  pen.lineWidth = width;
  pen.setLineDash(dash);
  pen.strokeRect(x + width / 2, y + width / 2, size - width, size - width);
  pen.setLineDash([]);
}

function cross(pen, x, y, size) {
  const wide = size > 12 ? 3 : 1.5;
  frame(pen, x, y, size, colour("bad"), [], wide);
  pen.beginPath();
  pen.moveTo(x + wide, y + wide);
  pen.lineTo(x + size - wide, y + size - wide);
  pen.moveTo(x + size - wide, y + wide);
  pen.lineTo(x + wide, y + size - wide);
  pen.stroke();
}

function stripes(pen, x, y, size) {
  pen.save();
  pen.beginPath();
  pen.rect(x, y, size, size);
  pen.clip();
  pen.strokeStyle = colour("ground");
  pen.lineWidth = size > 12 ? 2 : 1;
  pen.beginPath();
  for (let at = -size; at < size; at += size > 12 ? 7 : 3) {
    pen.moveTo(x + at, y + size);
    pen.lineTo(x + at + size, y);
  }
  pen.stroke();
  pen.restore();
}

function corner(pen, x, y, size) {
  const leg = Math.max(4, size * 0.35);
  pen.fillStyle = colour("bad");
  pen.beginPath();
  pen.moveTo(x + size, y);
  pen.lineTo(x + size - leg, y);
  pen.lineTo(x + size, y + leg);
  pen.fill();
}
