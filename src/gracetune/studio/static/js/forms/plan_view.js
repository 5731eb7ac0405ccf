/** The memory plan of a run: the verdict, one bar for each memory, what changes it, and every line of it. */

import { el, fill, fmt } from "../ui.js";

/** Swatches and bars use the chart colours in this order. */
const COLOURS = 8;
const OTHERS = "others";
/** Verdict -> colour class and sign; the words come from the planner. */
const VERDICTS = { fits: ["good", "✓"], "does not fit": ["bad", "✕"], unknown: ["calm", "?"] };

/** @param {string} verdict */
export function verdictBadge(verdict) {
  const [kind, sign] = VERDICTS[/** @type {keyof typeof VERDICTS} */ (verdict)] ?? (verdict.startsWith("fits") ? ["warn", "!"] : ["calm", "?"]);
  return el("span", { class: `badge ${kind}` }, el("span", { class: "sign", "aria-hidden": "true" }, sign), verdict);
}

/**
 * Shows a plan in `node`.
 * @param {HTMLElement} node @param {any} plan the planner's answer
 */
export function showPlan(node, plan) {
  const roles = rolesOf(plan.lines ?? []);
  fill(node,
    el("p", { class: "plan-headline" }, verdictBadge(plan.verdict), el("span", null, plan.summary)),
    el("ul", { class: "plan-tiers" }, (plan.tiers ?? []).map((tier) => tierBar(tier, plan, roles))),
    roles.length ? legend(roles) : null,
    changes(plan.changes ?? []),
    notes(plan),
    lines(plan.lines ?? [], plan.tiers ?? []));
}

/** Roles by the bytes they take, the largest first; the smallest share a colour. @param {any[]} all */
function rolesOf(all) {
  const bytes = new Map();
  for (const line of all.filter((one) => one.tier !== "disk")) {
    const role = roleOf(line);
    bytes.set(role, Math.max(bytes.get(role) ?? 0, line.bytes));
  }
  const roles = [...bytes.keys()].sort((a, b) => bytes.get(b) - bytes.get(a));
  return roles.length <= COLOURS ? roles : [...roles.slice(0, COLOURS - 1), OTHERS];
}

/** @param {any} line */
const roleOf = (line) => line.role ?? line.owner ?? line.name;

/** Bytes of each role at the moment when this memory is used most. @param {any} tier @param {any} plan */
function usedAtPeak(tier, plan) {
  const inTier = (plan.lines ?? []).filter((/** @type {any} */ line) => line.tier === (tier.tier ?? tier.name));
  const phases = new Set(inTier.flatMap((/** @type {any} */ line) => line.phases ?? []));
  let best = inTier;
  let most = -1;
  for (const phase of phases) {
    const present = inTier.filter((/** @type {any} */ line) => line.phases.includes(phase));
    const sum = present.reduce((/** @type {number} */ total, /** @type {any} */ line) => total + line.bytes, 0);
    if (sum > most) [most, best] = [sum, present];
  }
  const bytes = new Map();
  for (const line of best) bytes.set(roleOf(line), (bytes.get(roleOf(line)) ?? 0) + line.bytes);
  return bytes;
}

/** @param {any} tier @param {any} plan @param {string[]} roles */
function tierBar(tier, plan, roles) {
  const peak = tier.peak ?? tier.used ?? 0;
  const limit = tier.budget ?? tier.capacity;
  const scale = Math.max(tier.capacity ?? limit ?? 0, peak, 1);
  const used = usedAtPeak(tier, plan);
  const overfull = limit !== null && limit !== undefined && peak > limit;
  // A limit is rounded down.
  const words = `${fmt.bytes(peak)}${limit ? ` of ${fmt.bytes(limit - 1)}` : ""}`;
  if (!limit && !tier.capacity) {
    return el("li", null, el("div", { class: "plan-tier" }, el("span", null, tier.label), el("span", { class: "num" }, words)));
  }
  for (const [role, bytes] of used) {
    if (!roles.includes(role)) { used.set(OTHERS, (used.get(OTHERS) ?? 0) + bytes); used.delete(role); }
  }
  const parts = roles.filter((role) => used.has(role)).map((role) =>
    el("span", { class: "plan-part", title: `${role}: ${fmt.bytes(used.get(role))}`,
      style: { width: `${(100 * used.get(role)) / scale}%`, background: colour(roles.indexOf(role)) } }));
  const plain = parts.length ? parts : [el("span", { class: "plan-part", style: { width: `${(100 * peak) / scale}%`, background: colour(0) } })];
  return el("li", { class: overfull ? "overfull" : null },
    el("div", { class: "plan-tier" }, el("span", null, tier.label), el("span", { class: "num" }, words, overfull ? " · too much" : "")),
    el("div", { class: "plan-bar", role: "img", "aria-label": `${tier.label}: ${words}${overfull ? ", too much" : ""}` }, plain,
      limit && tier.capacity > limit
        ? el("span", { class: "plan-limit", title: `usable: ${fmt.bytes(limit)}`, style: { left: `${(100 * limit) / scale}%` } }) : null),
    tier.reason ? el("p", { class: "help" }, `${tier.capacity ? `${fmt.bytes(tier.capacity)} in all; ` : ""}${tier.reason}`) : null);
}

/** @param {number} index */
const colour = (index) => `var(--c${index % COLOURS})`;

/** @param {string[]} roles */
function legend(roles) {
  return el("ul", { class: "plan-legend", "aria-label": "Colours of the bars" }, roles.map((role, index) =>
    el("li", null, el("span", { class: "swatch", "aria-hidden": "true", style: { background: colour(index) } }), role)));
}

/** @param {any[]} all */
function changes(all) {
  if (all.length === 0) return null;
  return el("div", { class: "stack tight" }, el("h3", null, "Changes that make it smaller"),
    el("ul", { class: "plan-changes" }, all.map((change) => el("li", null,
      el("code", null, change.key), " ", el("span", null, `${change.from} → ${change.to}`), " ",
      el("span", { class: "note" }, [change.saves ? `saves ${fmt.bytes(change.saves)}` : "", change.reason,
        change.automatic ? "done by itself" : "yours to decide"].filter(Boolean).join("; "))))));
}

/** @param {any} plan */
function notes(plan) {
  const all = plan.notes ?? [];
  if (all.length === 0) return null;
  return el("details", null, el("summary", null, fmt.plural(all.length, "note")),
    el("ul", { class: "plain-list" }, all.map((text) => el("li", null, text))));
}

/** @param {any[]} all @param {any[]} tiers */
function lines(all, tiers) {
  if (all.length === 0) return null;
  const label = new Map(tiers.map((tier) => [tier.tier ?? tier.name, tier.label]));
  return el("details", null, el("summary", null, `All ${all.length} lines of the plan`),
    el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Lines of the plan" },
      el("table", { class: "table compact" },
        el("thead", null, el("tr", null, ["What", "Where", "Size"].map((head, index) =>
          el("th", { scope: "col", class: index === 2 ? "right" : null }, head)))),
        el("tbody", null, all.map((line) => el("tr", null,
          el("th", { scope: "row" }, line.name ?? line.owner, el("span", { class: "cell-note" }, line.reason ?? line.why ?? "")),
          el("td", null, label.get(line.tier) ?? line.tier),
          el("td", { class: "right" }, fmt.bytes(line.bytes))))))));
}
