// What changed, as far back as the console remembers.

import { get } from "../api.js";
import { h, put } from "../dom.js";
import { plural } from "../format.js";
import { feed, heading } from "../parts.js";

const MOST = 1000; // the console has no more

export default function eventsPage(place) {
  place.title("events");
  const head = heading("Events");
  const filter = h("input", { type: "search", "aria-label": "Filter the events", placeholder: "filter: a node, a task, a kind, a word \u2026", input: () => show() });
  const list = feed("events, newest first", { whole: true });
  place.main.append(head.box, h("p", { class: "hint" }, "What changed, newest first. Every fact and command of the journal, in a terminal: ", h("code", null, "unicron events")),
    h("div", { class: "filter" }, filter), list.box);
  let earlier = [];
  let latest = [];

  function show() {
    const wanted = filter.value.trim().toLowerCase();
    const from = latest[0]?.position ?? Infinity;
    const all = [...earlier.filter((event) => event.position < from), ...latest];
    const text = (event) => `${event.kind} ${event.source} ${event.text} ${event.chain}`;
    const fit = wanted ? all.filter((event) => text(event).toLowerCase().includes(wanted)) : all;
    list.set(fit.slice(-MOST).reverse());
    put(head.state, wanted ? `${fit.length} of ${plural(all.length, "event")}` : plural(all.length, "event"));
  }

  place.cluster((page) => {
    latest = page.events;
    show();
  });
  // Older ones than those that the cluster's page begins with; without them the page is what it is.
  get(`/api/events?limit=${MOST}`).then((found) => {
    earlier = found;
    show();
  }, () => {});
}
