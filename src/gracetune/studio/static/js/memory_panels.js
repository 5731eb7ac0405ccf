/** Below the pools: the memory stages over time, what moves next, reclamations and other changes, what is unknown. */

import { card, el, emptyState, fmt } from "./ui.js";

/** @param {string} name @param {...any} content */
const region = (name, ...content) => el("div", { class: "memory-body scroll", tabindex: "0", role: "region", "aria-label": name }, ...content);

/** @param {any} memory @param {any} row */
export function stagePanel(memory, row) {
  const { stages } = memory;
  if (stages.length === 0) {
    return card("Memory stages", {}, region("Memory stages", emptyState("No change of stage", "Stage 1: everything fits. Stage 2: something spills, or is about to.")));
  }
  const end = Math.max(1, row.step, ...stages.map((/** @type {any} */ one) => one.step));
  const parts = stages.map((/** @type {any} */ one, /** @type {number} */ at) => {
    const until = stages[at + 1]?.step ?? end;
    return el("span", { class: `stage stage-${one.after}`, title: `step ${one.step} to ${until}: stage ${one.after}`, style: { width: `${100 * (until - one.step) / end}%`, left: `${100 * one.step / end}%` } },
      (until - one.step) / end > 0.05 ? String(one.after) : "");
  });
  const first = stages[0].step > 0 ? el("span", { class: `stage stage-${stages[0].before}`, style: { left: 0, width: `${100 * stages[0].step / end}%` } }, String(stages[0].before)) : null;
  const rows = [...stages].reverse().map((/** @type {any} */ one) => el("tr", null, el("td", { class: "num" }, fmt.integer(one.step)),
    el("td", { class: "num nowrap-text" }, fmt.time(one.time_s)), el("td", { class: "nowrap-text" }, one.before === one.after ? `stage ${one.after}` : `${one.before} → ${one.after}`), el("td", null, one.reason)));
  return card("Memory stages", { note: "1: everything fits · 2: something spills" },
    el("div", { class: "stage-strip", role: "img", "aria-label": `Stages over ${end} steps; the table lists them` }, first, parts),
    el("div", { class: "stage-scale", "aria-hidden": "true" }, el("span", null, "step 0"), el("span", null, fmt.integer(end))),
    el("div", { class: "stage-table scroll", tabindex: "0", role: "region", "aria-label": "Memory stages" }, table(["Step", "Time", "Stage", "Reason"], rows)));
}

/** @param {any} memory */
export function nextPanel(memory) {
  const body = memory.next.length === 0 ? emptyState("Nothing would move", "Everything this run needs is where it is used.")
    : el("ol", { class: "next" }, memory.next.map((/** @type {any} */ one) => el("li", null, el("span", null, one.what), el("span", { class: "why" }, one.why))));
  return card("What would move next", {}, region("What would move next", body));
}

/** @param {any} memory */
export function changesPanel(memory) {
  const lines = [
    ...memory.reclamations.map((/** @type {any} */ one) => ({ ...one, kind: `${one.extent} reclamation`, text: [
      one.released_bytes ? `${fmt.bytes(one.released_bytes)} returned to the driver` : "", one.demoted_bytes ? `${fmt.bytes(one.demoted_bytes)} moved to main memory` : "",
      `training paused for ${fmt.pace(one.duration_ms / 1000)}`, one.reason].filter(Boolean).join("; ") })),
    ...memory.arena.map((/** @type {any} */ one) => ({ ...one, kind: "overflow arena", text: `${fmt.bytes(one.before_bytes)} → ${fmt.bytes(one.after_bytes)}${one.reason ? `; ${one.reason}` : ""}` })),
    ...memory.look_ahead.map((/** @type {any} */ one) => ({ ...one, kind: "look-ahead", text: `${one.before} → ${fmt.plural(one.after, "batch", "batches")}${one.reason ? `; ${one.reason}` : ""}` })),
  ].sort((a, b) => b.step - a.step);
  const rows = lines.map((one) => el("tr", null, el("td", { class: "num" }, fmt.integer(one.step)), el("td", { class: "nowrap-text" }, one.kind), el("td", null, one.text)));
  return card("Reclamations, overflow and look-ahead", { note: lines.length ? fmt.plural(lines.length, "event") : "" }, region("Reclamations, overflow and look-ahead",
    rows.length === 0 ? emptyState("No such event", "Nothing was reclaimed, nothing overflowed, and the look-ahead did not change.") : table(["Step", "Kind", "What happened"], rows)));
}

/** @param {any} memory */
export function unavailablePanel(memory) {
  const entries = Object.entries(memory.unavailable);
  const rows = entries.map(([what, why]) => el("tr", null, el("th", { scope: "row", class: "mono unbroken" }, what), el("td", null, why)));
  return card("Not available on this machine", { note: entries.length ? fmt.plural(entries.length, "value") : "" }, region("Not available on this machine",
    rows.length === 0 ? emptyState("Everything is available", "This machine provides every value of this page.") : table(["Value", "Reason"], rows)));
}

/** @param {string[]} names @param {any[]} rows */
function table(names, rows) {
  return el("table", { class: "table" }, el("thead", null, el("tr", null, names.map((name) => el("th", { scope: "col" }, name)))), el("tbody", null, rows));
}
