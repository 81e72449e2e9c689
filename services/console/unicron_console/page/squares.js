// Every node as a square. All are drawn on one canvas, of which only what changed is drawn again: 16,384 elements with
// slots would stutter. Links lie over it: one for each node while they are few, else one that follows mouse and keys.

import { path } from "./api.js";
import { attr, clean, h, keyed, put } from "./dom.js";
import { byNumber, plural } from "./format.js";
import { colour, labels, lookOf, paint } from "./paint.js";
import { recolour } from "./theme.js";

const MOST_LINKS = 1000;
const NAMED = 80; // squares as large as this have their names below
const SIZES = [[32, 92], [96, 42], [400, 24], [1000, 16], [4096, 11], [Infinity, 8]]; // up to so many nodes, pixels

/** Return a square in words. */
export function describe(name, square) {
  const held = new Map();
  for (const task of square.slots ?? []) held.set(task, (held.get(task) ?? 0) + 1);
  const shares = [...held].map(([task, slots]) => `${task || "free"} ${slots}`);
  return [`${name}: ${square.state}`, shares.length && `slots: ${shares.join(", ")}`, square.alarm].filter(Boolean).join(". ");
}

export function squares() {
  const canvas = h("canvas", { "aria-hidden": "true" });
  const links = h("div", { class: "links" });
  const tip = h("p", { class: "tip", "aria-hidden": "true" });
  const field = h("div", { class: "field" }, canvas, links);
  const box = h("div", { class: "squares" }, tip, h("div", { class: "scroll field-scroll", tabindex: "-1" }, field));
  const pen = canvas.getContext("2d");
  let page = null;
  let names = [];
  let places = new Map();
  let only = ""; // the task that is to stand out
  let told = new Map(); // what is written on whose slots
  let holders = "";
  let size = 0;
  let across = 1;
  let roving = null;

  function lay() {
    const width = box.clientWidth;
    if (!width || !page) return;
    size = SIZES.find(([most]) => names.length <= most)[1];
    across = Math.max(1, Math.floor(width / size));
    const rows = Math.ceil(names.length / across);
    const sharp = Math.min(devicePixelRatio || 1, names.length > MOST_LINKS ? 2 : 3);
    canvas.width = across * size * sharp;
    canvas.height = Math.max(1, rows * size * sharp);
    for (const node of [canvas, field]) {
      node.style.width = `${across * size}px`;
      node.style.height = `${rows * size}px`;
    }
    pen.setTransform(sharp, 0, 0, sharp, 0, 0);
    names.forEach(draw);
    link();
  }

  const spot = (index) => [(index % across) * size, Math.floor(index / across) * size];

  function draw(name, index) {
    const [x, y] = spot(index);
    pen.clearRect(x, y, size, size);
    if (size >= NAMED) write(name, x, y);
    paint(pen, x, y, size - (size >= NAMED ? 22 : size > 20 ? 4 : 1), page.nodes.get(name),
      { look: (task) => lookOf(page.tasks.get(task)), label: (task) => told.get(task), only });
  }

  /** Learn which tasks hold slots; return whether others do than before, as then all is written anew. */
  function tell() {
    const names = [...page.tasks.values()].filter((line) => line.workers).map((line) => line.name);
    if (names.join() === holders) return false;
    holders = names.join();
    told = labels(names);
    return true;
  }

  function write(name, x, y) {
    pen.fillStyle = colour("dim");
    pen.font = "11px system-ui, sans-serif";
    pen.textAlign = "left";
    pen.textBaseline = "alphabetic";
    const short = name.length > 13 ? `\u2026${name.slice(-12)}` : name;
    pen.fillText(clean(short), x, y + size - 8, size - 6);
  }

  function link() {
    const shown = names.length <= MOST_LINKS ? names : roving ? [roving] : names.slice(0, 1);
    keyed(links, shown, (name) => (names.length <= MOST_LINKS ? name : ""), anchor, set);
    for (const name of shown) dress(links.unicronKeys.get(names.length <= MOST_LINKS ? name : "").node, name);
  }

  const anchor = () => h("a", { tabindex: "-1" });

  function set(node, name) {
    attr(node, "href", path("nodes", name));
    attr(node, "data-node", name);
  }

  function dress(node, name) {
    const [x, y] = spot(places.get(name));
    Object.assign(node.style, { left: `${x}px`, top: `${y}px`, width: `${size - 1}px`, height: `${size - 1}px` });
    const square = page.nodes.get(name);
    attr(node, "data-state", square.state);
    attr(node, "aria-label", describe(name, square));
    attr(node, "title", describe(name, square));
    attr(node, "tabindex", name === (roving ?? names[0]) ? "0" : "-1");
  }

  function look(name) {
    if (!places.has(name)) return;
    const before = roving;
    roving = name;
    put(tip, describe(name, page.nodes.get(name)));
    if (names.length > MOST_LINKS) link();
    else for (const one of [before ?? names[0], name]) if (places.has(one)) dress(links.unicronKeys.get(one).node, one);
  }

  const pointed = (event) => {
    const edge = field.getBoundingClientRect();
    const column = Math.floor((event.clientX - edge.left) / size);
    return column < across ? names[Math.floor((event.clientY - edge.top) / size) * across + column] : undefined;
  };
  field.addEventListener("pointermove", (event) => look(pointed(event)));
  field.addEventListener("pointerdown", (event) => look(pointed(event)));
  links.addEventListener("focusin", (event) => look(event.target.dataset.node));
  links.addEventListener("keydown", (event) => {
    const at = places.get(event.target.dataset.node);
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: across, ArrowUp: -across }[event.key];
    const to = event.key === "Home" ? 0 : event.key === "End" ? names.length - 1 : step && at + step;
    if (to == null || !names[to]) return;
    event.preventDefault();
    look(names[to]);
    links.querySelector('a[tabindex="0"]').focus();
  });
  new ResizeObserver(lay).observe(box);
  recolour(box, lay);

  return {
    box,
    /** Show the nodes of the page; `changed` says which changed. */
    set(now, changed) {
      page = now;
      const other = tell();
      if (other || changed.shape || names.length !== page.nodes.size) {
        names = byNumber([...page.nodes.keys()]);
        places = new Map(names.map((name, index) => [name, index]));
        attr(box, "data-count", names.length);
        return lay();
      }
      for (const name of changed.nodes) {
        const index = places.get(name);
        if (index === undefined) continue;
        draw(name, index);
        const node = links.unicronKeys?.get(names.length <= MOST_LINKS ? name : "")?.node;
        if (node?.dataset.node === name) dress(node, name);
      }
      if (changed.nodes.has(roving)) put(tip, describe(roving, page.nodes.get(roving)));
    },
    /** Let a task stand out; empty for none. */
    only(task) {
      only = task;
      names.forEach(draw);
    },
    summary: () => plural(names.length, "node"),
  };
}
