// The plan in force, what comes after each next event, and what would be if.

import { post } from "../api.js";
import { attr, h, keyed, put } from "../dom.js";
import { byNumber, count, flops } from "../format.js";
import { heading, linked, section, taskLink } from "../parts.js";
import { problem } from "../status.js";
import { cluster } from "../store.js";
import { figure, part, table } from "../table.js";

const CHOICES = 400; // names that are offered at once

export default function planPage(place) {
  place.title("plan");
  const head = heading("Plan");
  const shown = planView("what comes after each next event");
  place.main.append(head.box, section("The plan in force", shown.words, shown.shares), section("If this comes next", shown.next),
    section("What if", whatIf(place)));
  const again = place.watch("/api/plan", 10, (page) => {
    put(head.state, page.view.plan ? `number ${count(page.view.plan.number)}` : "none yet");
    shown.set(page);
  });
  let known = 0;
  place.cluster((page) => {
    const last = page.events.findLast((event) => event.kind === "PlanDecided")?.position ?? 0;
    if (known && last !== known) again();
    known = last;
  });
}

function planView(label) {
  const list = h("dl", { class: "facts words" });
  const bars = h("div", { class: "bars shares" });
  const shares = h("div", null, h("p", { class: "hint" }, "Workers of each task: an outline before, filled after."), bars);
  const grid = table({
    label,
    key: (row) => row.event,
    empty: "Nothing is prepared.",
    columns: [
      part("event", (row) => linked(row.event), (row) => row.event, { rowHead: true, wide: true }),
      figure("workers", (row) => count(row.workers)),
      part("what changes", (row) => linked(row.changes || "nothing"), (row) => row.changes, { wide: true }),
      figure("expected", (row) => flops(row.waf)),
    ],
  });
  return { words: list, shares, next: grid.box, set(page) {
    keyed(list, page.words.map(([name, sentence]) => ({ name, sentence })), (one) => one.name + one.sentence,
      (one) => h("div", null, h("dt", null, one.name), h("dd", null, linked(one.sentence))));
    setShares(bars, page);
    grid.set(page.table);
  } };
}

function setShares(box, page) {
  const names = [...new Set([...Object.keys(page.before), ...Object.keys(page.shares)])];
  const most = Math.max(1, ...Object.values(page.shares), ...Object.values(page.before));
  const rows = names.map((task) => ({ task, now: page.shares[task] ?? 0, before: page.before[task] ?? 0 }));
  keyed(box, rows, (row) => row.task, (row) => h("div", { class: "bar-row share", "data-share": row.task },
    h("span", { class: "bar-name" }, taskLink(row.task)), h("div", { class: "pair" }, h("i", { class: "was" }), h("i", { class: "is" })), h("span", { class: "bar-figure" })),
  (node, row) => {
    const [was, is] = node.children[1].children;
    was.style.width = `${(100 * row.before) / most}%`;
    is.style.width = `${(100 * row.now) / most}%`;
    put(node.lastChild, row.now === row.before ? count(row.now) : `${count(row.before)} \u2192 ${count(row.now)}`);
    attr(node.lastChild, "class", row.now < row.before ? "bar-figure less" : row.now > row.before ? "bar-figure more-than" : "bar-figure");
  });
}

/** Pick nodes to lose, tasks to finish and nodes to join; the planner says what it would do. Nothing is done. */
function whatIf(place) {
  const lose = chooser("Nodes that are lost", () => [...(cluster()?.nodes ?? [])].filter(([, square]) => square.state !== "left" && square.state !== "lost").map(([name]) => name));
  const finish = chooser("Tasks that end", () => [...(cluster()?.tasks.values() ?? [])].filter((line) => !["finished", "failed"].includes(line.state)).map((line) => line.name));
  const join = h("input", { type: "number", min: "0", max: "100000", value: "0", "aria-label": "nodes that join" });
  const answer = h("div", { class: "answer", role: "status", "data-answer": true });
  const shown = planView("what would come next");
  const ask = h("button", { type: "button", class: "main", "data-ask": true, click: () => send() }, "Ask the planner");

  async function send() {
    const question = { lose: lose.chosen(), join: Math.max(0, Math.trunc(Number(join.value)) || 0), finish: finish.chosen() };
    if (!question.lose.length && !question.join && !question.finish.length) {
      return answer.replaceChildren(problem("Pick a node, a task, or a number of nodes that join."));
    }
    ask.disabled = true;
    try {
      shown.set(await post("/api/what-if", question));
      answer.replaceChildren(h("h3", null, "It would"), shown.words, shown.shares);
    } catch (error) {
      answer.replaceChildren(problem(error.message));
    }
    ask.disabled = false;
  }
  place.cluster((_, changed) => {
    if (changed.shape || !lose.filled) lose.fill();
    finish.fill();
  });
  return h("div", { class: "what-if" }, h("p", { class: "hint" }, "Nothing is done: the planner only answers."),
    lose.box, finish.box, h("label", { class: "field-label" }, "Nodes that join ", join), h("div", { class: "buttons" }, ask), answer);
}

function chooser(title, names) {
  const picked = new Set();
  const list = h("div", { class: "choices-of" });
  const filter = h("input", { type: "search", "aria-label": `${title}: filter`, placeholder: "filter", input: () => fill() });
  const hint = h("small", { class: "hint" });
  const build = (name) => h("button", { type: "button", class: "choice", "aria-pressed": "false", "data-choice": name, click: (event) => {
    if (!picked.delete(name)) picked.add(name);
    attr(event.currentTarget, "aria-pressed", String(picked.has(name)));
  } }, name);

  function fill() {
    const all = byNumber(names());
    const there = new Set(all);
    for (const name of picked) if (!there.has(name)) picked.delete(name);
    const wanted = filter.value.trim().toLowerCase();
    const fitting = all.filter((name) => name.toLowerCase().includes(wanted));
    // Who is picked stays in sight, whatever the filter says.
    const shown = byNumber([...new Set([...picked, ...fitting.slice(0, CHOICES)])]);
    keyed(list, shown, (name) => name, build);
    filter.hidden = all.length <= 12;
    put(hint, fitting.length > CHOICES ? `${count(fitting.length)} of them: use the filter` : all.length ? "" : "none");
  }
  const box = h("fieldset", null, h("legend", null, title), filter, list, hint);
  return { box, fill, chosen: () => [...picked], get filled() {
    return list.childElementCount > 0;
  } };
}
