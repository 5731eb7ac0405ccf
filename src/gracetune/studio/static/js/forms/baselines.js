/** Baselines below the studio's folder, and what changed between them. */

import { card, el, emptyState, fmt } from "../ui.js";

const VERDICTS = {
  regression: ["✕", "regression", "bad"], unclear: ["?", "unclear", "warn"], better: ["✓", "better", "good"],
  within: ["=", "within the tolerance", "calm"], "not judged": ["·", "not judged", "calm"],
};

/** @param {any} measured what `api/baselines` says */
export function baselineCards(measured) {
  const all = measured.baselines ?? [];
  const unreadable = (measured.unreadable ?? []).length ? card("Unreadable baselines", {},
    el("ul", { class: "plain-list" }, measured.unreadable.map((/** @type {any} */ one) => el("li", null, el("code", null, one.path), `: ${one.why}`)))) : null;
  const incomplete = measured.incomplete ? el("p", { class: "note" }, `Not all folders are shown: ${measured.incomplete}.`) : null;
  if (all.length === 0) {
    return [card("Baselines", {}, emptyState("No baselines yet", "A baseline records what a config costs on this machine, to compare with later.",
      el("p", null, el("code", null, "gracetune baseline capture CONFIG")))), incomplete, unreadable];
  }
  return [card("Baselines", { note: "what a config cost on this machine" }, baselineTable(all)), ...(measured.comparisons ?? []).map(comparison), incomplete, unreadable];
}

/** @param {any[]} all */
function baselineTable(all) {
  const head = ["Name", "Date", "Device", "Samples/s", "ms/step", "Peak memory", "Folder"];
  return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table of baselines" }, el("table", { class: "table" },
    el("thead", null, el("tr", null, head.map((text, index) => el("th", { scope: "col", class: index > 2 && index < 6 ? "right" : null }, text)))),
    el("tbody", null, all.map((one) => el("tr", null,
      el("th", { scope: "row" }, one.name), el("td", null, String(one.date ?? "").slice(0, 16).replace("T", " ")), el("td", null, one.device ?? ""),
      el("td", { class: "right" }, fmt.number(one.samples_per_s)), el("td", { class: "right" }, fmt.number(one.step_ms)),
      el("td", { class: "right" }, peaks(one)), el("td", { class: "mono" }, one.path))))));
}

/** @param {any} one */
function peaks(one) {
  const bytes = one.peak_bytes ?? {};
  return Object.entries(bytes).map(([tier, value]) => `${tier} ${fmt.bytes(/** @type {number} */ (value))}`).join(", ") || "–";
}

/** @param {any} compared */
function comparison(compared) {
  const title = `${compared.a} → ${compared.b}`;
  if (compared.why) return card(title, { note: "not compared" }, el("p", null, compared.why));
  const head = ["Measure", "Before", "After", "Ratio", "Verdict"];
  return card(title, { note: `${compared.compared_as ?? ""}${compared.tolerance ? `, tolerance ${fmt.percent(compared.tolerance)}` : ""}` },
    el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `Table of ${title}` }, el("table", { class: "table compact" },
      el("thead", null, el("tr", null, head.map((text, index) => el("th", { scope: "col", class: index > 0 && index < 4 ? "right" : null }, text)))),
      el("tbody", null, (compared.rows ?? []).map((/** @type {any} */ row) => el("tr", null,
        el("th", { scope: "row" }, row.name), el("td", { class: "right" }, value(row.before, row.unit)), el("td", { class: "right" }, value(row.after, row.unit)),
        el("td", { class: "right", title: bounds(row) || null }, row.ratio === null ? "–" : `× ${fmt.number(row.ratio, 3)}`),
        el("td", null, verdict(row.verdict), row.reason ? el("span", { class: "cell-note" }, row.reason) : null)))))),
    (compared.notes ?? []).length ? el("ul", { class: "plain-list" }, compared.notes.map((/** @type {string} */ note) => el("li", null, note))) : null);
}

/** @param {any} row */
const bounds = (row) => (row.low === null || row.high === null ? "" : `between × ${fmt.number(row.low, 3)} and × ${fmt.number(row.high, 3)}`);

/** @param {number} amount @param {string} unit */
const value = (amount, unit) => (unit === "bytes" ? fmt.bytes(amount) : `${fmt.number(amount)}${unit ? ` ${unit}` : ""}`);

/** @param {string} name */
function verdict(name) {
  const [sign, word, kind] = VERDICTS[/** @type {keyof typeof VERDICTS} */ (name)] ?? ["·", name, "calm"];
  return el("span", { class: `badge ${kind}` }, el("span", { class: "sign", "aria-hidden": "true" }, sign), word);
}
