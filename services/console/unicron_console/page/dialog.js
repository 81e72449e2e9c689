// Dialogs. The browser's own element keeps the focus inside and gives it back.

import { h } from "./dom.js";

/**
 * Open a dialog.
 * @param {string} title
 * @param {Node[]} children
 * @param {{name: string, act: Function, id?: string}} button that does something beside closing; `act(dialog)`.
 */
export function ask(title, children, button) {
  const close = () => dialog.close();
  const dialog = h("dialog", { "aria-labelledby": "dialog-title" },
    h("h2", { id: "dialog-title" }, title),
    children,
    h("div", { class: "buttons" },
      h("button", { type: "button", click: close, "data-close": true }, button ? "Cancel" : "Close"),
      button && h("button", { type: "button", class: "main", "data-sure": true, click: () => button.act(dialog) }, button.name)));
  dialog.addEventListener("close", () => dialog.remove());
  // A click beside it: the target is the dialog itself only where none of its content lies.
  dialog.addEventListener("pointerdown", (event) => {
    const edge = dialog.getBoundingClientRect();
    const inside = event.clientX >= edge.left && event.clientX <= edge.right && event.clientY >= edge.top && event.clientY <= edge.bottom;
    if (event.target === dialog && !inside) close();
  });
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}
