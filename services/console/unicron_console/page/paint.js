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

const COLOURS = 10;
const LOOKS = 40; // colours times prints; tasks beyond that have none, rather than another's

/** How a task looks: a colour and a print over it, as style.css and `prints` have them; all its own, or none. */
export function lookOf(line) {
  if (!line || line.colour < 0 || line.colour >= LOOKS) return { task: "none", print: 0 };
  return { task: line.colour % COLOURS, print: Math.floor(line.colour / COLOURS) };
}

/** The shortest kind of label by which all of these names can be told apart: a letter, a number, both; or none at all. */
export function labels(names) {
  const digits = (name) => /\d+$/.exec(name)?.[0] ?? "";
  for (const label of [(name) => [...name][0], digits, (name) => [...name][0] + digits(name)]) {
    const found = new Map(names.map((name) => [name, label(name)]));
    if (names.length > 1 && new Set(found.values()).size === names.length && ![...found.values()].includes("")) return found;
  }
  return new Map();
}

/** Draw a node whose square has its upper left corner at x, y. */
export function paint(pen, x, y, size, square, { look, label, only }) {
  const state = square.state;
  if (state === "left") return frame(pen, x, y, size, colour("faint"), [2, 2]);
  pen.globalAlpha = state === "lost" ? 0.25 : state === "draining" ? 0.6 : 1;
  slots(pen, x, y, size, square.slots ?? [], look, label, only);
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

function slots(pen, x, y, size, held, look, label, only) {
  const shade = (task) => {
    pen.fillStyle = task ? colour(`task-${look(task).task}`) : colour("free");
    return only && task !== only ? 0.15 : 1;
  };
  const alpha = pen.globalAlpha;
  if (held.length < 2 || (size <= 20 && held.every((task) => task === held[0]))) {
    pen.globalAlpha = alpha * shade(held[0] ?? "");
    pen.fillRect(x, y, size, size);
    if (held[0]) PRINTS[look(held[0]).print](pen, x, y, size, size);
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
    if (task) PRINTS[look(task).print](pen, left, top, size / across - gap, size / down - gap);
    if (size / across >= 14) write(pen, label(task), left, top, size / across - gap, size / down - gap);
  });
}

const none = () => {};
const PRINTS = [none, print(lines), print(dots), print(rows)]; // those of style.css

/** Draw within a rectangle, in the dark colour of what is written on tasks. */
function print(draw) {
  return (pen, x, y, width, height) => {
    pen.save();
    pen.beginPath();
    pen.rect(x, y, width, height);
    pen.clip();
    pen.strokeStyle = pen.fillStyle = colour("on-task");
    pen.globalAlpha *= 0.45;
    pen.lineWidth = 1.2;
    pen.beginPath();
    draw(pen, x, y, width, height);
    pen.stroke();
    pen.restore();
  };
}

function lines(pen, x, y, width, height) {
  for (let at = -height; at < width; at += 5) {
    pen.moveTo(x + at, y + height);
    pen.lineTo(x + at + height, y);
  }
}

function dots(pen, x, y, width, height) {
  for (let down = 2.5; down < height; down += 5) for (let at = 2.5; at < width; at += 5) pen.fillRect(x + at - 1, y + down - 1, 2, 2);
}

function rows(pen, x, y, width, height) {
  for (let down = 2.5; down < height; down += 5) {
    pen.moveTo(x, y + down);
    pen.lineTo(x + width, y + down);
  }
}

/** Write a label where it fits, on the task's colour without its print. */
function write(pen, text, x, y, width, height) {
  if (!text) return;
  const ground = pen.fillStyle;
  pen.font = `600 ${Math.min(11, height * 0.6)}px system-ui, sans-serif`;
  const wide = pen.measureText(text).width + 1;
  if (wide > width) return;
  pen.fillRect(x + (width - wide) / 2, y + height / 2 - 7, wide, 14);
  pen.fillStyle = colour("on-task");
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  pen.fillText(text, x + width / 2, y + height / 2 + 0.5);
  pen.fillStyle = ground;
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
