// The cluster as it is known now, for all pages. One connection for as long as the window lives.

import { sync } from "./clock.js";
import { connect } from "./live.js";
import { keep, merge } from "./merge.js";
import { follow } from "./status.js";

let page = null;
let dirty = new Set();
let shaped = true;
let planned = false;
let first = null;
const listeners = new Set();

/** Kept when the cluster is known for the first time. */
export const known = new Promise((keep) => (first = keep));

/** The page of the cluster; null before it is known. */
export const cluster = () => page;

/** Call `listener` once a frame with what changed: `listener(page, {nodes: Set, shape})`. Returns what ends it. */
export function listen(listener) {
  listeners.add(listener);
  if (page) listener(page, { nodes: new Set(), shape: true });
  return () => listeners.delete(listener);
}

function show() {
  planned = false;
  const changed = { nodes: dirty, shape: shaped };
  dirty = new Set();
  shaped = false;
  for (const listener of [...listeners]) listener(page, changed);
}

function plan() {
  if (planned) return;
  planned = true;
  // A hidden window gets no frames, but its title must still show failures.
  if (document.hidden) setTimeout(show, 200);
  else requestAnimationFrame(show);
}

export function start() {
  connect("/api/live/cluster", {
    state: follow("cluster"),
    whole(whole) {
      sync(whole.now);
      page = keep(whole);
      first();
      shaped = true;
      plan();
    },
    changes(changes) {
      if (!page) return;
      sync(changes.now);
      const { nodes, shape } = merge(page, changes);
      for (const name of nodes) dirty.add(name);
      shaped ||= shape;
      plan();
    },
  });
}
