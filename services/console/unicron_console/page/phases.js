// The phases of GPU time: names, order and bars. Colours and patterns stand in style.css, as .phase-NAME.

import { attr, h, keyed } from "./dom.js";
import { duration, gpuTime, percent, words } from "./format.js";
import { figure, part, table, text } from "./table.js";

/** In the order in which a failure goes through them; what each is, in words. */
export const PHASES = {
  training: "new microbatches are computed",
  detection: "from the first sign to the failure's detection",
  decision: "from the detection to the first command or plan",
  transition: "from the order to regroup to the new membership, states handed over",
  waiting: "all is ordered; more workers must get ready",
  checkpoint: "until it is known what lies in memory or on storage",
  start_up: "a plan gave it the slot; its first worker there starts",
  recomputed: "computing again what had been computed before",
  sub_healthy: "computing without the slot that failed, or slower than usual",
  idle: "no task has the slot, or its worker is through",
};

const order = Object.keys(PHASES);

/** Return [phase, seconds] of all that are above 0, in their order; phases that this page does not know come last. */
export function sorted(seconds) {
  const place = (phase) => (order.includes(phase) ? order.indexOf(phase) : order.length);
  return Object.entries(seconds)
    .filter(([, amount]) => amount > 0)
    .sort(([one], [other]) => place(one) - place(other));
}

export const total = (seconds) => Object.values(seconds).reduce((sum, amount) => sum + amount, 0);

/** What is lost: neither training nor a slot that nobody had. */
export const lost = (seconds) =>
  Object.fromEntries(Object.entries(seconds).filter(([phase]) => phase !== "training" && phase !== "idle"));

export const swatch = (phase) => h("i", { class: `swatch phase-${phase}`, "aria-hidden": "true" });

/** A bar of phases. `set(seconds, scale)`: as long as `scale` seconds are the whole width. */
export function bar(name, show = duration) {
  const line = h("div", { class: "stack", role: "img" });
  const build = ([phase]) => h("span", { class: `phase-${phase}`, "data-phase": phase });
  return {
    line,
    set(seconds, scale) {
      const pieces = sorted(seconds);
      const whole = scale || total(seconds) || 1;
      keyed(line, pieces, ([phase]) => phase, build, (piece, [phase, amount]) => {
        piece.style.width = `${(100 * amount) / whole}%`;
        attr(piece, "title", `${words(phase)}: ${show(amount)}`);
      });
      attr(line, "aria-label", `${name}: ${pieces.map(([phase, amount]) => `${words(phase)} ${show(amount)}`).join(", ")}`);
    },
  };
}

/** A legend of those phases that are there. */
export function legend() {
  const list = h("ul", { class: "legend" });
  return {
    list,
    set: (phases) =>
      keyed(list, phases, (phase) => phase, (phase) =>
        h("li", { "data-phase": phase, title: PHASES[phase] ?? "" }, swatch(phase), words(phase)),
      ),
  };
}

/** A table of seconds by phase, with the sum below; `show` says a figure. */
export function phaseTable(label, show = gpuTime) {
  const grid = table({
    label,
    cards: true,
    key: (row) => row.phase,
    columns: [
      part("phase", (row) => (row.sum ? h("strong", null, "sum") : [swatch(row.phase), words(row.phase)]), (row) => row.phase, { rowHead: true }),
      figure("time", (row) => show(row.amount)),
      figure("share", (row) => percent(row.share)),
      text("what it is", (row) => PHASES[row.phase] ?? "", { wide: true }),
    ],
    rowAttributes: (row) => ({ "data-phase": row.phase }),
    empty: "Nothing yet.",
  });
  return {
    box: grid.box,
    set(seconds) {
      const whole = total(seconds);
      const rows = sorted(seconds).map(([phase, amount]) => ({ phase, amount, share: amount / whole }));
      if (rows.length) rows.push({ phase: "sum", amount: whole, share: 1, sum: true });
      grid.set(rows);
    },
  };
}
