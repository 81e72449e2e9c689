// Says new failures to who does not see them, and says how much of the journal is still to be read.

import { put } from "./dom.js";
import { words } from "./format.js";
import { ailing, behind } from "./status.js";
import { listen } from "./store.js";

const PAUSE_MS = 5_000; // a storm of failures must not talk without an end

let known = null;
let waiting = [];
let planned = false;

function say() {
  planned = false;
  if (!waiting.length) return;
  const [first, ...more] = waiting.splice(0);
  const place = [first.worker, first.node].filter(Boolean).join(" on ");
  const text = `Failure: ${words(first.status)} ${place}${more.length ? `, and ${more.length} more` : ""}`;
  put(document.getElementById("said"), text);
  planned = true;
  setTimeout(say, PAUSE_MS);
}

export function start() {
  listen((page) => {
    behind(page.behind);
    ailing(page.ailing);
    const fresh = page.failures.filter((line) => known && !known.has(line.chain));
    if (!known || fresh.length) known = new Set([...(known ?? []), ...page.failures.map((line) => line.chain)]);
    waiting.push(...fresh);
    if (!planned) say();
  });
}
