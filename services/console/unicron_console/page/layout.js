// The workers of a task: a row a replica, a column a place in it. A click shows what a worker last wrote.

import { attr, h, keyed, put } from "./dom.js";
import { count } from "./format.js";
import { openLog } from "./log.js";

const ROWS = 100; // replicas that are shown before somebody asks for all

export function layout() {
  const grid = h("div", { class: "replicas", role: "list", "aria-label": "replicas" });
  const all = h("button", { type: "button", click: () => ((most = Infinity), show()) });
  const box = h("div", null, h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "workers by replica and place" }, grid), all);
  let most = ROWS;
  let rows = [];

  const row = ([replica]) => h("div", { class: "replica", role: "listitem" }, h("span", { class: "replica-name" }, `replica ${replica}`), h("div", { class: "places" }));

  const cell = (worker) =>
    h("button", { type: "button", class: "worker", "data-worker": worker.worker, click: () => openLog(worker.node, worker.worker) }, h("b"), h("small"));

  function fill(node, worker) {
    put(node.firstChild, `${worker.node}:${worker.slot}`);
    put(node.lastChild, `rank ${worker.rank}`);
    attr(node, "title", `${worker.worker}, rank ${worker.rank}, place ${worker.place}: show its log`);
  }

  function show() {
    keyed(grid, rows.slice(0, most), ([replica]) => replica, row, (node, [, workers]) =>
      keyed(node.lastChild, workers, (worker) => worker.worker, cell, fill));
    all.hidden = rows.length <= most;
    put(all, `show all ${count(rows.length)} replicas`);
  }

  return { box, set(workers) {
    rows = [...byReplica(workers)].sort(([one], [other]) => one - other);
    for (const [, members] of rows) members.sort((one, other) => one.place - other.place);
    show();
  } };
}

function byReplica(workers) {
  const found = new Map();
  for (const worker of workers) {
    if (!found.has(worker.replica)) found.set(worker.replica, []);
    found.get(worker.replica).push(worker);
  }
  return found;
}
