// The box that finds nodes, tasks and failures by a part of their names.

import { path } from "./api.js";
import { attr, h } from "./dom.js";
import { words } from "./format.js";
import { go } from "./router.js";
import { cluster } from "./store.js";

const MOST = 12;

function find(wanted) {
  const page = cluster();
  const low = wanted.trim().toLowerCase();
  if (!page || !low) return [];
  const found = [];
  const take = (names, kind, to) => {
    for (const [name, more] of names) {
      if (found.length >= MOST) return;
      if (`${name} ${more}`.toLowerCase().includes(low)) found.push({ name, kind, more, to: to(name) });
    }
  };
  // What is called exactly that comes first: "node-1" must not hide behind node-10 to node-19.
  if (page.nodes.has(wanted.trim())) found.push({ name: wanted.trim(), kind: "node", more: "", to: path("nodes", wanted.trim()) });
  take([...page.tasks.keys()].map((name) => [name, ""]), "task", (name) => path("tasks", name));
  const failures = page.failures.map((line) => [line.chain, `${words(line.status)} ${line.node} ${line.worker} ${line.tasks.join(" ")}`]);
  take(failures, "failure", (chain) => path("failures", chain));
  take([...page.nodes.keys()].map((name) => [name, ""]), "node", (name) => path("nodes", name));
  return found.filter((one, index) => found.findIndex((other) => other.to === one.to) === index);
}

export function start() {
  const box = document.getElementById("search");
  const list = document.getElementById("found");
  let found = [];
  let at = 0;

  function show() {
    list.hidden = !box.value.trim();
    attr(box, "aria-expanded", String(!list.hidden && found.length > 0));
    attr(box, "aria-activedescendant", found.length ? `found-${at}` : null);
    list.replaceChildren(...found.map((one, index) =>
      h("li", { id: `found-${index}`, role: "option", "aria-selected": String(index === at), pointerdown: (event) => (event.preventDefault(), open(one)) },
        h("span", { class: "kind" }, one.kind), one.name, one.more && h("small", null, ` ${one.more}`))));
    if (!found.length) list.replaceChildren(h("li", { role: "option", "aria-disabled": "true", "aria-selected": "false" }, "Nothing of that name."));
  }

  function open(one) {
    box.value = "";
    found = [];
    show();
    box.blur();
    go(one.to);
  }

  box.addEventListener("input", () => {
    [found, at] = [find(box.value), 0];
    show();
  });
  box.addEventListener("blur", () => (list.hidden = true));
  box.addEventListener("focus", show);
  box.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step && found.length) at = (at + step + found.length) % found.length;
    else if (event.key === "Enter" && found[at]) return open(found[at]);
    else if (event.key === "Escape") return (box.value = ""), box.blur();
    else return;
    event.preventDefault();
    show();
  });
}
