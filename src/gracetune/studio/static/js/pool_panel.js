/**
 * One pool of memory: what is in use, split by owner, below the planner's forecast as outlines. Other processes are
 * named, reclaimable page cache is hatched, and the space that must stay free is marked at the end.
 */

import { card, el, fill, fmt, setText } from "./ui.js";

const ZOOM_BELOW = 0.12;

/** Colours of owners, the same in each pool. @type {Map<string, number>} */
const colours = new Map(["frozen weights", "activations", "optimizer state", "trained weights", "gradients", "latent cache", "process", "batch ring"].map((owner, at) => [owner, at]));

/** Measured, and planned under other names. */
const NOT_PLANNED = { other: "activations, buffers and all else that is not measured by itself" };

/** Owners that stand for what has no owner. */
const NEUTRAL = new Set(["other", "unaccounted"]);

/** Number of an owner's colour, also in charts. @param {string} owner */
export function colourNumber(owner) {
  if (!colours.has(owner)) colours.set(owner, colours.size);
  return /** @type {number} */ (colours.get(owner));
}

/** Class of an owner's colour. @param {string} owner */
const colourOf = (owner) => (NEUTRAL.has(owner) ? "rest" : `c${colourNumber(owner) % 8}`);

/** @param {{bytes: number}[]} parts */
const sum = (parts) => parts.reduce((total, part) => total + part.bytes, 0);

/** @param {string} text */
const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

