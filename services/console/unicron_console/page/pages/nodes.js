// All nodes: as squares, and in words.

import { h, put } from "../dom.js";
import { byNumber, count } from "../format.js";
import { badge, heading, nodeLink, section, spaced, taskLink } from "../parts.js";
import { squares } from "../squares.js";
import { figure, part, table, text } from "../table.js";
import { taskLegend } from "./cluster.js";

const FIRST = 200; // rows at once: a table of 10,000 takes a browser minutes
const WELL = 9;
const ORDER = ["lost", "suspected", "draining", "left"]; // those that somebody should look at come first

const rank = (row) => (row.alarm ? -1 : ORDER.includes(row.state) ? ORDER.indexOf(row.state) : WELL);

export default function nodesPage(place) {
  place.title("nodes");
  const head = heading("Nodes");
  const field = squares();
  const key = taskLegend((task) => field.only(task));
  const filter = h("input", { type: "search", "aria-label": "Filter the nodes", placeholder: "filter: a name, a state, a task \u2026", input: () => show() });
  const hint = h("span", { class: "hint", role: "status" });
  const grid = nodeTable();
  place.main.append(head.box, field.box, key.box, section("In words", h("div", { class: "filter" }, filter, hint), grid.box));
  let rows = [];

  function show() {
    const wanted = filter.value.trim().toLowerCase();
    const fit = rows.filter((row) => `${row.name} ${row.state} ${row.tasks.join(" ")} ${row.alarm}`.toLowerCase().includes(wanted));
    grid.set(fit.slice(0, FIRST));
    put(hint, fit.length > FIRST ? `the first ${count(FIRST)} of ${count(fit.length)}, those in trouble first` : "");
  }

  place.cluster((page, changed) => {
    field.set(page, changed);
    key.set(page);
    rows = byNumber([...page.nodes], ([name]) => name).map(([name, square]) => line(name, square));
    rows.sort((one, other) => rank(one) - rank(other));
    show();
    put(head.state, field.summary());
  });
}

function line(name, square) {
  const slots = square.slots ?? [];
  const tasks = [...new Set(slots.filter(Boolean))];
  return { name, state: square.state, slots: slots.length, held: slots.filter(Boolean).length, tasks, alarm: square.alarm ?? "" };
}

const nodeTable = () => table({
  label: "nodes, those in trouble first",
  key: (row) => row.name,
  empty: "No node, or none that fits.",
  cards: true,
  rowAttributes: (row) => ({ "data-row": row.name }),
  columns: [
    part("node", (row) => nodeLink(row.name), (row) => row.name, { rowHead: true }),
    part("state", (row) => badge(row.state), (row) => row.state),
    figure("slots held", (row) => `${count(row.held)} of ${count(row.slots)}`),
    part("tasks", (row) => (row.tasks.length ? spaced(row.tasks.map(taskLink)) : "\u2013"), (row) => row.tasks.join(" ")),
    text("alarm", (row) => row.alarm, { wide: true }),
  ],
});
