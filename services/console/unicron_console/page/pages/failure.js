// One failure: what happened, what it cost, and what was done, from its first sign to the last worker's return.

import { path } from "../api.js";
import { h, keyed, put, redo } from "../dom.js";
import { duration, gpuTime, plural, words } from "../format.js";
import { facts, feed, heading, linked, moment, outcome, outcomeSign, section, severity, spaced, taskLink, where } from "../parts.js";
import { bar, legend, phaseTable, sorted, total } from "../phases.js";
import { timeline } from "../timeline.js";

export default function failurePage(place) {
  const chain = place.argument;
  place.title("failure");
  const head = heading("Failure", "failure");
  const list = facts();
  const reason = h("p", { class: "lead" });
  const walls = h("div", { class: "bars" });
  const sums = h("p", { class: "hint" });
  const key = legend();
  const phases = phaseTable("GPU time by phase");
  const bars = timeline();
  const plan = h("dl", { class: "facts words" });
  const noPlan = h("p", { class: "none" }, "No plan followed: the workers went on, or started again, where they were.");
  const evidence = feed("evidence", { open: true, chain });
  const messages = h("div");
  const unheard = h("p", { class: "hint" });
  let messagesBox = null;
  place.main.append(head.box, reason, list.list,
    section("What it cost", walls, sums, key.list, phases.box),
    section("Timeline", bars.box),
    section("Evidence", evidence.box),
    section("The plan it led to", plan, noPlan),
    section("The whole chain", h("p", { class: "hint" }, "In seconds since the first sign. The same in a terminal: ", h("code", null, `unicron events --chain ${chain}`)), messages, unheard));

  place.live(`/api/live${path("failures", chain)}`, (page) => {
    const { line } = page;
    place.title(words(line.status));
    put(head.title, page.headline || words(line.status));
    redo(head.state, `${line.severity} ${outcomeSign(line)}`, () => [severity(line.severity), " ", outcome(line)]);
    redo(reason, line.text, () => linked(line.text));
    list.set({
      kind: words(line.status),
      where: { sign: `${line.node} ${line.worker}`, build: () => where(line) },
      tasks: { sign: line.tasks.join(" "), build: () => spaced(line.tasks.map(taskLink)) },
      "first sign": { sign: page.begun, build: () => moment(page.begun) },
      detected: `${duration(Math.max(0, line.at - page.begun))} after it`,
      cost: gpuTime(line.cost_s),
      chain,
    });
    cost(page);
    key.set([...new Set([...sorted(page.seconds), ...Object.values(page.wall).flatMap(sorted)].map(([phase]) => phase))]);
    phases.set(page.seconds);
    bars.set(page);
    noPlan.hidden = page.plan.length > 0;
    keyed(plan, page.plan.map(([label, sentence]) => ({ label, sentence })), (one) => one.label + one.sentence,
      (one) => h("div", null, h("dt", null, one.label), h("dd", null, linked(one.sentence))));
    evidence.set(page.evidence);
    if (!messagesBox) messages.append((messagesBox = feed("messages of the chain", { begun: page.begun, chain })).box);
    messagesBox.set(page.messages);
    put(unheard, page.unheard ? `${plural(page.unheard, "message")} left out.` : "");
  });

  function cost(page) {
    const rows = Object.entries(page.wall).map(([task, seconds]) => ({ task, seconds }));
    const longest = Math.max(...rows.map((row) => total(row.seconds)), 0);
    keyed(walls, rows, (row) => row.task, (row) => {
      const line = bar(row.task);
      const node = h("div", { class: "wall", "data-wall": row.task }, h("div", { class: "bar-row" }, h("span", { class: "bar-name" }, taskLink(row.task)), line.line, h("strong", { class: "bar-figure" })), h("p", { class: "addition" }));
      node.unicronBar = line;
      return node;
    }, (node, row) => {
      node.unicronBar.set(row.seconds, longest);
      put(node.querySelector(".bar-figure"), duration(total(row.seconds)));
      put(node.lastChild, sorted(row.seconds).map(([phase, amount]) => `${words(phase)} ${duration(amount)}`).join(" + ") + ` = ${duration(total(row.seconds))}`);
    });
    put(sums, rows.length ? "Wall time of each task as a whole, from the first sign until it was back at all of its workers. Training is what it did meanwhile with fewer; what it still computed again after that is in it too." : "No task stood still for it.");
  }
}
