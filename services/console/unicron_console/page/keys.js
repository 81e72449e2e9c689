// Keys that lead somewhere, and the list of them.

import { h } from "./dom.js";
import { ask } from "./dialog.js";
import { go } from "./router.js";

const OFF = "unicron.keys";
const PAGES = {
  c: ["/", "cluster"], t: ["/tasks", "tasks"], n: ["/nodes", "nodes"], f: ["/failures", "failures"], e: ["/events", "events"],
  s: ["/stragglers", "stragglers"], g: ["/goodput", "goodput"], p: ["/plan", "plan"],
};

const LIST = [
  ["/", "find a node, a task or a failure"],
  ...Object.entries(PAGES).map(([key, [, name]]) => [`g ${key}`, name]),
  ["?", "these keys"],
  ["Escape", "close what is open"],
  ["arrow keys", "from node to node, where one has the focus"],
];

const allowed = () => localStorage.getItem(OFF) !== "off";

export function help() {
  const box = h("input", { type: "checkbox", change: () => localStorage.setItem(OFF, box.checked ? "on" : "off") });
  box.checked = allowed();
  ask("Keys", [
    h("dl", { class: "keys" }, LIST.map(([key, what]) => h("div", null, h("dt", null, h("kbd", null, key)), h("dd", null, what)))),
    // Who speaks to the machine must be able to keep single letters from acting.
    h("label", null, box, " keys of a single letter are on"),
  ]);
}

export function start() {
  let first = "";
  document.getElementById("keys").addEventListener("click", help);
  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest?.("input, textarea, select, dialog");
    if (typing || event.ctrlKey || event.metaKey || event.altKey || !allowed()) return;
    const before = first;
    first = "";
    if (before === "g" && PAGES[event.key]) go(PAGES[event.key][0]);
    else if (event.key === "g") {
      first = "g";
      setTimeout(() => (first = ""), 1500);
    } else if (event.key === "?") help();
    else if (event.key === "/") {
      event.preventDefault();
      document.getElementById("search").focus();
    }
  });
}
