// One node: what runs on it, what its GPUs count, and what it has cost.

import { path } from "../api.js";
import { h, keyed, put, redo } from "../dom.js";
import { count, gpuTime, number, words } from "../format.js";
import { openLog, closeLog } from "../log.js";
import { buttons } from "../orders.js";
import { badge, facts, failureTable, feed, heading, moment, section, taskLink, taskSwatch } from "../parts.js";
import { figure, part, table, text } from "../table.js";

export default function nodePage(place) {
  const node = place.argument;
  place.title(node);
  const head = heading(node, "node");
  const whom = h("select", { "aria-label": "whom to hit" });
  const orders = buttons((may) => offered(node, may, whom));
  const alarm = h("p", { class: "problem", hidden: true });
  const list = facts();
  const slots = slotTable(node);
  const gpus = h("div");
  const failures = failureTable("failures on this node, newest first", "No failure on it that the console remembers.");
  const history = feed("what was said of it, newest first");
  place.main.append(head.box, orders.box, alarm, list.list,
    section("Slots", slots.box), section("GPUs", gpus), section("Failures", failures.box), section("History", history.box));
  place.closing(orders.close);
  place.closing(closeLog);
  let counted = null;
  let names = "";

  place.live(`/api/live${path("nodes", node)}`, (page) => {
    const square = page.square;
    redo(head.state, square.state, () => badge(square.state));
    alarm.hidden = !square.alarm;
    put(alarm, square.alarm ?? "");
    list.set({
      host: page.host, rack: page.rack, domain: page.domain, slots: `${count((square.slots ?? []).length)}${page.kind ? ` of kind ${page.kind}` : ""}`,
      [`${square.state} since`]: { sign: page.since, build: () => moment(page.since) },
      "cost of its failures": gpuTime(page.cost_s),
    });
    slots.set((square.slots ?? []).map((task, slot) => ({ slot, task, worker: page.workers.find((one) => one.slot === slot) })));
    keyed(whom, ["", ...page.workers.map((one) => one.worker)], (worker) => worker, (worker) => h("option", { value: worker }, worker || "the node"));
    const sign = Object.keys(page.gpus[0]?.counters ?? {}).join();
    if (!counted || sign !== names) gpus.replaceChildren((counted = gpuTable(Object.keys(page.gpus[0]?.counters ?? {}))).box);
    names = sign;
    counted.set(page.gpus);
    failures.set(page.failures);
    history.set(page.history);
  });
}

function slotTable(node) {
  return table({
    label: "slots",
    key: (row) => row.slot,
    empty: "It has no slots.",
    columns: [
      figure("slot", (row) => count(row.slot)),
      part("task", (row) => (row.task ? [taskSwatch(row.task), taskLink(row.task)] : "free"), (row) => row.task, { rowHead: true }),
      text("worker", (row) => row.worker?.worker ?? "\u2013"),
      figure("rank", (row) => count(row.worker?.rank)),
      figure("replica", (row) => count(row.worker?.replica)),
      figure("place", (row) => count(row.worker?.place)),
      part("log", (row) => row.worker && h("button", { type: "button", "data-worker": row.worker.worker, click: () => openLog(node, row.worker.worker) }, "last lines"), (row) => row.worker?.worker ?? ""),
    ],
  });
}

const gpuTable = (names) => table({
  label: "what GPUs count",
  key: (gpu) => gpu.slot,
  empty: "Its agent has reported no GPU.",
  columns: [
    figure("slot", (gpu) => count(gpu.slot)),
    ...names.map((name) => figure(words(name.replace(UNIT, "")), (gpu) => reading(name, gpu.counters[name]))),
  ],
});

const UNIT = /_(c|w)$/;
const SHOWN = {
  temperature_c: (value) => `${Math.round(value)} \u00b0C`,
  power_w: (value) => `${Math.round(value)} W`,
  memory_used: (value) => `${(value / 2 ** 30).toFixed(1)} GiB`,
};

function reading(name, value) {
  if (value != null && SHOWN[name]) return SHOWN[name](value);
  return value == null || Number.isInteger(value) ? count(value) : number(value);
}

function offered(node, may, whom) {
  const plain = (order, name) => ({ order, name, wanted: () => ({ target: node }) });
  const choices = [plain("drain", "Drain"), plain("undrain", "Undrain")];
  if (!may.faults.length) return choices;
  const fault = h("select", { "aria-label": "fault to inject" }, may.faults.map((name) => h("option", { value: name }, name)));
  return [...choices, {
    order: "break", name: "Break", before: h("span", { class: "choices" }, fault, " ", whom),
    wanted: () => ({ target: node, worker: whom.value, value: fault.value }),
  }];
}
