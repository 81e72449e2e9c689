// All failures that the console remembers.

import { healing } from "../merge.js";
import { put, h } from "../dom.js";
import { plural } from "../format.js";
import { failureTable, heading } from "../parts.js";

export default function failures(place) {
  place.title("failures");
  const head = heading("Failures");
  const filter = h("input", { type: "search", "aria-label": "Filter the failures", placeholder: "filter: a node, a task, a kind \u2026", input: () => show() });
  const grid = failureTable("failures, newest first", "No failure so far, or none that fits.");
  place.main.append(head.box, h("div", { class: "filter" }, filter), grid.box);
  let all = [];

  function show() {
    const wanted = filter.value.trim().toLowerCase();
    const text = (line) => `${line.status.replaceAll("_", " ")} ${line.node} ${line.worker} ${line.tasks.join(" ")} sev${line.severity} ${line.text}`;
    grid.set(wanted ? all.filter((line) => text(line).toLowerCase().includes(wanted)) : all);
    const open = healing(all).length;
    put(head.state, `${plural(all.length, "failure")}, ${open ? `${open} being healed` : "none being healed"}`);
  }

  const again = place.watch("/api/failures", 30, (found) => {
    all = found;
    show();
  });
  let known = "";
  place.cluster((page) => {
    // The list of the cluster is short and live; when it changes, all of it is asked for again.
    const sign = page.failures.map((line) => `${line.chain}${line.over}${line.severity}`).join();
    if (known && sign !== known) again();
    known = sign;
  });
}
