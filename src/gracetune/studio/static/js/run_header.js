/** The head of every page about one run: name, state, and links to its pages. */

import { el, fill } from "./dom.js";
import { fmt } from "./format.js";
import { pageHead, setTitle, stateBadge } from "./parts.js";

const PAGES = [["", "Overview"], ["memory", "Memory"], ["data", "Data"]];

/**
 * @param {any} row the run's row
 * @param {""|"memory"|"data"} active
 * @param {any} [actions] buttons on the right
 * @returns {{node: HTMLElement, update: (row: any) => void}}
 */
export function runHeader(row, active, actions = null) {
  const state = el("span", { class: "head-state" });
  const note = el("span", null);
  const node = el("div", { class: "run-head" },
    el("p", { class: "crumb" }, el("a", { href: "#/runs" }, "Runs"), el("span", { "aria-hidden": "true" }, " / "),
      el("span", { class: "mono" }, row.path)),
    pageHead({ title: el("span", { class: "head-line" }, el("span", { class: "head-name" }, row.name), state), note, actions }),
    el("nav", { class: "tabs", "aria-label": "Pages of this run" }, PAGES.map(([name, label]) =>
      el("a", { href: `#/run/${row.id}${name && `/${name}`}`, "aria-current": name === active ? "page" : null }, label))));

  /** @param {any} newer */
  function update(newer) {
    if (state.dataset.state !== newer.state + newer.reason) {
      state.dataset.state = newer.state + newer.reason;
      fill(state, stateBadge(newer.state, newer.reason));
    }
    const parts = [newer.family, newer.adapter, newer.machine, newer.reason].filter(Boolean);
    const text = `${parts.join(" · ")}${newer.began_s ? ` · started ${fmt.time(newer.began_s)}` : ""}`;
    if (note.textContent !== text) fill(note, text);
  }

  setTitle(row.name);
  update(row);
  return { node, update };
}
