// The last lines of a worker, in a panel beside the page.

import { get, path } from "./api.js";
import { h, put } from "./dom.js";
import { problem } from "./status.js";

const LINES = 200;
let panel = null;

export function closeLog() {
  panel?.remove();
  panel = null;
}

export function openLog(node, worker) {
  const back = document.activeElement;
  closeLog();
  const body = h("div", { class: "log-body" }, h("p", { class: "none" }, "Asking \u2026"));
  const leave = () => {
    closeLog();
    back?.focus?.();
  };
  const refresh = h("button", { type: "button", click: () => load() }, "Refresh");
  panel = h("aside", { class: "log", "aria-label": `log of ${worker}`, "data-log": worker, keydown: (event) => event.key === "Escape" && leave() },
    h("header", null, h("h2", { tabindex: "-1" }, `${worker} on ${node}`), refresh, h("button", { type: "button", "data-close": true, click: leave }, "Close")),
    body);
  document.body.append(panel);
  panel.querySelector("h2").focus();
  const mine = panel;

  async function load() {
    refresh.disabled = true;
    try {
      const log = await get(`/api${path("nodes", node, "workers", worker, "log")}?lines=${LINES}`);
      if (mine !== panel) return;
      const lines = h("pre", { tabindex: "0", role: "group", "aria-label": "last lines" });
      put(lines, log.lines.join("\n") || "It has written nothing.");
      body.replaceChildren(lines);
      lines.scrollTop = lines.scrollHeight;
    } catch (error) {
      body.replaceChildren(problem(error.message));
    }
    refresh.disabled = false;
  }
  load();
}
