// The cluster at a glance.

import { now, tick } from "../clock.js";
import { attr, h, keyed, put, redo } from "../dom.js";
import { count, flops, percent, plural, stopwatch, words } from "../format.js";
import { healing } from "../merge.js";
import { failureLink, failureTable, feed, heading, section, swatchOf } from "../parts.js";
import { lineChart } from "../chart.js";
import { squares } from "../squares.js";
import { sinceLooked } from "../seen.js";
import { taskTable } from "../tasks.js";

const LEGEND = 40; // tasks that are named under the squares: as many as have a look of their own

export default function clusterPage(place) {
  place.title("cluster");
  const head = heading("Cluster");
  const figures = bigFigures();
  const seen = sinceLooked();
  const nodes = squares();
  const key = taskLegend((task) => nodes.only(task));
  const tasks = taskTable();
  const failures = failureTable("the last failures, newest first", "No failure so far.");
  const events = feed("what changed, newest first");
  const empty = emptyCluster();
  const observing = h("p", { class: "banner warn", hidden: true, "data-observing": true },
    "Observe only: this cluster obeys its users and says what it would do by itself, but does nothing of that.");
  place.main.append(head.box, observing, empty, figures.box, seen.box,
    section("Nodes", nodes.box, key.box, h("p", null, h("a", { href: "/nodes" }, "All nodes"))),
    section("Tasks", tasks.box),
    section("Last failures", failures.box, h("p", null, h("a", { href: "/failures" }, "All failures"))),
    section("What changed", events.box, h("p", null, h("a", { href: "/events" }, "All events"))));

  place.cluster((page, changed) => {
    figures.set(page, changed);
    seen.set(page);
    nodes.set(page, changed);
    key.set(page);
    tasks.set(page.tasks);
    const open = healing(page.failures);
    failures.set([...open, ...page.failures.filter((line) => line.over)].slice(0, 12 + open.length));
    events.set(page.events.slice(-60).reverse());
    empty.hidden = page.tasks.size > 0;
    observing.hidden = !page.observe_only;
    put(head.state, changed.shape || !head.state.textContent ? nodes.summary() : head.state.textContent);
  });
}

function emptyCluster() {
  return h("div", { class: "panel first", hidden: true, "data-empty": true },
    h("h2", null, "No task yet"),
    h("p", null, "Launch the first one from a terminal, with a task file:"),
    h("pre", { tabindex: "0", "aria-label": "command" }, "unicron submit FILE"));
}

function bigFigures() {
  const tile = (name, id) => {
    const value = h("strong", { class: "value" }, "\u2013");
    const more = h("span", { class: "more" });
    const title = h("h2", null, name);
    const box = h("div", { class: "tile", "data-figure": id }, title, value, more);
    return { box, title, value, more };
  };
  const healed = tile("Being healed", "healing");
  const waf = tile("WAF", "waf");
  waf.box.title = "weighted achieved aggregate FLOP/s of all tasks: how fast they are";
  const goodput = tile("Goodput", "goodput");
  const nodes = tile("Nodes", "nodes");
  const slots = tile("Spare slots", "spares");
  const tasks = tile("Tasks running", "tasks");
  const course = lineChart({ label: "Goodput over time", show: percent, top: 1, height: 130 });
  const box = h("div", { class: "figures" }, healed.box, waf.box, goodput.box, nodes.box, slots.box, tasks.box,
    h("div", { class: "tile wide" }, course.box));
  let drawn = null;
  return { box, set(page, changed) {
    const open = healing(page.failures);
    const lost = [...page.nodes].filter(([, node]) => node.state === "lost").map(([name]) => name).sort();
    // What nothing heals is not "being healed", and no 0 stands over it.
    const waiting = !open.length && lost.length > 0;
    put(healed.title, waiting ? "Waiting for you" : "Being healed");
    put(healed.value, waiting ? plural(lost.length, "node") : count(open.length));
    const waits = forSomebody(page, lost);
    redo(healed.more, [...open.map((line) => line.chain), waits].join(), () => openFailures(open, waits));
    attr(healed.box, "class", open.length || waits ? "tile alarm" : "tile calm");
    const [amount, unit = ""] = flops(page.waf).split(" ");
    redo(waf.value, `${amount} ${unit}`, () => [h("span", null, amount), h("small", null, ` ${unit}`)]);
    put(waf.more, page.possible_waf ? `speed now; the plan's estimate is ${flops(page.possible_waf)}` : "of tasks whose FLOP/s are known");
    put(goodput.value, percent(page.goodput));
    put(goodput.more, "of GPU time was training, however fast");
    if (changed.shape || changed.nodes.size) {
      const states = tally(page.nodes);
      put(nodes.value, count(states.up ?? 0));
      put(nodes.more, `up${said(states, ["suspected", "draining", "lost", "left"])}`);
    }
    put(slots.value, count(page.spares));
    put(slots.more, `of ${count(page.slots)} slots that are up`);
    const running = tally(page.tasks);
    put(tasks.value, count(running.running ?? 0));
    put(tasks.more, `of ${count(page.tasks.size)}${said(running, ["recovering", "reconfiguring", "starting", "waiting", "failed", "finished"])}`);
    if (page.course !== drawn) course.set((drawn = page.course));
  } };
}

