// The workers that slow a task down.

import { path } from "../api.js";
import { h, put } from "../dom.js";
import { count, duration, percent, words } from "../format.js";
import { heatMap, median } from "../heat.js";
import { badge, facts, heading, linked, moment, section, taskLink, taskSwatch } from "../parts.js";
import { figure, part, table, text } from "../table.js";

const EXTREMES = 12;

/** All tasks, and whether one has got slow. */
export function overview(place) {
  place.title("stragglers");
  const head = heading("Stragglers");
  const tasks = slowTable();
  place.main.append(head.box, h("p", { class: "hint" }, "The page of each task shows the workers that slow it down, by iteration."), tasks.box);
  place.cluster((page) => {
    const lines = [...page.tasks.values()].sort((one, other) => !!other.slow - !!one.slow);
    tasks.set(lines);
    const slow = lines.filter((line) => line.slow).length;
    put(head.state, slow ? `${count(slow)} slow` : "none is slow");
  });
}

const slowTable = () => table({
  label: "tasks, slow ones first",
  key: (line) => line.name,
  empty: "No task.",
  columns: [
    part("task", (line) => [taskSwatch(line.name), taskLink(line.name)], (line) => `${line.name} ${line.colour}`, { rowHead: true }),
    part("state", (line) => [badge(line.state), line.slow && badge("slow")], (line) => `${line.state}${!!line.slow}`),
    figure("workers", (line) => count(line.workers)),
    figure("an iteration", (line) => (line.iteration_s ? duration(line.iteration_s) : "\u2013")),
    part("who", (line) => h("a", { href: path("stragglers", line.name) }, `stragglers of ${line.name}`), (line) => line.name),
    text("how slow", (line) => line.slow, { wide: true }),
  ],
});

export default function stragglers(place) {
  const task = place.argument;
  place.title(`stragglers of ${task}`);
  const head = heading(`Stragglers of ${task}`, "stragglers");
  const said = h("p", { class: "lead" });
  const list = facts();
  const windows = windowTable();
  const silent = h("p", { class: "problem", hidden: true }, "The straggler service does not answer; what it said before is no longer known to be so.");
  const heat = heatMap();
  const extremes = extremeTable();
  place.main.append(head.box, h("p", null, "Task ", taskLink(task)), silent, said, list.list,
    section("Own work by rank and iteration", h("p", { class: "hint" }, "Mean time of a microbatch, without waiting for others."), heat.box),
    section("The slowest ranks", extremes.box),
    section("Windows", windows.box));

  place.watch(`/api${path("tasks", task, "stragglers")}`, 5, (page) => {
    silent.hidden = page.view != null;
    heat.set(page);
    extremes.set(slowest(page));
    if (page.view) see(page.view);
  });

  function see(view) {
    const last = view.history.at(-1);
    put(head.state, last ? `S = ${last.slowdown.toFixed(2)}` : "nothing recorded yet");
    put(said, view.alert ? `Reported, and still so: ${words(view.alert)}.` : "Nothing to report.");
    said.className = view.alert ? "problem" : "lead";
    const dropped = Object.entries(view.dropped).map(([reason, number]) => `${count(number)} ${reason}`).join(", ");
    list.set({
      "slowdown S": last ? `${last.slowdown.toFixed(3)}: an iteration takes so many times what it would without stragglers` : "",
      waste: last ? `${percent(last.waste)} of the GPU time` : "",
      "the last diagnosis": last?.diagnosis ? `${words(last.diagnosis)}${last.worker ? `: ${last.worker}` : ""}` : "",
      cure: last?.cure ? { sign: last.cure, build: () => linked(last.cure) } : "",
      "curing it alone": last?.gain ? `would make an iteration ${last.gain.toFixed(2)} times as fast` : "",
      recorded: `${percent(view.share)} of the iterations; ${count(view.waiting)} wait for the rest of their window`,
      "left out": dropped,
    });
    windows.set([...view.history].reverse());
  }
}

/** Return the ranks that take longest: the mean over their iterations of what they take, over the iteration's median. */
function slowest(page) {
  const medians = page.iterations.map((_, column) => median(page.heat.map((row) => row[column])));
  const rows = page.heat.map((row, rank) => {
    const shares = row.map((seconds, column) => (seconds == null ? null : seconds / medians[column])).filter((share) => share != null);
    const known = row.filter((seconds) => seconds != null);
    const sum = (values) => values.reduce((all, value) => all + value, 0);
    return { rank, worker: page.workers[rank] ?? "", mean: sum(known) / known.length, most: Math.max(...known), over: sum(shares) / shares.length };
  });
  return rows.filter((row) => Number.isFinite(row.over)).sort((one, other) => other.over - one.over).slice(0, EXTREMES);
}

const extremeTable = () => table({
  label: "the slowest ranks",
  key: (row) => row.rank,
  empty: "Nothing is recorded.",
  columns: [
    figure("rank", (row) => count(row.rank)),
    text("worker", (row) => row.worker, { rowHead: true }),
    figure("mean", (row) => duration(row.mean)),
    figure("longest", (row) => duration(row.most)),
    figure("over the median", (row) => `${row.over >= 1 ? "+" : ""}${((row.over - 1) * 100).toFixed(1)} %`),
  ],
});

const windowTable = () => table({
  label: "windows, newest first",
  key: (row) => `${row.epoch} ${row.first}`,
  empty: "No window yet: a tenth of the iterations is recorded, and ten make one.",
  columns: [
    part("when", (row) => moment(row.at), (row) => row.at),
    text("iterations", (row) => `${count(row.first)} to ${count(row.last)}`, { rowHead: true }),
    figure("workers", (row) => count(row.world_size)),
    figure("S", (row) => row.slowdown.toFixed(3)),
    figure("waste", (row) => percent(row.waste)),
    text("slow", (row) => (row.slow ? "slow" : "well")),
    text("diagnosis", (row) => words(row.diagnosis) || "\u2013"),
    text("worker", (row) => row.worker || "\u2013"),
    part("cure", (row) => linked(row.cure), (row) => row.cure, { wide: true }),
    text("problems", (row) => row.problems.join("; "), { wide: true }),
  ],
});
