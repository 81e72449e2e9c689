// The table of tasks: broken first, then those that run, and of very many only the first.

import { h, put } from "./dom.js";
import { count, duration, flops, number, percent } from "./format.js";
import { badge, taskLink, taskSwatch } from "./parts.js";
import { figure, part, table, text } from "./table.js";

const FIRST = 200; // rows at once: a table of 10,000 takes a browser minutes
const ORDER = ["recovering", "reconfiguring", "failed", "starting", "running", "waiting", "finished"];

const rank = (line) => (line.slow ? 2.5 : ORDER.indexOf(line.state) + (ORDER.includes(line.state) ? 0 : 9));

/** Return the lines, broken ones first, else in the order in which they were submitted. */
export const brokenFirst = (lines) => [...lines].sort((one, other) => rank(one) - rank(other));

function progress(cell, line) {
  const bar = (cell.firstChild ?? cell.appendChild(h("div", { class: "progress" }, h("i"), h("span"))));
  const share = line.iterations ? Math.min(1, (line.iteration + 1) / line.iterations) : 0;
  bar.firstChild.style.width = `${100 * share}%`;
  put(bar.lastChild, line.iterations ? `${count(line.iteration + 1)} of ${count(line.iterations)}` : line.iteration < 0 ? "\u2013" : count(line.iteration + 1));
}

const COLUMNS = [
  part("task", (line) => [taskSwatch(line.name), taskLink(line.name)], (line) => `${line.name} ${line.colour}`, { rowHead: true }),
  part("state", (line) => [badge(line.state), line.paused && badge("paused"), line.withheld && badge("withheld"), line.slow && badge("slow")], (line) => `${line.state}${line.paused}${!!line.withheld}${!!line.slow}`),
  { head: "iterations", set: progress },
  figure("loss", (line) => number(line.loss)),
  figure("an iteration", (line) => (line.iteration_s ? duration(line.iteration_s) : "\u2013")),
  figure("time left", (line) => (line.left ? duration(line.left.seconds) : "\u2013")),
  figure("workers", (line) => `${count(line.workers)} (${line.min_workers}\u2013${line.max_workers})`),
  figure("WAF", (line) => flops(line.waf)),
  figure("planned", (line) => flops(line.planned_waf)),
  figure("goodput", (line) => percent(line.goodput)),
  text("why", (line) => line.slow || line.reason, { wide: true }),
];

export function taskTable() {
  const filter = h("input", { type: "search", "aria-label": "Filter the tasks", placeholder: "filter: a name, a state \u2026", input: () => turn(0) });
  const before = h("button", { type: "button", "data-turn": "before", click: () => turn(first - FIRST) }, "\u2039 before");
  const after = h("button", { type: "button", "data-turn": "after", click: () => turn(first + FIRST) }, "after \u203a");
  const hint = h("span", { class: "hint", role: "status" });
  const grid = table({ label: "tasks, broken first", cards: true, columns: COLUMNS, key: (line) => line.name, empty: "No task, or none that fits.",
    rowAttributes: (line) => ({ "data-task": line.name, "data-state": line.state }) });
  let tasks = new Map();
  let first = 0;

  function turn(to) {
    first = to;
    show();
  }

  function show() {
    const wanted = filter.value.trim().toLowerCase();
    let lines = [...tasks.values()];
    if (wanted) lines = lines.filter((line) => `${line.name} ${line.state} ${line.reason}`.toLowerCase().includes(wanted));
    // Tasks end while somebody reads: the page that was shown may be gone.
    first = Math.max(0, Math.min(first, lines.length - 1));
    const shown = brokenFirst(lines).slice(first, first + FIRST);
    grid.set(shown);
    before.hidden = first === 0;
    after.hidden = first + FIRST >= lines.length;
    put(hint, shown.length < lines.length ? `${count(first + 1)} to ${count(first + shown.length)} of ${count(lines.length)}, broken ones first` : "");
    filter.parentElement.hidden = tasks.size <= 10 && !wanted;
  }
  const box = h("div", null, h("div", { class: "filter" }, filter, hint, before, after), grid.box);
  return { box, set(now) {
    tasks = now;
    show();
  } };
}
