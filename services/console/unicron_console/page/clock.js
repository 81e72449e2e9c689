// The time of the cluster, and all that changes with it alone.

let offset = 0; // seconds by which the server's clock is ahead of this machine's
const ticking = new Set();

/** Take over the server's time: ages must be right on a phone whose clock is not. */
export function sync(server) {
  if (server) offset = server - Date.now() / 1000;
}

/** Unix seconds by the server's clock. */
export const now = () => Date.now() / 1000 + offset;

/** Call `show(node)` now and a few times a second, for as long as the node is in the page. */
export function tick(node, show) {
  show(node);
  ticking.add({ node, show, seen: false });
  return node;
}

const calm = matchMedia("(prefers-reduced-motion: reduce)");
let beats = 0;

setInterval(() => {
  beats += 1;
  // What is shown is as of the last answer; clocks that run on would say that something is known which is not.
  if (document.hidden || document.body.dataset.live === "lost" || (calm.matches && beats % 4)) return;
  for (const entry of ticking) {
    if (entry.node.isConnected) {
      entry.seen = true;
      entry.show(entry.node);
    } else if (entry.seen) ticking.delete(entry);
    else entry.seen = true; // made in this moment, perhaps; the next beat decides
  }
}, 250);
