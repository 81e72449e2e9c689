// Orders: the name, its rights, and the two steps of doing it.

import { get, keepToken, post, token } from "./api.js";
import { ask } from "./dialog.js";
import { h, put } from "./dom.js";

const NOBODY = { name: "", orders: [], faults: [] };

let access = NOBODY;
const listeners = new Set();

/** Call back with the orders that may be given, now and on each change. Returns what ends it. */
export function allowed(listener) {
  listeners.add(listener);
  listener(access);
  return () => listeners.delete(listener);
}

async function look() {
  access = { ...NOBODY, ...(await get("/api/access")) };
  put(document.getElementById("sign"), token() ? access.name || "Signed in" : "Sign in");
  for (const listener of listeners) listener(access);
}

export function start() {
  document.getElementById("sign").addEventListener("click", () => (token() ? signedIn() : signIn()));
  look().catch((error) => {
    // A token that no longer counts is forgotten, or each page would fail with it.
    if (error.status === 401) keepToken("");
    if (error.status === 401) look().catch(() => {});
  });
}

export function signIn() {
  const field = h("input", { type: "password", autocomplete: "off", required: true, spellcheck: "false", name: "token" });
  const said = h("p", { class: "problem", role: "alert" });
  const enter = async (dialog) => {
    keepToken(field.value.trim());
    try {
      await look();
      if (!access.name && !access.orders.length) throw new Error("No orders may be given with this token.");
      dialog.close();
    } catch (error) {
      keepToken("");
      put(said, error.message);
      look().catch(() => {});
    }
  };
  const dialog = ask("Sign in to give orders", [
    h("p", null, "The token is kept in this tab alone, until it is closed."),
    h("label", { class: "field-label" }, "Token ", field),
    said,
  ], { name: "Sign in", act: (opened) => enter(opened) });
  field.addEventListener("keydown", (event) => event.key === "Enter" && enter(dialog));
  field.focus();
}

function signedIn() {
  ask("Signed in", [
    h("p", null, access.name ? `As ${access.name}.` : "With a token."),
    h("p", null, access.orders.length ? `Orders: ${access.orders.join(", ")}.` : "No orders may be given."),
  ], { name: "Sign out", act: (dialog) => {
    keepToken("");
    dialog.close();
    look().catch(() => {});
  } });
}

/** First say what would happen, then do it where somebody is sure. */
export async function give(wanted, name) {
  const result = h("p", { class: "result", role: "status" }, "Asking what will happen \u2026");
  const dialog = ask(name, [result], { name: "Do it", act: () => send(true) });
  const sure = dialog.querySelector("[data-sure]");
  sure.disabled = true;
  const send = async (really) => {
    sure.disabled = true;
    try {
      const answer = await post("/api/orders", { ...wanted, sure: really });
      if (answer.error) throw new Error(answer.error);
      put(result, answer.text || (really ? "Done." : "Nothing more is known of what will happen."));
      if (really) {
        sure.remove();
        put(dialog.querySelector("[data-close]"), "Close");
      } else sure.disabled = false;
    } catch (error) {
      sure.remove();
      result.className = "problem";
      result.setAttribute("role", "alert");
      put(result, error.message);
    }
  };
  await send(false);
}

/**
 * A row of buttons for orders at a node or a task.
 * @param {Function} choices takes the access, returns [{order, name, wanted: () => object, before?: Node}].
 * @returns {{box: Element, close: Function}}
 */
export function buttons(choices) {
  const box = h("div", { class: "orders", role: "group", "aria-label": "Orders" });
  const show = (may) => {
    const offered = choices(may).filter(({ order }) => may.orders.includes(order));
    const hint = token() ? "Your token allows no orders here." : ["Orders: ", h("button", { type: "button", class: "plain", click: signIn }, "sign in"), " to give some."];
    if (!offered.length) return box.replaceChildren(h("p", { class: "hint" }, hint));
    box.replaceChildren(...offered.map(({ order, name, wanted, before }) =>
      h("span", { class: "order" }, before, h("button", { type: "button", "data-order": order, click: () => {
        const full = wanted();
        if (full) give({ order, ...full }, `${name}: ${full.target}`);
      } }, name))));
  };
  return { box, close: allowed(show) };
}
