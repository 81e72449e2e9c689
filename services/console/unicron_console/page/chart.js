// Lines over time, as SVG.

import { attr, h, s } from "./dom.js";
import { time } from "./format.js";

const EDGE = { right: 12, top: 10, bottom: 22 };
const LETTER = 6.8; // pixels of a letter of the axis, about

/** Round steps of an axis: 1, 2 or 5 times a power of ten, about `wanted` of them. */
export function ticks(low, high, wanted = 4) {
  const span = high - low || Math.abs(high) || 1;
  const power = 10 ** Math.floor(Math.log10(span / wanted));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => span / size <= wanted) ?? 10 * power;
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-6; value += step) found.push(value);
  return found;
}

const parts = (first, last, wanted) => Array.from({ length: wanted + 1 }, (_, index) => first + ((last - first) * index) / wanted);

/**
 * A chart of a line, and of others to compare it with.
 * @param {{label: string, show: Function, across?: Function, zero?: boolean, top?: number}} of `show` says a value of
 *   the line, `across` one of its x, a whole number; they are Unix seconds if nothing else is said; `zero`: the axis begins at 0.
 * @returns {{box: Element, set: Function}} `set(points, marks, others)`: points [x, y], marks {x, text, href}, others
 *   {points, kind}.
 */
export function lineChart({ label, show, across = time, zero = false, top = null, dots = false, height = 180 }) {
  const drawing = s("svg", { role: "group", height });
  const read = h("span", { class: "reading", "aria-hidden": "true" });
  const box = h("figure", { class: "chart" }, h("figcaption", null, h("span", null, label), read), drawing);
  let points = [];
  let marks = [];
  let others = [];
  let place = null;

  function draw() {
    const width = box.clientWidth;
    if (!width) return;
    attr(drawing, "viewBox", `0 0 ${width} ${height}`);
    if (points.length < 2) {
      attr(drawing, "aria-label", `${label}: not enough is known yet`);
      drawing.replaceChildren(s("text", { x: width / 2, y: height / 2, class: "axis middle" }, "not enough is known yet"));
      return;
    }
    place = scales([points, ...others.map((other) => other.points)], { width, height, zero, top, show });
    const last = points.at(-1);
    attr(drawing, "aria-label", `${label}: from ${show(points[0][1])} to ${show(last[1])}`);
    const held = drawing.contains(document.activeElement) && document.activeElement.getAttribute("href");
    const path = (of) => of.map(([x, y]) => `${place.x(x).toFixed(1)},${place.y(y).toFixed(1)}`).join(" ");
    drawing.replaceChildren(
      ...place.rows.flatMap((value) => row(value, width)),
      ...columns(width),
      ...others.map((other) => s("polyline", { points: path(other.points), class: `line ${other.kind}` })),
      s("polyline", { points: path(points), class: "line" }),
      ...(dots ? points.map(([x, y]) => s("circle", { cx: place.x(x), cy: place.y(y), r: 2.5, class: "dot" })) : []),
      ...marks.filter(({ x }) => x >= place.first && x <= place.last).map(mark),
      s("g", { class: "hair" }),
    );
    // Whoever stands on a mark stays there.
    if (held) [...drawing.querySelectorAll("a")].find((link) => link.getAttribute("href") === held)?.focus();
  }

  const row = (value, width) => [
    s("line", { x1: place.left, x2: width - EDGE.right, y1: place.y(value), y2: place.y(value), class: "grid" }),
    s("text", { x: place.left - 6, y: place.y(value) + 4, class: "axis end" }, show(value)),
  ];

  function columns(width) {
    const shown = across === time
      ? parts(place.first, place.last, Math.max(2, Math.floor(width / 160)))
      : ticks(place.first, place.last, Math.max(4, Math.floor(width / 90))).filter(Number.isInteger);
    return shown.map((value) => {
      const x = place.x(value);
      const side = x < place.left + 30 ? "start" : x > width - EDGE.right - 30 ? "end" : "middle";
      return s("text", { x, y: height - 5, class: `axis ${side}` }, across(value));
    });
  }

  function mark({ x, text, href, strong }) {
    const at = place.x(x);
    const shape = s("g", { class: strong ? "mark strong" : "mark" }, s("title", null, text),
      s("line", { x1: at, x2: at, y1: EDGE.top, y2: height - EDGE.bottom }),
      s("path", { d: `M${at - 5},${EDGE.top - 8}h10l-5,9z` }),
      s("rect", { x: at - 5, y: 0, width: 10, height: height - EDGE.bottom, class: "hit" }));
    return href ? s("a", { href, "aria-label": text }, shape) : shape;
  }

  drawing.addEventListener("pointermove", (event) => {
    if (!place || points.length < 2) return;
    const at = event.clientX - drawing.getBoundingClientRect().left;
    const near = points.reduce((best, point) => (Math.abs(place.x(point[0]) - at) < Math.abs(place.x(best[0]) - at) ? point : best));
    read.textContent = `${across(near[0])}: ${show(near[1])}`;
    drawing.querySelector(".hair")?.replaceChildren(s("circle", { cx: place.x(near[0]), cy: place.y(near[1]), r: 4 }));
  });
  drawing.addEventListener("pointerleave", () => {
    read.textContent = "";
    drawing.querySelector(".hair")?.replaceChildren();
  });
  new ResizeObserver(draw).observe(box);

  return { box, set(newPoints, newMarks = [], newOthers = []) {
    points = finite(newPoints);
    marks = newMarks;
    others = newOthers.map((other) => ({ ...other, points: finite(other.points) })).filter((other) => other.points.length > 1);
    draw();
  } };
}

const finite = (points) => points.filter(([x, y]) => Number.isFinite(x) && Number.isFinite(y));

/** Return the scales on which all of these lines have room. */
function scales(lines, { width, height, zero, top, show }) {
  const values = lines.flat().map(([, y]) => y);
  let low = zero ? 0 : Math.min(...values);
  let high = top ?? Math.max(...values);
  if (high === low) [low, high] = [low - (Math.abs(low) || 1) * 0.1, high + (Math.abs(high) || 1) * 0.1];
  const across = lines.flat().map(([x]) => x);
  const [first, last] = [Math.min(...across), Math.max(...across)];
  const rows = ticks(low, high);
  const left = 8 + LETTER * Math.max(...rows.map((value) => show(value).length));
  const inner = width - left - EDGE.right;
  const tall = height - EDGE.top - EDGE.bottom;
  return {
    first,
    last,
    left,
    rows,
    x: (value) => left + ((value - first) / (last - first || 1)) * inner,
    y: (value) => EDGE.top + (1 - (value - low) / (high - low)) * tall,
  };
}
