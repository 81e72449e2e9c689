// One task: how it fares, where its workers are, and where its time went.

import { get, path } from "../api.js";
import { lineChart } from "../chart.js";
import { attr, h, keyed, put, redo } from "../dom.js";
import { count, duration, flops, gpuTime, left, number, percent, plural, words } from "../format.js";
import { layout } from "../layout.js";
import { closeLog } from "../log.js";
import { losses } from "../losses.js";
import { buttons } from "../orders.js";
import { badge, failureLink, failureTable, facts, heading, linked, moment, pre, section, taskSwatch } from "../parts.js";
import { bar, legend, lost, phaseTable, sorted } from "../phases.js";
import { figure, part, table, text } from "../table.js";

const OVER = new Set(["finished", "failed"]); // of these the planner knows no curve any more

export default function taskPage(place) {
  const task = place.argument;
  place.title(task);
  const head = heading(task, "task");
  const orders = buttons(() => offered(task));
  const list = facts();
  const slow = h("p", { class: "problem", hidden: true });
  const drill = h("p", { class: "hint", hidden: true });
  const withheld = h("p", { class: "hint", hidden: true });
  const own = h("div");
  const loss = losses();
  const costs = costTable();
  const settings = h("dl", { class: "facts words" });
  const beside = besideAnother(task);
  const times = lineChart({ label: "marks are failures", show: duration, zero: true });
  const workers = layout();
  const attempts = attemptTable();
  const failures = failureTable("failures of this task, newest first", "No failure has hit it.");
  const key = legend();
  const time = bar(task, gpuTime);
  const gone = bar(`what ${task} lost`, gpuTime);
  const phases = phaseTable("GPU time by phase");
  const curve = curvePart();
  place.main.append(head.box, orders.box, slow, drill, withheld, own, list.list,
    h("div", { class: "two" }, section("Loss", loss.box), section("Iteration time", times.box)),
    section("Configuration", settings, beside.box),
    section("Workers", workers.box),
    section("Failures", costs.box, failures.box),
    section("Where its GPU time went", time.line, h("p", { class: "hint" }, "And what of it was lost, without training and idle time:"), gone.line, key.list, phases.box),
    section("Attempts", attempts.box),
    section("Plan curve", curve.box),
    h("p", null, h("a", { href: path("stragglers", task) }, "Stragglers: workers that slow it down")));
  place.closing(orders.close);
  place.closing(closeLog);

  place.cluster((page) => beside.set(page.tasks));
  place.live(`/api/live${path("tasks", task)}`, (page) => {
    const { line } = page;
    redo(head.state, `${line.state}${line.paused}${line.colour}`, () => [taskSwatch(task), badge(line.state), line.paused && badge("paused")]);
    slow.hidden = !line.slow;
    put(slow, line.slow ? `Slow: ${line.slow}` : "");
    drill.hidden = !line.drill;
    put(drill, line.drill ? `Drill: ${line.drill}` : "");
    withheld.hidden = !line.withheld;
    put(withheld, line.withheld);
    redo(own, page.traceback, () => page.traceback && section("Its own error", pre([page.traceback], "traceback")));
    list.set(figures(page));
    const marks = page.failures.map((failure) => ({
      x: failure.at, href: path("failures", failure.chain), strong: failure.severity === 1,
      text: `${words(failure.status)} ${failure.worker || failure.node}`,
    }));
    loss.set(page);
    costs.set(Object.entries(page.causes).map(([cause, seconds]) => ({ cause, seconds, share: seconds / page.whole_s })));
    keyed(settings, page.configuration, ([name, text]) => `${name} ${text}`, ([name, text]) => h("div", null, h("dt", null, name), h("dd", null, text)));
    times.set(page.progress.map(([at, , , seconds]) => [at, seconds]), marks);
    workers.set(page.workers);
    attempts.set(page.attempts);
    failures.set(page.failures);
    time.set(page.seconds);
    gone.set(lost(page.seconds));
    key.set(sorted(page.seconds).map(([phase]) => phase));
    phases.set(page.seconds);
    if (!OVER.has(line.state)) curve.moved(`${line.workers} ${page.attempts[0]?.epoch}`, task);
  });
}

/** What there is to say of a task in figures, each in one text. */
export function figures({ line, layout: shape, kept, recomputed, whole_s: whole, workers, struck, causes }) {
  const gone = Object.values(causes).reduce((sum, seconds) => sum + seconds, 0);
  const all = line.iterations ? ` of ${count(line.iterations)}` : "";
  return {
    iterations: line.iteration < 0 ? (line.iterations ? "none finished yet" : "\u2013") : `${count(line.iteration + 1)}${all}`,
    loss: number(line.loss),
    "an iteration": line.iteration_s ? duration(line.iteration_s) : "\u2013",
    "time left": left(line.left),
    workers: `${count(line.workers)} (${line.min_workers} to ${line.max_workers})`,
    layout: shape,
    weight: String(line.weight),
    WAF: `${flops(line.waf)}; the plan's estimate is ${flops(line.planned_waf)}`,
    goodput: percent(line.goodput),
    "GPU time": `${gpuTime(whole)}, ${gpuTime(gone)} of it lost; ${plural(struck, "failure")}`,
    "microbatches at regroups": kept + recomputed ? `${count(kept)} kept, ${count(recomputed)} computed again` : "",
    why: line.reason,
    "at this moment": workers.length ? "" : "no worker computes",
  };
}

