/** Pieces that several pages show: state badges, headings, empty and error states, tiles, placeholders. */

import { ApiError } from "./api.js";
import { el, icon, setText } from "./dom.js";

/** State of a run or job -> sign, word, colour class. The word is always shown: colour is never the only difference. */
const STATES = {
  preparing: ["◔", "preparing", "busy"],
  running: ["●", "running", "good"],
  finished: ["✓", "finished", "done"],
  done: ["✓", "done", "done"],
  stopped: ["■", "stopped", "calm"],
  cancelled: ["■", "cancelled", "calm"],
  interrupted: ["■", "interrupted", "warn"],
  failed: ["✕", "failed", "bad"],
  stale: ["?", "stale", "warn"],
  waiting: ["…", "waiting", "calm"],
};

/** @param {string} state @param {string} [reason] shown on hover */
export function stateBadge(state, reason = "") {
  const [sign, word, kind] = STATES[/** @type {keyof STATES} */ (state)] ?? ["·", state, "calm"];
  return el("span", { class: `badge ${kind}`, title: reason || null },
    el("span", { class: "sign", "aria-hidden": "true" }, sign), word);
}

/**
 * Heading of a page. @param {{title: string|Node, note?: string|Node|null, actions?: any}} head
 */
export function pageHead({ title, note = null, actions = null }) {
  return el("div", { class: "page-head" },
    el("div", { class: "page-title" }, el("h1", { tabindex: "-1" }, title), note && el("p", { class: "note" }, note)),
    actions && el("div", { class: "actions" }, actions));
}

/** Sets the browser tab's title. @param {string} text */
export function setTitle(text) {
  document.title = text ? `${text} · gracetune studio` : "gracetune studio";
}

/**
 * What to show where there is nothing: why, and what to do.
 * @param {string} title @param {string|Node} text @param {...any} more
 */
export function emptyState(title, text, ...more) {
  return el("div", { class: "empty" }, icon("empty"), el("h2", null, title), el("p", null, text), ...more);
}

/** @param {unknown} error @param {(() => void)|null} [retry] */
export function errorState(error, retry = null) {
  const known = error instanceof ApiError;
  if (!known) console.error(error);
  return el("div", { class: "empty error", role: "alert" }, icon("warning"),
    el("h2", null, known ? error.found : "This page failed."),
    el("p", null, known ? error.expected : String(error)),
    known && error.hint ? el("p", null, error.hint) : null,
    retry && el("button", { class: "btn", type: "button", onclick: retry }, "Try again"));
}

/** A grey placeholder as high as what will replace it, so that nothing moves. @param {number} height in pixels */
export function skeleton(height) {
  return el("div", { class: "skeleton", style: { height: `${height}px` }, "aria-hidden": "true" });
}

/**
 * A row of figures whose values change in place.
 * @param {[key: string, label: string][]} items
 * @returns {{node: HTMLElement, set: (key: string, value: string, detail?: string) => void}}
 */
export function tiles(items) {
  /** @type {Map<string, [HTMLElement, HTMLElement]>} */
  const values = new Map();
  const node = el("dl", { class: "tiles" }, items.map(([key, label]) => {
    const value = el("span", { class: "tile-value" }, "–");
    const detail = el("span", { class: "tile-detail" }, "");
    values.set(key, [value, detail]);
    return el("div", { "data-tile": key }, el("dt", null, label), el("dd", null, value, detail));
  }));
  return {
    node,
    set(key, value, detail = "") {
      const [first, second] = values.get(key) ?? [];
      if (first) setText(first, value);
      if (second) { setText(second, detail); second.title = detail; }
    },
  };
}

/**
 * A section with a heading and a fixed place for controls.
 * @param {string} title @param {{note?: string|Node, actions?: any, id?: string, class?: string}} options @param {...any} content
 */
export function card(title, options, ...content) {
  return el("section", { class: `card ${options.class ?? ""}`, id: options.id, "aria-label": title },
    el("div", { class: "card-head" }, el("h2", null, title), options.note && el("p", { class: "note" }, options.note),
      options.actions && el("div", { class: "actions" }, options.actions)),
    ...content);
}

/** A progress bar with its value in words. @param {number|null} fraction @param {string} label */
export function progress(fraction, label) {
  const known = fraction !== null && Number.isFinite(fraction);
  const inner = el("span", { class: "progress-fill", style: { width: `${known ? 100 * Math.min(1, fraction) : 0}%` } });
  return el("span", { class: "progress", role: "progressbar", "aria-label": label, "aria-valuemin": 0, "aria-valuemax": 100,
    "aria-valuenow": known ? Math.round(100 * fraction) : null }, inner);
}
