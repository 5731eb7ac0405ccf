/** Keys that work on every page. A page marks its search field `data-search` and its rows `data-row`. */

import { helpDialog } from "./dialogs.js";

/** @type {[string, string][]} */
export const KEYS = [
  ["/", "search"],
  ["j  k", "next and previous row"],
  ["Enter", "open the row"],
  ["x", "select the row for comparison"],
  ["n  p", "in the items of a dataset: next and previous page"],
  ["e", "edit the caption of the item; Ctrl+Enter saves it, Esc discards the change"],
  ["Alt+↑  Alt+↓", "in the queue: move the waiting job"],
  ["g r  g c  g n  g q  g m", "go to Runs, Compare, New run, Queue, Machine"],
  ["← →", "in a chart: move along the curve; in samples: change the step"],
  ["Esc", "leave a field, close a dialog, show all of a chart"],
  ["?", "this list"],
];
const GO = { r: "#/runs", c: "#/compare", n: "#/new", q: "#/queue", m: "#/machine" };

let afterG = -Infinity;

/** @param {KeyboardEvent} event */
export function handleKey(event) {
  const target = /** @type {HTMLElement} */ (event.target);
  const typing = target.matches("input:not([type=checkbox]):not([type=range]):not([type=radio]), textarea, select, [contenteditable]");
  if (event.key === "Escape" && typing) target.blur();
  if (typing || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const isGo = performance.now() - afterG < 1500 && event.key in GO;
  afterG = event.key === "g" ? performance.now() : -Infinity;
  if (isGo) location.hash = GO[/** @type {keyof GO} */ (event.key)];
  else if (event.key === "/") focusSearch(event);
  else if (event.key === "j" || event.key === "k") moveRow(event.key === "j" ? 1 : -1);
  else if (event.key === "?") helpDialog(KEYS);
}

/** @param {KeyboardEvent} event */
function focusSearch(event) {
  const field = /** @type {HTMLInputElement|null} */ (document.querySelector("[data-search]"));
  if (field === null) return;
  event.preventDefault();
  field.focus();
  field.select();
}

/** A row is focused itself, or through its first link. @param {1|-1} by */
function moveRow(by) {
  const rows = [...document.querySelectorAll("[data-row]")].filter((row) => /** @type {HTMLElement} */ (row).offsetParent !== null);
  if (rows.length === 0) return;
  const current = rows.findIndex((row) => row.contains(document.activeElement));
  const next = current < 0 ? (by > 0 ? 0 : rows.length - 1) : Math.min(rows.length - 1, Math.max(0, current + by));
  const row = /** @type {HTMLElement} */ (rows[next]);
  const target = row.tabIndex >= 0 ? row : /** @type {HTMLElement|null} */ (row.querySelector("a[href], button"));
  target?.focus();
  row.scrollIntoView({ block: "nearest" });
}
