// What has happened since somebody last looked: for a reader who comes back in the morning.

import { now } from "./clock.js";
import { h, put } from "./dom.js";
import { plural, time } from "./format.js";
import { healing } from "./merge.js";
import { failureTable, feed } from "./parts.js";

const KEY = "unicron.looked";
const TOLD = /^(PlanDecided|Task|NodeGone|NodeLeft|NodeAdmitted|NodeDrained|Alert)/;

export function sinceLooked() {
  let since = Number(localStorage.getItem(KEY)) || 0;
  const said = h("span");
  const failures = failureTable("failures since you last looked", "No failure.");
  const events = feed("events since you last looked");
  const mark = h("button", { type: "button", click: () => look(), "data-seen": true }, "Mark as seen");
  const box = h("details", { class: "panel seen", hidden: true, "data-since": true }, h("summary", null, said), failures.box, events.box, mark);
  let page = null;
  let drawn = "";

  function look() {
    since = now();
    localStorage.setItem(KEY, String(since));
    box.open = false;
    if (page) set(page);
  }

  function set(cluster) {
    page = cluster;
    // Who comes for the first time has missed nothing.
    if (!since) return look();
    const sign = `${since} ${page.failures[0]?.chain} ${healing(page.failures).length} ${page.events.at(-1)?.position}`;
    if (sign === drawn) return;
    drawn = sign;
    const missed = page.failures.filter((line) => line.at > since);
    const recent = page.events.filter((event) => event.at > since && TOLD.test(event.kind));
    box.hidden = !missed.length && !recent.length;
    const open = healing(missed).length;
    const plans = recent.filter((event) => event.kind === "PlanDecided").length;
    put(said, `Since you last looked (${time(since)}): ${plural(missed.length, "failure")}${open ? `, ${open} of them being healed` : missed.length ? ", all over" : ""}, ${plural(plans, "plan")}, ${plural(recent.length - plans, "other event")}`);
    failures.set(missed);
    events.set(recent.slice(-50).reverse());
  }
  return { box, set };
}