/** What its time was lost to; the rows add up to what the bar shows as lost. */
const costTable = () => table({
  label: "what its time was lost to",
  key: (row) => row.cause,
  empty: "Nothing was lost.",
  cards: true,
  columns: [
    text("lost to", (row) => words(row.cause) || "no failure: starts", { rowHead: true }),
    figure("GPU time", (row) => gpuTime(row.seconds)),
    figure("of all its time", (row) => percent(row.share)),
  ],
});

function besideAnother(task) {
  const choice = h("select", { "aria-label": "another task", change: () => open() });
  const link = h("a", { href: "/", hidden: true, "aria-hidden": "true" });
  const box = h("p", null, h("label", null, "Beside another task: ", choice), link);
  const open = () => {
    if (!choice.value) return;
    attr(link, "href", path("compare", `${task},${choice.value}`));
    link.click();
  };
  return { box, set(tasks) {
    const others = [...tasks.keys()].filter((name) => name !== task);
    box.hidden = !others.length;
    keyed(choice, ["", ...others], (name) => name, (name) => h("option", { value: name }, name || "choose \u2026"));
  } };
}

function attemptTable() {
  return table({
    label: "attempts, newest first",
    key: (attempt) => attempt.epoch,
    empty: "It has not computed yet.",
    columns: [
      figure("membership", (attempt) => count(attempt.epoch)),
      part("since", (attempt) => moment(attempt.at), (attempt) => attempt.at),
      figure("workers", (attempt) => count(attempt.workers)),
      figure("from iteration", (attempt) => count(attempt.iteration)),
      figure("kept", (attempt) => count(attempt.kept)),
      figure("computed again", (attempt) => count(attempt.recomputed)),
      figure("lasted", (attempt) => (attempt.until == null ? "computes" : duration(attempt.until - attempt.at))),
      part("why it ended", (attempt) => [...linked(attempt.why), attempt.ended && [" ", failureLink(attempt.ended, "what ended it")]].flat(),
        (attempt) => attempt.why + attempt.ended, { wide: true }),
    ],
  });
}

function curvePart() {
  const chart = lineChart({ label: "What the planner expects: WAF by number of workers", show: flops, across: (x) => count(Math.round(x)), zero: true, dots: true });
  const grid = table({
    label: "points of the curve",
    key: (point) => point.workers,
    columns: [
      figure("workers", (point) => count(point.workers)),
      figure("throughput", (point) => flops(point.flops)),
      figure("WAF", (point) => flops(point.waf)),
      { head: "from", set: (cell, point) => put(cell, point.spread ? `${point.source}, \u00b1 ${percent(point.spread)}` : point.source) },
      { head: "how", set: (cell, point) => put(cell, point.text) },
    ],
  });
  const said = h("p", { class: "hint", role: "status" });
  let known = "";
  return {
    box: h("div", null, chart.box, said, h("details", null, h("summary", null, "Its points"), grid.box)),
    /** Ask for the curve where the task has moved on it. */
    async moved(sign, task) {
      if (sign === known) return;
      known = sign;
      try {
        const curve = await get(`/api${path("tasks", task, "curve")}`);
        chart.set(curve.points.map((point) => [point.workers, point.waf]), [{ x: curve.held, text: `now: ${curve.held} workers`, strong: true }]);
        grid.set(curve.points);
        put(said, curve.points.length ? `It holds ${count(curve.held)} workers now: the mark.` : "The planner has no curve of it.");
      } catch (error) {
        put(said, `No curve: ${error.message}`);
      }
    },
  };
}

function offered(task) {
  const plain = (order, name) => ({ order, name, wanted: () => ({ target: task }) });
  const iteration = h("input", { type: "number", min: "0", "aria-label": "iteration to rewind to", placeholder: "iteration", input: () => attr(iteration, "aria-invalid", null) });
  return [
    plain("save", "Save"), plain("pause", "Pause"), plain("resume", "Resume"), plain("stop", "Stop"),
    { order: "rewind", name: "Rewind", before: iteration, wanted: () => {
      if (iteration.value !== "") return { target: task, value: iteration.value };
      attr(iteration, "aria-invalid", "true");
      iteration.focus();
      return null;
    } },
  ];
}
