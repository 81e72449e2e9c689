// Tables whose rows stay while their figures change.

import { attr, h, keyed, put, redo } from "./dom.js";

/** A column of text. */
export const text = (head, of, extra) => ({ head, set: (cell, row) => put(cell, of(row)), ...extra });

/** A column of figures, set to the right. */
export const figure = (head, of, extra) => text(head, of, { num: true, ...extra });

/** A column of elements, which are made anew only where `sign` of the row changes. */
export const part = (head, build, sign, extra) => ({
  head,
  set: (cell, row) => redo(cell, sign(row), () => build(row)),
  ...extra,
});

/**
 * Make a table in a box that scrolls by itself: a phone must not scroll the page sideways.
 * @param {{label: string, columns: object[], key: Function, empty?: string, rowAttributes?: Function, cards?: boolean}} of
 *   `cards`: on a phone each row is a card. Roles are said aloud since tables laid out otherwise lose theirs.
 * @returns {{box: Element, set: Function}} `set(rows)` shows rows.
 */
export function table({ label, columns, key, empty = "Nothing.", rowAttributes, cards = false }) {
  const body = h("tbody", { role: "rowgroup" });
  const none = h("p", { class: "none" }, empty);
  const heads = columns.map((column) => h("th", { scope: "col", role: "columnheader", class: column.num && "num" }, column.head));
  const kind = [cards && "cards", columns.some((column) => column.wide) && "full"].filter(Boolean).join(" ");
  const grid = h("table", { class: kind || null, role: "table" }, h("caption", { class: "unseen" }, label),
    h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, heads)), body);
  const scroll = h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": label }, grid);
  const build = () => h("tr", { role: "row" }, columns.map(cell));
  const cell = (column) => h(column.rowHead ? "th" : "td", {
    scope: column.rowHead && "row", role: column.rowHead ? "rowheader" : "cell", "data-head": column.head,
    class: [column.num && "num", column.wide && "wide"].filter(Boolean).join(" ") || null,
  });
  const set = (line, row) => {
    columns.forEach((column, index) => column.set(line.cells[index], row));
    for (const [name, value] of Object.entries(rowAttributes?.(row) ?? {})) attr(line, name, value);
  };
  return {
    box: h("div", null, scroll, none),
    set(rows) {
      scroll.hidden = !rows.length;
      none.hidden = rows.length > 0;
      keyed(body, rows, key, build, set);
    },
  };
}
