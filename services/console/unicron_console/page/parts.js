// Pieces that several pages show.

import { path } from "./api.js";
import { now, tick } from "./clock.js";
import { h, keyed, put, redo } from "./dom.js";
import { ago, duration, fullTime, gpuTime, plural, stopwatch, time, words } from "./format.js";
import { lookOf } from "./paint.js";
import { cluster } from "./store.js";
import { figure, part, table, text } from "./table.js";

export const nodeLink = (node) => h("a", { href: path("nodes", node), "data-node": node }, node);
export const taskLink = (task) => h("a", { href: path("tasks", task), "data-task": task }, task);
export const failureLink = (chain, text) => h("a", { href: path("failures", chain), "data-failure": chain }, text);

export function swatchOf(line) {
  const { task, print } = lookOf(line);
  return h("i", { class: `swatch task-${task} print-${print}`, "aria-hidden": "true" });
}

/** The swatch of a task; its look is the same on all pages. */
export function taskSwatch(task) {
  const line = cluster()?.tasks.get(task);
  return swatchOf(line);
}

/** A state in its colour, with a sign before it: colour alone is nothing to many. */
export const badge = (state) => h("span", { class: `badge is-${state}` }, words(state));

export const severity = (number) =>
  h("span", { class: `badge severity-${number}`, title: SEVERITIES[number] ?? "" }, `SEV${number}`);

const SEVERITIES = {
  1: "severity 1: reconfigure without the node",
  2: "severity 2: start the process again",
  3: "severity 3: attempt again in place",
};

/** A moment: the time of day, and how long ago. */
export const moment = (at) =>
  at
    ? h("span", { class: "moment" }, h("time", { datetime: new Date(at * 1000).toISOString(), title: fullTime(at) }, time(at)), " ",
        tick(h("small"), (node) => put(node, ago(at))))
    : h("span", null, "\u2013");

/** Text in which the names of nodes and tasks are links. */
export function linked(sentence) {
  const page = cluster();
  if (!page) return [sentence];
  return sentence.split(/([\w.-]*\w)/).map((word) => {
    if (page.nodes.has(word)) return nodeLink(word);
    return page.tasks.has(word) ? taskLink(word) : word;
  });
}

/** What is to be said of how a failure ended; it runs while it is being healed. */
export function outcome(line) {
  if (line.recovered_s != null) return h("span", { class: "good" }, `recovered in ${duration(line.recovered_s)}`);
  if (line.over) return h("span", null, "over");
  return h("strong", { class: "healing" }, "healing ",
    tick(h("span", { class: "clock" }), (node) => put(node, stopwatch(now() - line.at))));
}

export const outcomeSign = (line) => `${line.recovered_s} ${line.over} ${line.at}`;

/** Where a failure was. */
export function where(line) {
  const places = [];
  if (line.worker) places.push(line.worker, " on ");
  if (line.node) places.push(nodeLink(line.node));
  else if (line.worker) places.pop();
  return places.length ? places : ["\u2013"];
}

export function failureTable(label, empty) {
  return table({
    label,
    empty,
    cards: true,
    key: (line) => line.chain,
    rowAttributes: (line) => ({ "data-failure": line.chain, class: line.over ? null : "open" }),
    columns: [
      part("when", (line) => moment(line.at), (line) => line.at),
      part("severity", (line) => severity(line.severity), (line) => line.severity),
      part("what", (line) => failureLink(line.chain, words(line.status)), (line) => line.status, { rowHead: true }),
      part("where", where, (line) => `${line.node} ${line.worker}`),
      part("tasks", (line) => spaced(line.tasks.map(taskLink)), (line) => line.tasks.join(" ")),
      part("how it ended", outcome, outcomeSign),
      figure("cost", (line) => gpuTime(line.cost_s)),
      text("reason", (line) => line.text, { wide: true }),
    ],
  });
}

export const spaced = (nodes) => nodes.flatMap((node, index) => (index ? [", ", node] : [node]));

/**
 * What the journal tells, one message an entry. `begun`: show seconds since then instead of times; `open`: show the
 * lines at once; `chain`: of the page, to which nothing needs to link; `whole`: it is the page, and needs no bar of its own.
 */
export function feed(label, { begun, open = false, chain = "", whole = false } = {}) {
  const list = h("ol", { class: whole ? "feed whole" : "feed", "aria-label": label });
  const none = h("p", { class: "none" }, "Nothing yet.");
  const build = (event) => h("li", { "data-kind": event.kind, "data-position": event.position },
    h("span", { class: "at" }, begun == null ? moment(event.at) : `+${duration(Math.max(0, event.at - begun))}`),
    h("span", { class: "kind" }, event.kind),
    h("span", { class: "by" }, linked(event.source)),
    h("div", { class: "said" }, linked(event.text), event.chain !== chain && about(event), lines(event, open)));
  return { box: h("div", null, list, none), set(items) {
    none.hidden = items.length > 0;
    keyed(list, items, (event) => event.position, build);
  } };
}

function about(event) {
  if (event.kind === "PlanDecided") return [" ", h("a", { href: "/plan" }, "plan")];
  const failed = event.chain && cluster()?.failures.some((line) => line.chain === event.chain);
  return failed ? [" ", failureLink(event.chain, "failure")] : [];
}

function lines(event, open) {
  if (!event.lines.length) return null;
  const box = pre(event.lines, `lines of ${event.kind}`);
  return open ? box : h("details", null, h("summary", null, plural(event.lines.length, "line")), box);
}

/** Lines that a program wrote, as they are. */
export const pre = (rows, label) =>
  h("pre", { tabindex: "0", role: "group", "aria-label": label }, rows.join("\n"));

/** A part of a page with its heading. */
export function section(title, ...children) {
  const id = `part-${title.toLowerCase().replace(/[^a-z]+/g, "-")}`;
  return h("section", { "aria-labelledby": id }, h("h2", { id }, title), children);
}

/** Pairs of a name and what it is. `set({name: text or [nodes, sign]})`. */
export function facts() {
  const list = h("dl", { class: "facts" });
  return {
    list,
    set(values) {
      const entries = Object.entries(values).filter(([, value]) => value !== "" && value != null);
      keyed(list, entries, ([name]) => name, ([name]) => h("div", null, h("dt", null, name), h("dd")), (box, [, value]) => {
        if (typeof value === "object") redo(box.lastChild, value.sign, value.build);
        else put(box.lastChild, value);
      });
    },
  };
}

/** A heading that takes the focus when a page opens, with a state beside it. */
export function heading(text, kind) {
  const state = h("span", { class: "state" });
  const box = h("header", { class: "page-head" }, kind && h("p", { class: "kind-of" }, kind), h("h1", { tabindex: "-1" }, text), state);
  return { box, state, title: box.querySelector("h1") };
}

