// The live connection: connects, listens, and connects again.

import { get } from "./api.js";

const FIRST_S = 0.2;
const LONGEST_S = 5;
const SILENCE_MS = 20_000; // after so much of it the server is asked whether it is still there

/**
 * Listen to a page of the server.
 * @param {string} path of the socket.
 * @param {{whole?: Function, changes?: Function, gone?: Function, state: Function}} on `state` gets "connecting",
 *   "live" or "lost"; the others get what came.
 * @returns {Function} that ends it.
 */
export function connect(path, on) {
  let socket = null;
  let wait = FIRST_S;
  let ended = false;
  let retry = 0;
  let heard = performance.now();

  function open() {
    clearTimeout(retry);
    heard = performance.now();
    socket = new WebSocket(`${location.protocol === "https:" ? "wss" : "ws"}://${location.host}${path}`);
    const mine = socket;
    mine.addEventListener("message", (event) => mine === socket && take(event.data));
    mine.addEventListener("close", () => mine === socket && lost());
  }

  function take(text) {
    heard = performance.now();
    const frame = JSON.parse(text);
    if ("away" in frame) {
      on.state(frame.away ? "lost" : "live", frame.away);
      return;
    }
    if ("gone" in frame) {
      close();
      on.state("live");
      on.gone?.(frame.gone);
      return;
    }
    wait = FIRST_S;
    if ("whole" in frame) on.whole?.(frame.whole);
    else if ("changes" in frame) on.changes?.(frame.changes);
    on.state("live");
  }

  function lost() {
    socket = null;
    if (ended) return;
    on.state("lost");
    clearTimeout(retry);
    // Half of it by chance: after a restart of the server not all pages come back in the same moment.
    retry = setTimeout(open, wait * (500 + 500 * Math.random()));
    wait = Math.min(LONGEST_S, wait * 2);
  }

  function drop() {
    const old = socket;
    socket = null;
    old?.close();
  }

  // A connection whose other end has vanished is silent, as is one of a cluster in which nothing happens.
  const watch = setInterval(async () => {
    if (!socket || performance.now() - heard < SILENCE_MS) return;
    const doubted = socket;
    heard = performance.now();
    try {
      await get("/api/access");
    } catch (error) {
      if (error.status === 0 && doubted === socket) {
        drop();
        lost();
      }
    }
  }, 2_000);

  const hurry = () => {
    if (!socket && !ended && !document.hidden) open();
  };
  addEventListener("online", hurry);
  document.addEventListener("visibilitychange", hurry);

  function close() {
    ended = true;
    clearTimeout(retry);
    clearInterval(watch);
    removeEventListener("online", hurry);
    document.removeEventListener("visibilitychange", hurry);
    drop();
  }

  on.state("connecting");
  open();
  return close;
}
