// Whether what is shown is current. What is not is grey, and says since when.

import { now } from "./clock.js";
import { h, put } from "./dom.js";
import { time } from "./format.js";

const states = new Map(); // of connections and of what is asked again and again, by name
let current = 0; // Unix seconds at which all was as shown
let away = false; // the console answers, and the cluster does not answer it

/** Return a function that takes the state of the connection `name`: connecting, live, lost, or null when it is over. */
export function follow(name) {
  const key = Symbol(name);
  return (state, since = 0) => {
    if (states.get(key) === state) return;
    if (state === "lost" && ![...states.values()].includes("lost")) {
      away = since > 0;
      current = since || now();
    }
    if (state === null) states.delete(key);
    // What was lost stays so until it is live: trying is not having.
    else if (!(state === "connecting" && states.get(key) === "lost")) states.set(key, state);
    show();
  };
}

function show() {
  const all = [...states.values()];
  const state = all.includes("lost") ? "lost" : all.includes("connecting") ? "connecting" : "live";
  put(document.getElementById("live"), state);
  document.body.dataset.live = state;
  const banner = document.getElementById("lost");
  banner.hidden = state !== "lost";
  const what = away ? "NATS does not answer, so nothing is known of the cluster" : "Connection lost";
  if (state === "lost") put(banner, `${what}. What you see is as of ${time(current)}. Trying again \u2026`);
  else put(banner, "");
}

/** Say that the journal is still being read. */
export function behind(entries) {
  const place = document.getElementById("behind");
  place.hidden = !entries;
  put(place, entries ? `Reading the journal: ${entries.toLocaleString("en")} entries to go. Figures are not complete yet.` : "");
}

/** Say through which parts of the cluster nothing gets. */
export function ailing(lines) {
  const place = document.getElementById("ailing");
  place.hidden = !lines.length;
  put(place, lines.join(" \u00b7 "));
}

/** A line that says what went wrong, for the place where it did. */
export const problem = (text) => h("p", { class: "problem", role: "alert" }, text);
