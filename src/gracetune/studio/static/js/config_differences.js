/** Where the configurations of runs differ: a row for each key, a column for each run. */

import { card, el, emptyState, fmt } from "./ui.js";

/** @param {any} value */
function shown(value) {
  if (value === null || value === undefined) return el("span", { class: "note" }, "not set");
  return el("span", { class: "mono" }, typeof value === "string" ? value : JSON.stringify(value));
}

/** @param {any[]} runs @param {{key: string, values: Record<string, any>}[]} found */
export function differences(runs, found) {
  if (runs.length < 2) return card("Differences of the configurations", {}, emptyState("One run is chosen", "Add another one to see where they differ."));
  if (found.length === 0) return card("Differences of the configurations", {}, emptyState("The configurations are equal", "Only names and folders differ."));
  const head = el("tr", null, el("th", { scope: "col" }, "Key"), runs.map((row, at) => el("th", { scope: "col" },
    el("span", { class: "row nowrap" }, el("span", { class: `mark square c${at % 8}`, "aria-hidden": "true" }), row.name))));
  const lines = found.map(({ key, values }) => {
    const usual = mostCommon(runs.map((row) => JSON.stringify(values[row.id] ?? null)));
    return el("tr", null, el("th", { scope: "row", class: "mono" }, key), runs.map((row) =>
      el("td", { class: usual !== null && JSON.stringify(values[row.id] ?? null) !== usual ? "differs" : null }, shown(values[row.id]))));
  });
  return card("Differences of the configurations", { note: fmt.plural(found.length, "key") },
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Differences of the configurations" },
      el("table", { class: "table differences" }, el("thead", null, head), el("tbody", null, lines))));
}

/** The value that most runs have; null if no two runs have the same. @param {string[]} values */
function mostCommon(values) {
  const counts = new Map();
  for (const value of values) counts.set(value, (counts.get(value) ?? 0) + 1);
  const [value, count] = [...counts].sort((a, b) => b[1] - a[1])[0];
  return count > 1 ? value : null;
}
