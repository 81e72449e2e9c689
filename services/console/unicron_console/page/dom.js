// Makes and changes elements. Data comes in as text nodes and attributes only, never as HTML: names, log lines and
// tracebacks hold whatever a program has written.

const COLOURS = /\u001b\[[0-9;:]*m/g; // of terminals: they say nothing without one
// Control characters (but for tab and newline), and those that turn or hide text.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

/** Return text as it may be shown: nothing in it is invisible, and nothing moves its neighbours. */
export function clean(text) {
  return String(text)
    .replaceAll("\r\n", "\n")
    .replace(COLOURS, "")
    .replace(HIDDEN, (sign) => {
      const code = sign.charCodeAt(0);
      // As a terminal writes them: ^G, ^[, ^?.
      if (code < 0x20 || code === 0x7f) return `^${String.fromCharCode(code ^ 0x40)}`;
      return `<U+${code.toString(16).toUpperCase().padStart(4, "0")}>`;
    });
}

function make(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value == null || value === false) continue;
    if (typeof value === "function") node.addEventListener(name, value);
    else node.setAttribute(name, value === true ? "" : clean(value));
  }
  for (const child of children.flat(2)) {
    if (child == null || child === false) continue;
    node.append(child instanceof Node ? child : clean(child));
  }
  return node;
}

/** Make an element of HTML. A function among the attributes listens to the event of that name. */
export const h = (tag, attributes, ...children) => make(document.createElement(tag), attributes, children);

/** Make an element of SVG. */
export const s = (tag, attributes, ...children) =>
  make(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

/** Set a text where it is another one: an unchanged page must cost nothing. */
export function put(node, text) {
  const cleaned = clean(text);
  if (node.textContent !== cleaned) node.textContent = cleaned;
  return node;
}

/** Set an attribute where it is another one; null takes it away. */
export function attr(node, name, value) {
  if (value == null || value === false) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, clean(value));
  return node;
}

/** Replace what is in `node`, but only where `sign` is not what it was the last time. */
export function redo(node, sign, build) {
  if (node.unicronSign === sign) return;
  node.unicronSign = sign;
  node.replaceChildren();
  make(node, null, [build()]);
}

/**
 * Make the children of `parent` those of `items`. A child lives as long as its key is there, so focus, selection and
 * open details stay; `set` is called where its item is another object than before.
 */
export function keyed(parent, items, keyOf, build, set) {
  const before = (parent.unicronKeys ??= new Map());
  const after = new Map();
  let place = parent.firstChild;
  for (const item of items) {
    const key = keyOf(item);
    if (after.has(key)) continue;
    let known = before.get(key);
    if (!known) known = { node: build(item), item: null };
    after.set(key, known);
    before.delete(key);
    if (known.item !== item) set?.(known.node, item);
    known.item = item;
    if (known.node === place) place = place.nextSibling;
    else parent.insertBefore(known.node, place);
  }
  for (const { node } of before.values()) node.remove();
  parent.unicronKeys = after;
}
