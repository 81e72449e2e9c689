// Losses by iteration: what was computed twice lies over itself, and so do tasks that began at other times.

import { lineChart } from "./chart.js";
import { h } from "./dom.js";
import { count, number, words } from "./format.js";
import { path } from "./api.js";

const points = (progress) => progress.map(([, iteration, loss]) => [iteration, loss]);

/** Return progress as parts that each go forward; a new one begins where a task went back to an earlier iteration. */
function forwards(progress) {
  const found = [];
  for (const point of progress) {
    if (!found.length || point[1] <= found.at(-1).at(-1)[1]) found.push([]);
    found.at(-1).push(point);
  }
  return found;
}

/** Return the lines of a task's page: [the newest, earlier ones]. */
function lines(page) {
  const parts = [...page.earlier.flatMap(forwards), ...forwards(page.progress)];
  return [points(parts.pop() ?? []), parts.map((part) => ({ points: points(part), kind: "earlier" }))];
}

/** Where failures were, by the iteration that the task was in. */
const marks = (page) => page.failures.flatMap((failure) => {
  const before = page.progress.findLast(([at]) => at <= failure.at);
  return before ? [{ x: before[1], href: path("failures", failure.chain), strong: failure.severity === 1,
    text: `${words(failure.status)} ${failure.worker || failure.node}` }] : [];
});

const key = (kind, text) => h("li", null, h("i", { class: `line-key ${kind}`, "aria-hidden": "true" }), text);

/** The losses of a task, with those of its earlier attempts. */
export function losses() {
  const chart = lineChart({ label: "by iteration; marks are failures", show: number, across: count, height: 200 });
  const legend = h("ul", { class: "legend", hidden: true }, key("", "now"), key("earlier", "earlier attempts"));
  return { box: h("div", null, chart.box, legend), set(page) {
    const [newest, earlier] = lines(page);
    legend.hidden = !earlier.length;
    chart.set(newest, marks(page), earlier);
  } };
}

/** The losses of two tasks. `set(pages)`: of both, in the order of their names. */
export function lossesOfTwo(names) {
  const chart = lineChart({ label: "by iteration", show: number, across: count, height: 240 });
  const legend = h("ul", { class: "legend" }, key("", names[0]), key("beside", names[1]));
  return { box: h("div", null, chart.box, legend), set([one, other]) {
    chart.set(lines(one)[0], [], [{ points: lines(other)[0], kind: "beside" }]);
  } };
}