/** @param {any} tier @param {boolean} onePool */
export function poolPanel(tier, onePool) {
  const summary = el("span", { class: "num" });
  const planned = el("div", { class: "pool-planned", "aria-hidden": "true" });
  const used = el("div", { class: "pool-used", role: "img" });
  const scale = el("div", { class: "pool-scale", "aria-hidden": "true" });
  const body = el("tbody");
  const marks = el("p", { class: "pool-note" });
  /** @type {boolean|null} */
  let zoom = null;
  const zoomButton = el("button", { class: "btn small", type: "button", onclick: () => { zoom = zoomButton.getAttribute("aria-pressed") !== "true"; update(tier); } }, "Zoom to what is used");
  const node = card(capital(tier.label || tier.name), { note: summary, actions: zoomButton, class: "pool" },
    el("div", { class: "tier-bar" }, el("span", { class: "pool-label" }, "planned"), planned, el("span", { class: "pool-label" }, "in use"), used, el("span"), scale), marks,
    el("div", { class: "pool-table scroll", tabindex: "0", role: "region", "aria-label": `Owners of ${tier.label || tier.name}` }, el("table", { class: "table" }, el("caption", { class: "visually-hidden" }, `Memory of ${tier.label || tier.name} by owner`),
      el("thead", null, el("tr", null, el("th", { scope: "col" }, "Owner"), el("th", { scope: "col", class: "right" }, "In use"), el("th", { scope: "col", class: "right" }, "Planned"))), body)));

  /** @param {any} newer */
  function update(newer) {
    tier = newer;
    const all = sum(tier.used) + sum(tier.others) + (tier.reclaimable_bytes ?? 0);
    const most = Math.max(all, tier.planned_peak_bytes ?? 0, sum(tier.planned));
    const capacity = tier.capacity_bytes ?? Math.max(1, most * 1.15);
    const small = most < ZOOM_BELOW * capacity;
    const zoomed = zoom ?? small;
    const end = zoomed ? Math.min(capacity, Math.max(1, Math.max(sum(tier.used), sum(tier.planned), tier.planned_peak_bytes ?? 0) * 1.15)) : capacity;
    zoomButton.setAttribute("aria-pressed", String(zoomed));
    setText(summary, `${fmt.bytes(sum(tier.used))} of ${fmt.bytes(tier.capacity_bytes)} used by this run${tier.free_bytes ? ` · ${fmt.bytes(tier.free_bytes)} free` : ""}${onePool ? " · CPU and GPU share this pool" : ""}`);
    drawUsed(end, capacity, zoomed);
    drawPlanned(end);
    fill(scale, [0, 0.25, 0.5, 0.75, 1].map((part) => el("span", { style: { left: `${100 * part}%` } }, fmt.bytes(part * end))));
    setText(marks, notes(zoomed, end, capacity));
    drawTable();
  }

  /** @param {number} end @param {number} capacity @param {boolean} zoomed */
  function drawUsed(end, capacity, zoomed) {
    const part = (/** @type {number} */ bytes, /** @type {string} */ kind, /** @type {string} */ title) =>
      el("span", { class: `pool-part ${kind}`, title, style: { width: `${100 * bytes / end}%` } });
    const parts = [
      ...tier.used.map((/** @type {any} */ one) => part(one.bytes, colourOf(one.owner), `${one.owner}: ${fmt.bytes(one.bytes)}`)),
      ...tier.others.map((/** @type {any} */ one) => part(one.bytes, "other", `${one.name}, process ${one.pid}: ${fmt.bytes(one.bytes)}`)),
      tier.reclaimable_bytes ? part(tier.reclaimable_bytes, "reclaimable", `reclaimable page cache: ${fmt.bytes(tier.reclaimable_bytes)}`) : null,
    ];
    const floor = tier.floor_bytes && !zoomed ? el("span", { class: "pool-floor", title: `must stay free: ${fmt.bytes(tier.floor_bytes)}`, style: { width: `${100 * tier.floor_bytes / capacity}%` } }) : null;
    fill(used, el("div", { class: "pool-parts" }, parts), floor, line(tier.budget_bytes, "budget", end));
    used.setAttribute("aria-label", `In use: ${tier.used.map((/** @type {any} */ one) => `${one.owner} ${fmt.bytes(one.bytes)}`).join(", ") || "nothing measured"}.`);
  }

  /** @param {number} end */
  function drawPlanned(end) {
    fill(planned, el("div", { class: "pool-parts" }, tier.planned.map((/** @type {any} */ one) =>
      el("span", { class: `pool-outline ${colourOf(one.owner)}`, title: [`${one.owner}: ${fmt.bytes(one.bytes)}`, one.why].filter(Boolean).join(", "), style: { width: `${100 * one.bytes / end}%` } }))),
      line(tier.planned_peak_bytes, "peak", end));
  }

  /** @param {number|null} bytes @param {string} name @param {number} end */
  function line(bytes, name, end) {
    if (!bytes || bytes > end) return null;
    return el("span", { class: `pool-line ${name}`, title: `${name === "peak" ? "planned peak" : "budget"}: ${fmt.bytes(bytes)}`, style: { left: `${100 * bytes / end}%` } });
  }

  /** @param {boolean} zoomed @param {number} end @param {number} capacity */
  function notes(zoomed, end, capacity) {
    return [
      zoomed && end < capacity ? `Shown: the first ${fmt.bytes(end)} of ${fmt.bytes(capacity)}` : null,
      tier.budget_bytes ? `budget ${fmt.bytes(tier.budget_bytes)}` : null,
      tier.planned_peak_bytes ? `planned peak ${fmt.bytes(tier.planned_peak_bytes)}` : null,
      tier.floor_bytes ? `danger below ${fmt.bytes(tier.floor_bytes)} free` : null,
    ].filter(Boolean).join(" · ");
  }

  function drawTable() {
    const plans = new Map(tier.planned.map((/** @type {any} */ one) => [one.owner, one]));
    const owners = [...new Set([...tier.used.map((/** @type {any} */ one) => one.owner), ...plans.keys()])];
    const uses = new Map(tier.used.map((/** @type {any} */ one) => [one.owner, one.bytes]));
    fill(body, owners.map((owner) => entry(`mark square ${colourOf(owner)}`, owner, plans.get(owner)?.why ?? NOT_PLANNED[/** @type {keyof typeof NOT_PLANNED} */ (owner)] ?? "", uses.get(owner), plans.get(owner)?.bytes)),
      tier.others.map((/** @type {any} */ one) => entry("mark square other", one.name, `another process, ${one.pid}`, one.bytes, undefined)),
      tier.reclaimable_bytes === null || tier.reclaimable_bytes === undefined ? null : entry("mark square reclaimable", "reclaimable page cache", "freed when memory is needed", tier.reclaimable_bytes, undefined));
  }

  update(tier);
  return { node, update };
}

/** @param {string} swatch @param {string} name @param {string} why @param {number|undefined} used @param {number|undefined} planned */
function entry(swatch, name, why, used, planned) {
  return el("tr", null, el("th", { scope: "row" }, el("span", { class: "row nowrap" }, el("span", { class: swatch, "aria-hidden": "true" }), el("span", null, name, why && el("span", { class: "why" }, why)))),
    el("td", { class: "right" }, fmt.bytes(used)), el("td", { class: "right" }, fmt.bytes(planned)));
}
