// A map of ranks and iterations: how long each rank's own work took, against the median of its iteration.

import { attr, h, put } from "./dom.js";
import { duration, percent } from "./format.js";
import { colour } from "./paint.js";
import { recolour } from "./theme.js";

const STEPS = 6; // shades of the scale
const FULL = 0.5; // so much above the median is the darkest

export const median = (values) => {
  const known = values.filter((value) => value != null).sort((one, other) => one - other);
  return known.length ? known[Math.floor(known.length / 2)] : null;
};

export function heatMap() {
  const canvas = h("canvas", { tabindex: "0", role: "img" });
  const read = h("p", { class: "tip", role: "status" });
  const below = h("p", { class: "hint" });
  const scale = h("ul", { class: "legend", "aria-label": "scale" }, Array.from({ length: STEPS }, (_, step) =>
    h("li", null, h("i", { class: `swatch heat-${step}`, "aria-hidden": "true" }), step ? `+${Math.round((100 * FULL * step) / (STEPS - 1))} %` : "as the median")));
  const box = h("div", { class: "heat" }, h("div", { class: "scroll" }, canvas), below, read, scale);
  const pen = canvas.getContext("2d");
  let page = null;
  let medians = [];
  let [wide, tall] = [0, 0];
  let at = [0, 0];

  function draw() {
    if (!page || !page.heat.length || !box.clientWidth) return;
    const [rows, columns] = [page.heat.length, page.heat[0].length];
    wide = Math.max(6, Math.min(40, Math.floor(box.clientWidth / columns)));
    tall = Math.max(3, Math.min(22, Math.floor(600 / rows)));
    const sharp = Math.min(2, devicePixelRatio || 1);
    [canvas.width, canvas.height] = [columns * wide * sharp, rows * tall * sharp];
    canvas.style.width = `${columns * wide}px`;
    canvas.style.height = `${rows * tall}px`;
    pen.setTransform(sharp, 0, 0, sharp, 0, 0);
    page.heat.forEach((row, rank) => row.forEach((seconds, column) => {
      if (seconds == null) return;
      pen.fillStyle = colour(`heat-${shade(seconds / medians[column] - 1)}`);
      pen.fillRect(column * wide, rank * tall, wide - (wide > 8 ? 1 : 0), tall - (tall > 5 ? 1 : 0));
    }));
  }

  const shade = (above) => Math.max(0, Math.min(STEPS - 1, Math.round((above / FULL) * (STEPS - 1))));

  function look(rank, column) {
    const seconds = page?.heat[rank]?.[column];
    if (seconds === undefined) return;
    at = [rank, column];
    const said = seconds == null ? "not recorded" : `${duration(seconds)}, ${percent(seconds / medians[column] - 1)} above the median`;
    put(read, `rank ${rank} (${page.workers[rank] ?? "?"}), iteration ${page.iterations[column]}: ${said}`);
  }
  canvas.addEventListener("pointermove", (event) => {
    const edge = canvas.getBoundingClientRect();
    look(Math.floor((event.clientY - edge.top) / tall), Math.floor((event.clientX - edge.left) / wide));
  });
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] }[event.key];
    if (!step) return;
    event.preventDefault();
    look(at[0] + step[0], at[1] + step[1]);
  });
  new ResizeObserver(draw).observe(box);
  recolour(box, draw);

  return { box, set(found) {
    page = found;
    medians = (page.heat[0] ?? []).map((_, column) => median(page.heat.map((row) => row[column])));
    attr(canvas, "aria-label", `own work of ${page.heat.length} ranks in ${page.iterations.length} iterations; the table below names the extremes; arrow keys read single values`);
    put(below, `iterations ${page.iterations[0]} to ${page.iterations.at(-1)}, from left to right; ranks 0 to ${page.heat.length - 1}, from above; empty where nothing was recorded`);
    box.hidden = !page.heat.length;
    draw();
  } };
}
