// Where the GPU time of all tasks went.

import { h, keyed, put } from "../dom.js";
import { count, duration, gpuTime, percent, time, words } from "../format.js";
import { heading, nodeLink, section, taskLink } from "../parts.js";
import { bar, legend, lost, phaseTable, sorted, total } from "../phases.js";
import { figure, part, table } from "../table.js";

export default function goodput(place) {
  place.title("goodput");
  const head = heading("Goodput");
  const key = legend();
  const bars = h("div", { class: "bars" });
  const losses = h("div", { class: "bars" });
  const sums = phaseTable("slot time of all tasks by phase");
  const causes = costs("what it was lost to, dearest first", "cause", words);
  const nodes = costs("nodes on which it was lost, dearest first", "node", nodeLink);
  const tasks = taskTable();
  const notes = h("ul", { class: "notes" });
  place.main.append(head.box, key.list,
    section("By task", h("p", { class: "hint" }, "All of the GPU time that each task held."), bars, tasks.box),
    section("What was lost", h("p", { class: "hint" }, "Without training and idle time; the longest bar is the dearest task."), losses),
    section("By phase", sums.box),
    h("div", { class: "two" }, section("Dearest causes", causes.box), section("Dearest nodes", nodes.box)),
    section("What is an estimate", notes));

  place.watch("/api/goodput", 10, (page) => {
    put(head.state, page.until > page.since ? `from ${time(page.since)} to ${time(page.until)}, ${duration(page.until - page.since)}` : "nothing yet");
    const sum = {};
    for (const row of page.tasks) for (const [phase, amount] of Object.entries(row.seconds)) sum[phase] = (sum[phase] ?? 0) + amount;
    key.set(sorted(sum).map(([phase]) => phase));
    sums.set(sum);
    const rows = [...page.tasks].sort((one, other) => total(lost(other.seconds)) - total(lost(one.seconds)));
    tasks.set(rows);
    showBars(bars, rows.slice(0, 40), (row) => row.seconds, (row) => percent(row.goodput));
    const most = Math.max(...rows.map((row) => total(lost(row.seconds))), 0);
    showBars(losses, rows.slice(0, 40), (row) => lost(row.seconds), (row) => gpuTime(total(lost(row.seconds))), most);
    causes.set(page.causes.map((row) => ({ ...row, cost: total(row.seconds) })));
    nodes.set(page.nodes.map((row) => ({ ...row, cost: total(row.seconds) })));
    keyed(notes, page.estimates ?? [], (text) => text, (text) => h("li", null, text));
  });
}

const nameOf = (row) => (row.name ? taskLink(row.name) : "no task");

function showBars(box, rows, secondsOf, say, scale) {
  keyed(box, rows, (row) => row.name, (row) => {
    const line = bar(row.name || "no task", gpuTime);
    const node = h("div", { class: "bar-row" }, h("span", { class: "bar-name" }, nameOf(row)), line.line, h("span", { class: "bar-figure" }));
    node.unicronBar = line;
    return node;
  }, (node, row) => {
    node.unicronBar.set(secondsOf(row), scale);
    put(node.lastChild, say(row));
  });
}

function taskTable() {
  return table({
    label: "tasks, most lost first",
    key: (row) => row.name,
    empty: "No task has held a slot yet.",
    columns: [
      part("task", nameOf, (row) => row.name, { rowHead: true }),
      figure("goodput", (row) => percent(row.goodput)),
      figure("effective training time", (row) => percent(row.effective_time)),
      figure("GPU time", (row) => gpuTime(row.whole_s)),
      figure("lost", (row) => gpuTime(total(lost(row.seconds)))),
      figure("failures", (row) => count(row.failures)),
    ],
  });
}

function costs(label, what, show) {
  return table({
    label,
    key: (row) => row.name,
    empty: "Nothing was lost.",
    columns: [
      part(what, (row) => show(row.name), (row) => row.name, { rowHead: true }),
      figure("GPU time lost", (row) => gpuTime(row.cost)),
      figure("failures", (row) => count(row.failures)),
      part("by phase", (row) => {
        const line = bar(row.name, gpuTime);
        line.set(row.seconds);
        return line.line;
      }, (row) => JSON.stringify(row.seconds), { wide: true }),
    ],
  });
}
