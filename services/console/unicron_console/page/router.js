// Which page is shown. Links are links: a plain click is taken over, all else is the browser's.

import { get } from "./api.js";
import { h, put } from "./dom.js";
import { connect } from "./live.js";
import { now, sync } from "./clock.js";
import { time } from "./format.js";
import { follow, problem } from "./status.js";
import { cluster, known, listen } from "./store.js";
import { healing } from "./merge.js";
import clusterPage from "./pages/cluster.js";
import comparePage from "./pages/compare.js";
import eventsPage from "./pages/events.js";
import failurePage from "./pages/failure.js";
import failuresPage from "./pages/failures.js";
import goodputPage from "./pages/goodput.js";
import nodePage from "./pages/node.js";
import nodesPage from "./pages/nodes.js";
import planPage from "./pages/plan.js";
import stragglersPage, { overview } from "./pages/stragglers.js";
import taskPage from "./pages/task.js";
import tasksPage from "./pages/tasks.js";

const ROUTES = [
  [/^\/$/, "cluster", clusterPage],
  [/^\/tasks$/, "tasks", tasksPage],
  [/^\/tasks\/([^/]+)$/, "task", taskPage],
  [/^\/compare\/([^/]+)$/, "compare", comparePage],
  [/^\/failures$/, "failures", failuresPage],
  [/^\/failures\/([^/]+)$/, "failure", failurePage],
  [/^\/nodes$/, "nodes", nodesPage],
  [/^\/nodes\/([^/]+)$/, "node", nodePage],
  [/^\/events$/, "events", eventsPage],
  [/^\/plan$/, "plan", planPage],
  [/^\/stragglers$/, "stragglers", overview],
  [/^\/stragglers\/([^/]+)$/, "stragglers", stragglersPage],
  [/^\/goodput$/, "goodput", goodputPage],
];

const PATIENCE_MS = 1_000;

let leave = () => {};
let name = "";

/** Put the name of the page and the failures that are being healed into the title. */
export function title() {
  const open = cluster() ? healing(cluster().failures).length : 0;
  const text = `${open ? `(${open}) ` : ""}${name} \u00b7 Unicron`;
  if (document.title !== text) document.title = text;
}

function place(page, argument) {
  const closing = [];
  const main = document.getElementById("main");
  main.replaceChildren();
  main.dataset.page = page;
  main.classList.remove("stale");
  const closed = () => closing.splice(0).forEach((close) => close());
  const missing = (text) => {
    closed();
    main.replaceChildren(h("h1", { tabindex: "-1" }, name), problem(text), h("p", null, h("a", { href: "/" }, "To the cluster")));
  };
  leave = closed;
  return {
    main,
    argument,
    missing,
    /** Call this when the page is left. */
    closing: (close) => closing.push(close),
    /** Listen to the cluster for as long as the page is shown. */
    cluster: (listener) => closing.push(listen(listener)),
    title(text) {
      name = text;
      title();
    },
    /** Listen to a page of the server that is sent anew whenever it changes. */
    live(path, show) {
      const state = follow(path);
      closing.push(connect(path, { state, gone: missing, whole: (whole) => (sync(whole.now), show(whole)) }), () => state(null));
    },
    /** Ask again and again. Returns what asks at once. */
    watch(path, seconds, show) {
      const state = follow(path);
      let timer = 0;
      let ended = false;
      let current = 0;
      const trouble = problem("");
      const again = async () => {
        clearTimeout(timer);
        try {
          const found = await get(path);
          if (ended) return;
          state("live");
          current = now();
          trouble.remove();
          main.classList.remove("stale");
          show(found);
        } catch (error) {
          if (ended) return;
          if (error.status === 404) return missing(error.message);
          if (!error.status) state("lost");
          else {
            // The console is there, but not who knows the answer: what is shown is old, and is asked for again.
            state("live");
            put(trouble, current ? `${error.message} What you see is as of ${time(current)}.` : error.message);
            if (!trouble.isConnected) main.prepend(trouble);
            main.classList.add("stale");
          }
        }
        clearTimeout(timer);
        if (!ended) timer = setTimeout(() => (document.hidden ? waitUntilSeen() : again()), seconds * 1000);
      };
      const waitUntilSeen = () => document.addEventListener("visibilitychange", () => ended || again(), { once: true });
      closing.push(() => {
        ended = true;
        clearTimeout(timer);
        state(null);
      });
      state("connecting");
      again();
      return again;
    },
  };
}

function show(focus) {
  leave();
  const [found, page, build] = match() ?? [[], "missing", ({ missing }) => missing("There is no such page.")];
  let argument = "";
  try {
    argument = decodeURIComponent(found[1] ?? "");
  } catch {
    argument = found[1];
  }
  name = argument || page;
  build(place(page, argument));
  title();
  for (const link of document.querySelectorAll("nav a")) {
    const to = new URL(link.href).pathname;
    if (to === location.pathname) link.setAttribute("aria-current", "page");
    else if (to !== "/" && location.pathname.startsWith(`${to}/`)) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  }
  if (focus) {
    scrollTo(0, 0);
    document.querySelector("#main h1")?.focus({ preventScroll: true });
    put(document.getElementById("said"), name);
  }
}

function match() {
  for (const [pattern, page, build] of ROUTES) {
    const found = pattern.exec(location.pathname);
    if (found) return [found, page, build];
  }
  return null;
}

export function go(path) {
  if (path !== location.pathname) history.pushState(null, "", path);
  show(true);
}

export function start() {
  document.addEventListener("click", (event) => {
    const link = event.target.closest?.("a[href]");
    if (!link || event.defaultPrevented || event.button || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
    const to = new URL(link.getAttribute("href"), location.href);
    if (to.origin !== location.origin || (to.pathname === location.pathname && to.hash)) return;
    event.preventDefault();
    go(to.pathname);
  });
  addEventListener("popstate", () => show(true));
  listen(title);
  // Names become links, and tasks get their colours, by what is known of the cluster: a moment of waiting is worth it.
  // Who waits for longer sees what there is, and the page is made anew when the cluster is known.
  let shown = false;
  const begin = () => {
    shown = true;
    show(false);
  };
  const late = setTimeout(begin, PATIENCE_MS);
  known.then(() => {
    clearTimeout(late);
    if (!shown || document.getElementById("main").dataset.page !== "cluster") begin();
  });
}
