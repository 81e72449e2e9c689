// What each slot did because of a failure, over time. While it is being healed, bars that are open grow with the clock.

import { attr, h, keyed, put } from "./dom.js";
import { now, tick } from "./clock.js";
import { byNumber, duration, percent, time, words } from "./format.js";
import { ticks } from "./chart.js";
import { legend, sorted } from "./phases.js";
import { figure, table, text } from "./table.js";

const OPEN_S = 1.5; // a bar that ended so short before the answer was made is still going on
const LANES = 4; // of words above the bars
const LETTER = 6.5; // pixels of a letter of theirs, about
const STOOD = new Set(["detection", "decision", "transition", "checkpoint", "recomputed"]); // what all workers go through

export function timeline() {
  const axis = h("div", { class: "axis", "aria-hidden": "true" });
  const marks = h("div", { class: "marks" });
  const rows = h("div", { class: "rows" });
  const chart = h("div", { class: "timeline", role: "group", "aria-label": "timeline by worker" }, marks, rows, axis);
  const grid = barTable();
  const more = h("p", { class: "hint" });
  const key = legend();
  key.list.append(h("li", null, h("i", { class: "swatch", "aria-hidden": "true" }), "empty: not held up by it; the slot trains, or is out of use"));
  const near = h("button", { type: "button", click: () => ((close = !close), draw()) });
  const box = h("div", null, near, h("div", { class: "scroll timeline-scroll", tabindex: "0", role: "group", "aria-label": "timeline" }, chart), key.list, more,
    h("details", null, h("summary", null, "The timeline as a table"), grid.box));
  let page = null;
  let held = [];
  let span = 1;
  let close = false;

  const at = (moment) => `${(100 * (moment - page.begun)) / span}%`;
  const isOpen = (bar) => !page.line.over && page.now - bar.end < OPEN_S;
  const end = (bar) => (isOpen(bar) ? Math.max(bar.end, now()) : bar.end);

  const row = (held) => h("div", { class: "row", "data-slot": `${held.node}:${held.slot}` },
    h("span", { class: "row-name", title: held.workers }, h("b", null, `${held.node}:${held.slot}`), " ", held.workers), h("div", { class: "row-bars" }));

  function fill(node, held) {
    keyed(node.lastChild, held.bars, (bar) => `${bar.phase}${bar.begin}${bar.worker}`, (bar) =>
      h("span", { class: `phase-${bar.phase}`, "data-phase": bar.phase }), place);
  }

  function place(node, bar) {
    node.unicronBar = bar;
    node.style.left = at(bar.begin);
    node.style.width = `calc(${(100 * Math.max(0, end(bar) - bar.begin)) / span}%)`;
    node.style.height = `calc((100% - 6px) * ${Math.max(0.15, bar.share)})`;
    attr(node, "data-open", isOpen(bar));
    attr(node, "title", `${bar.worker || "no worker"} on ${bar.node}:${bar.slot}: ${words(bar.phase)} ${duration(end(bar) - bar.begin)}${bar.share < 1 ? `, ${percent(bar.share)} of it lost` : ""}`);
  }

  function measure() {
    const last = Math.max(...page.bars.map(end), ...page.messages.map((event) => Math.min(event.at, page.now)), page.begun + 0.001);
    const whole = (page.line.over ? last : Math.max(last, now())) - page.begun;
    // One slot that waits for long would squeeze all that others went through into a few pixels.
    const stood = Math.max(0, ...page.bars.filter((bar) => STOOD.has(bar.phase) && !isOpen(bar)).map((bar) => bar.end)) - page.begun;
    const offered = stood > 0 && stood < whole / 3;
    near.hidden = !offered;
    put(near, close ? `show all ${duration(whole)}` : `a closer look at the first ${duration(stood)}`);
    span = offered && close ? stood * 1.05 : whole;
  }

  function draw() {
    measure();
    keyed(rows, held, (held) => `${held.node}:${held.slot}`, row, fill);
    for (const node of rows.querySelectorAll("[data-phase]")) place(node, node.unicronBar);
    keyed(marks, marked(), ({ mark }) => mark.position, ({ mark }) => h("span", { class: "mark", "data-kind": mark.kind }, h("i"), h("small")),
      (node, { mark, lane, left }) => {
        node.style.left = at(mark.at);
        put(node.lastChild, mark.text);
        attr(node, "class", `mark lane-${lane}${left ? " left" : ""}`);
        attr(node, "title", [`+${duration(mark.at - page.begun)} ${mark.text}`, ...mark.said, mark.more && `and ${mark.more} more`].filter(Boolean).join("\n"));
      });
    const steps = ticks(0, span, 6);
    keyed(axis, steps, (step) => step, (step) => h("span", null, step ? duration(step) : "0"));
    for (const step of steps) axis.unicronKeys.get(step).node.style.left = `${(100 * step) / span}%`;
  }

  // Words that would cover one another go to lanes; where all lanes are full, only the line is drawn, and of lines of
  // one kind that lie on one another the first.
  function marked() {
    const width = marks.clientWidth || 600;
    const ends = Array(LANES).fill(-Infinity);
    const last = new Map();
    const found = [];
    for (const mark of [...page.marks].sort((one, other) => one.at - other.at)) {
      const x = ((mark.at - page.begun) / span) * width;
      if (x < 0 || x > width || x - (last.get(mark.kind) ?? -9) < 6) continue;
      last.set(mark.kind, x);
      const long = mark.text.length * LETTER + 10;
      const left = x + long > width;
      const lane = ends.findIndex((end) => end < (left ? x - long : x));
      if (lane >= 0) ends[lane] = left ? x : x + long;
      found.push({ mark, lane, left });
    }
    return found;
  }

  tick(box, () => page && !page.line.over && draw());
  return { box, set(found) {
    page = found;
    held = bySlot(page.bars);
    key.set(sorted(Object.fromEntries(page.bars.map((bar) => [bar.phase, 1]))).map(([phase]) => phase));
    draw();
    put(more, page.more ? `${page.more} more bars are not shown.` : "");
    grid.set(page.bars.map((bar, index) => ({ ...bar, index, after: bar.begin - page.begun })));
  } };
}

function bySlot(bars) {
  const found = new Map();
  for (const bar of bars) {
    const key = `${bar.node}:${bar.slot}`;
    if (!found.has(key)) found.set(key, { node: bar.node, slot: bar.slot, bars: [], names: new Set() });
    found.get(key).bars.push(bar);
    if (bar.worker) found.get(key).names.add(bar.worker);
  }
  const rows = [...found.values()].map((held) => ({ ...held, workers: [...held.names].join(", ") }));
  return byNumber(rows, (held) => `${held.node}:${held.slot}`);
}

function barTable() {
  return table({
    label: "the timeline as a table",
    key: (bar) => bar.index,
    columns: [
      text("slot", (bar) => `${bar.node}:${bar.slot}`, { rowHead: true }),
      text("worker", (bar) => bar.worker || "\u2013"),
      text("task", (bar) => bar.task),
      text("phase", (bar) => words(bar.phase)),
      figure("after", (bar) => duration(bar.after)),
      figure("for", (bar) => duration(bar.end - bar.begin)),
      figure("lost of it", (bar) => percent(bar.share)),
      text("began", (bar) => time(bar.begin)),
    ],
  });
}
