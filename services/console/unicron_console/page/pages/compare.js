// Two tasks side by side: what is set, how they fare, and their losses in one chart.

import { path } from "../api.js";
import { h } from "../dom.js";
import { lossesOfTwo } from "../losses.js";
import { heading, section, taskLink } from "../parts.js";
import { table, text } from "../table.js";
import { figures } from "./task.js";

export default function comparePage(place) {
  const names = place.argument.split(",").slice(0, 2);
  if (names.length < 2) return place.missing("Name two tasks: /compare/ONE,OTHER.");
  place.title(names.join(" and "));
  const head = heading(names.join(" and "), "two tasks");
  const chart = lossesOfTwo(names);
  const now = pairs("how they fare", names);
  const set = pairs("configuration, differences first", names);
  place.main.append(head.box, h("p", null, taskLink(names[0]), " \u00b7 ", taskLink(names[1])),
    section("Loss", chart.box), section("How they fare", now.box), section("Configuration", set.box));
  const pages = [null, null];
  names.forEach((name, index) => place.live(`/api/live${path("tasks", name)}`, (page) => {
    pages[index] = page;
    if (pages.includes(null)) return;
    chart.set(pages);
    now.set(rows(pages.map((each) => ({ state: each.line.state, ...figures(each) }))));
    set.set(rows(pages.map((each) => Object.fromEntries(each.configuration))).sort((one, other) => other.differs - one.differs));
  }));
}

function rows([one, other]) {
  const names = [...new Set([...Object.keys(one), ...Object.keys(other)])];
  const all = names.map((name) => ({ name, one: one[name] || "\u2013", other: other[name] || "\u2013" }));
  return all.filter((row) => row.one !== "\u2013" || row.other !== "\u2013").map((row) => ({ ...row, differs: row.one !== row.other }));
}

const pairs = (label, names) => table({
  label, key: (row) => row.name,
  rowAttributes: (row) => ({ class: row.differs ? "differs" : null }),
  columns: [text("", (row) => row.name, { rowHead: true }), text(names[0], (row) => row.one), text(names[1], (row) => row.other)],
});