/** What no service can mend: which nodes wait for somebody, and which tasks have less than they could use. */
function forSomebody(page, lost) {
  const few = healing(page.failures).length ? [] : [...page.tasks.values()].filter((line) => line.state === "running" && line.workers < line.max_workers);
  return [
    lost.length && `${lost.slice(0, 3).join(", ")}${lost.length > 3 ? ` and ${count(lost.length - 3)} more` : ""} ${lost.length > 1 ? "wait" : "waits"} for you: see to the machine, then start its agent`,
    lost.length && few.length && few.slice(0, 3).map((line) => `${line.name} has ${count(line.workers)} of ${count(line.max_workers)} workers`).join(", "),
  ].filter(Boolean).join("; ");
}

/** What is being healed, and for how long already: the first thing that somebody wants to know. */
function openFailures(open, waits) {
  if (!open.length) return waits || "all is well";
  const shown = open.slice(0, 3).map((line) => h("div", null,
    failureLink(line.chain, words(line.status)), ` ${line.worker || line.node} `,
    tick(h("span", { class: "clock" }), (node) => put(node, stopwatch(now() - line.at)))));
  return [...shown, open.length > shown.length && h("div", null, `and ${count(open.length - shown.length)} more`), waits && h("div", null, waits)];
}

function tally(items) {
  const found = {};
  for (const { state } of items.values()) found[state] = (found[state] ?? 0) + 1;
  return found;
}

const said = (states, names) =>
  names.filter((name) => states[name]).map((name) => `, ${count(states[name])} ${name}`).join("");

/** Which colour is which task, and what the squares' shapes mean. A click lets one task stand out. */
export function taskLegend(choose) {
  const list = h("ul", { class: "legend tasks" });
  const more = h("p", { class: "hint" });
  const shapes = h("ul", { class: "legend shapes", "aria-label": "shapes of nodes" },
    ["up", "suspected", "draining", "lost", "left", "alarm"].map((state) => h("li", null, h("i", { class: `shape shape-${state}`, "aria-hidden": "true" }), state)));
  let chosen = "";
  const pick = (name) => {
    chosen = chosen === name ? "" : name;
    choose(chosen);
    for (const button of list.querySelectorAll("button")) attr(button, "aria-pressed", String(button.dataset.pick === chosen));
  };
  const build = (line) => h("li", null,
    h("button", { type: "button", class: "plain", "aria-pressed": "false", "data-pick": line.name, title: "let it stand out", click: () => pick(line.name) },
      swatchOf(line), line.name));
  return { box: h("div", { class: "keys-of-nodes" }, list, more, shapes), set(page) {
    const holding = [];
    for (const line of page.tasks.values()) if (line.workers && holding.length < LEGEND) holding.push(line);
    keyed(list, holding, (line) => `${line.name} ${line.colour}`, build);
    put(more, page.tasks.size > holding.length ? `${plural(page.tasks.size - holding.length, "more task")} in the table below; point at a node to see whose its slots are.` : "");
  } };
}
