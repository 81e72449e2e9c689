// Dark or light: as the system has it, unless somebody chose.

const KEY = "unicron.theme";
const drawn = new Map(); // what is drawn by scripts, and so has the colours of the theme in it

/** Call `draw` whenever the theme changes, for as long as the node is in the page. */
export function recolour(node, draw) {
  for (const known of drawn.keys()) if (!known.isConnected) drawn.delete(known);
  drawn.set(node, draw);
}

function redraw() {
  for (const [node, draw] of drawn) if (node.isConnected) draw();
}

export function start() {
  const chosen = localStorage.getItem(KEY);
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
  document.getElementById("theme").addEventListener("click", () => {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    localStorage.setItem(KEY, root.dataset.theme);
    redraw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
}
