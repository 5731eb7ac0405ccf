/** Chooses runs: chips of the chosen ones, and a field that suggests the others. */

import { el, fill, icon } from "./ui.js";

const SUGGESTED = 12;

/**
 * @param {any[]} runs all runs @param {string[]} picked ids chosen at first @param {() => void} changed
 * @returns {{node: HTMLElement, ids: () => string[], add: (ids: string[]) => void}}
 */
export function runPicker(runs, picked, changed) {
  const byId = new Map(runs.map((row) => [row.id, row]));
  const chosen = new Set(picked);
  const chips = el("ul", { class: "chips picked", "aria-label": "Chosen runs" });
  const list = el("ul", { class: "suggestions", hidden: true, role: "listbox", id: "suggested-runs", "aria-label": "Runs" });
  const field = el("input", { type: "search", placeholder: "Add a run", role: "combobox", "aria-label": "Add a run", "aria-expanded": "false",
    "aria-controls": "suggested-runs", "aria-autocomplete": "list", autocomplete: "off", "data-search": true,
    oninput: suggest, onfocus: suggest, onkeydown: move, onblur: () => window.setTimeout(close, 150) });
  const node = el("div", { class: "picker" }, el("div", { class: "search" }, icon("search"), field, list), chips);
  let active = -1;

  function close() {
    list.hidden = true;
    field.setAttribute("aria-expanded", "false");
    field.removeAttribute("aria-activedescendant");
  }

  function suggest() {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = runs.filter((row) => !chosen.has(row.id) && words.every((word) => `${row.name} ${row.path} ${row.family} ${row.adapter}`.toLowerCase().includes(word))).slice(0, SUGGESTED);
    active = found.length > 0 ? 0 : -1;
    fill(list, found.length === 0 ? el("li", { class: "note", role: "option", "aria-disabled": "true", "aria-selected": "false" }, runs.length === chosen.size ? "All runs are chosen" : "No run matches")
      : found.map((row, at) => el("li", { role: "option", id: `suggested-${at}`, "data-id": row.id, "aria-selected": String(at === active), onpointerdown: (/** @type {Event} */ event) => { event.preventDefault(); add(row.id); } },
        el("span", null, row.name), el("span", { class: "note" }, [row.state, row.family, row.adapter].filter(Boolean).join(" · ")))));
    list.hidden = false;
    field.setAttribute("aria-expanded", "true");
    mark();
  }

  function mark() {
    [...list.children].forEach((item, at) => item.setAttribute("aria-selected", String(at === active)));
    if (active >= 0) {
      field.setAttribute("aria-activedescendant", `suggested-${active}`);
      list.children[active]?.scrollIntoView({ block: "nearest" });
    }
  }

  /** @param {KeyboardEvent} event */
  function move(event) {
    const by = event.key === "ArrowDown" ? 1 : event.key === "ArrowUp" ? -1 : 0;
    if (by !== 0 && active >= 0) {
      event.preventDefault();
      active = (active + by + list.children.length) % list.children.length;
      mark();
    } else if (event.key === "Enter" && active >= 0 && !list.hidden) {
      add(/** @type {HTMLElement} */ (list.children[active]).dataset.id ?? "");
    } else if (event.key === "Backspace" && field.value === "") {
      const last = [...chosen].at(-1);
      if (last) remove(last);
    } else if (event.key === "Escape") close();
  }

  /** @param {...string} ids */
  function add(...ids) {
    ids.forEach((id) => chosen.add(id));
    field.value = "";
    draw();
    if (document.activeElement === field) suggest();
    changed();
  }

  /** @param {string} id */
  function remove(id) {
    chosen.delete(id);
    draw();
    changed();
    field.focus();
  }

  function draw() {
    fill(chips, [...chosen].map((id, at) => el("li", { class: "chip" }, el("span", { class: `mark square c${at % 8}`, "aria-hidden": "true" }), el("span", null, byId.get(id).name),
      el("button", { class: "icon-btn", type: "button", "aria-label": `Remove ${byId.get(id).name}`, onclick: () => remove(id) }, icon("close")))));
  }

  draw();
  // The page loads what is chosen at first by itself.
  return { node, ids: () => [...chosen], add: (/** @type {string[]} */ ids) => add(...ids) };
}
