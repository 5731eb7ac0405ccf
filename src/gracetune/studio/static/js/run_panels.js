/** What is below the charts of a run: plan against reality, files, checkpoints, warnings, the log, the configuration. */

import { api, card, copyButton, el, emptyState, fill, fmt } from "./ui.js";

const LOG_MS = 4000;
const MOST_LINES = 100;
const REQUESTED = { validate: "samples generated", save: "checkpoint written", stop: "run stopped" };
const SOURCES = { studio: "the studio", command: "a command", file: "a file" };
/** Files that a checkpoint wrote carry its step. */
const OF_STEP = /_\d{9}(?=[_.])/;

/** Sum by role of what the plan says of one tier; measured memory has owners of the same names. Plans of earlier
 * releases have no roles. @param {any} plan @param {string} tier */
function planned(plan, tier) {
  /** @type {Map<string, {bytes: number, why: string}>} */
  const owners = new Map();
  for (const line of plan.lines.filter((/** @type {any} */ one) => one.tier === tier)) {
    const role = line.role || line.owner;
    const known = owners.get(role) ?? { bytes: 0, why: "" };
    const why = [line.owner === role ? "" : line.owner, line.why].filter(Boolean).join(": ");
    owners.set(role, { bytes: known.bytes + line.bytes, why: [known.why, why].filter(Boolean).join("; ") });
  }
  return owners;
}

/** What was forecast beside what is used. @param {any} plan @param {any} memory */
export function planPanel(plan, memory) {
  const note = plan?.summary ?? "";
  const body = el("div", { class: "panel-body scroll", tabindex: "0", role: "region", "aria-label": "Plan against reality" });
  const tiers = memory?.tiers ?? [];
  if (!plan) {
    fill(body, emptyState("No forecast", "This run's log holds no plan. Runs of newer versions write one at their start."));
  } else {
    fill(body, plan.tiers.map((/** @type {any} */ tier) => {
      const real = tiers.find((/** @type {any} */ one) => one.name === tier.name);
      return planTable(tier, planned(plan, tier.name), real);
    }), plan.changes?.length ? el("ul", { class: "changes" }, plan.changes.map((/** @type {any} */ change) => el("li", null, typeof change === "string" ? change : Object.values(change).filter(Boolean).join(": ")))) : null);
  }
  return card("Plan against reality", { note }, body);
}

/** @param {any} tier @param {Map<string, {bytes: number, why: string}>} forecast @param {any} real */
function planTable(tier, forecast, real) {
  const used = new Map((real?.used ?? []).map((/** @type {any} */ part) => [part.owner, part.bytes]));
  const owners = [...new Set([...forecast.keys(), ...used.keys()])];
  const sum = (/** @type {Iterable<number>} */ values) => [...values].reduce((total, value) => total + value, 0);
  const line = (/** @type {string} */ name, /** @type {number|undefined} */ plan, /** @type {number|undefined} */ measured, /** @type {string} */ why) =>
    el("tr", null, el("th", { scope: "row" }, name, why && el("span", { class: "why" }, why)),
      el("td", { class: "right" }, fmt.bytes(plan)), el("td", { class: "right" }, fmt.bytes(measured)));
  // Not everything planned is there at the same time: the peak is less than the sum.
  const peak = real?.planned_peak_bytes ?? null;
  const whole = el("tr", { class: "sum" }, el("th", { scope: "row" }, peak === null ? "together" : "peak, and now"),
    el("td", { class: "right" }, fmt.bytes(peak ?? sum([...forecast.values()].map(({ bytes }) => bytes)))),
    el("td", { class: "right" }, real ? fmt.bytes(sum(used.values())) : fmt.none));
  return el("table", { class: "table plan-table" },
    el("caption", null, `${tier.label || tier.name} · ${fmt.bytes(tier.budget_bytes)} of ${fmt.bytes(tier.capacity_bytes)} may be used`),
    el("thead", null, el("tr", null, el("th", { scope: "col" }, "Owner"), el("th", { scope: "col", class: "right" }, "planned"), el("th", { scope: "col", class: "right" }, "in use"))),
    el("tbody", null, owners.map((owner) => line(owner, forecast.get(owner)?.bytes, used.get(owner), forecast.get(owner)?.why ?? "")), whole));
}

/** Resulting files, and how each program loads them. @param {any} detail */
export function filesPanel(detail) {
  const list = (/** @type {any[]} */ some) => el("ul", { class: "file-list" }, some.map((file) => el("li", null,
    el("a", { href: file.url, download: true, class: "mono" }, file.name), el("span", { class: "note num" }, fmt.bytes(file.bytes)))));
  const last = detail.outputs.filter((/** @type {any} */ file) => !OF_STEP.test(file.name));
  const earlier = detail.outputs.filter((/** @type {any} */ file) => OF_STEP.test(file.name));
  const files = detail.outputs.length === 0
    ? emptyState("No files yet", detail.row.state === "running" ? "The adapter is written with each checkpoint and at the end." : "This run has written no result.")
    : list(last.length > 0 ? last : earlier);
  const others = last.length === 0 || earlier.length === 0 ? null : el("details", null, el("summary", null, fmt.plural(earlier.length, "file of an earlier step", "files of earlier steps")), list(earlier));
  const programs = Object.entries(detail.how_to_load);
  const snippets = detail.outputs.length === 0 ? null : programs.map(([program, text]) => el("div", { class: "snippet" },
    el("div", { class: "row" }, el("h3", null, program), el("span", { class: "spacer" }), copyButton(() => text)), el("pre", { tabindex: "0" }, text)));
  const checkpoints = detail.checkpoints.length === 0 ? null : el("details", null,
    el("summary", null, fmt.plural(detail.checkpoints.length, "checkpoint")),
    el("ul", { class: "file-list" }, detail.checkpoints.map((/** @type {any} */ one) => el("li", null,
      el("span", { class: "mono" }, one.path), el("span", { class: "note num" }, `step ${fmt.integer(one.step)} · ${fmt.bytes(one.bytes)}`)))));
  const note = detail.adapter_format ? `format: ${detail.adapter_format}` : "";
  return card("Files", { note }, el("div", { class: "panel-body scroll", tabindex: "0", role: "region", "aria-label": "Files and how to load them" }, files, snippets, others, checkpoints));
}

/** Warnings first, then checks and switches, newest first. @param {any} detail */
export function eventsPanel(detail) {
  /** @type {{step: number|null, kind: string, text: string, time_s?: number}[]} */
  const lines = [
    ...detail.warnings.map((/** @type {any} */ one) => ({ step: one.step, time_s: one.time_s, kind: "warning", text: one.message })),
    ...detail.switches.map((/** @type {any} */ one) => ({ step: one.step, kind: "expert", text: `${one.before ? `${one.before} → ` : ""}${one.after}${one.reason ? `: ${one.reason}` : ""}` })),
    ...(detail.batch_changes ?? []).map((/** @type {any} */ one) => ({ step: one.step, kind: "batch", text: `${one.before ?? ""} → ${one.after}${one.reason ? `: ${one.reason}` : ""}` })),
    ...(detail.requests ?? []).map((/** @type {any} */ one) => ({ step: one.step, kind: "request", text: `${REQUESTED[/** @type {keyof typeof REQUESTED} */ (one.request)] ?? one.request}, requested by ${SOURCES[/** @type {keyof typeof SOURCES} */ (one.source)] ?? one.source}` })),
    ...(detail.self_checks ?? []).map((/** @type {any} */ one) => ({ step: one.step, kind: "check", text: checkText(one) })),
  ];
  // Experts may take turns at each step: what needs attention must not be lost among them.
  lines.sort((a, b) => Number(b.kind === "warning") - Number(a.kind === "warning") || (b.step ?? -1) - (a.step ?? -1));
  const left = lines.splice(MOST_LINES).length;
  const body = lines.length === 0 ? emptyState("Nothing to report", "Warnings, requests, changes of the expert or batch, and self-checks appear here.")
    : el("table", { class: "table" }, el("thead", null, el("tr", null, el("th", { scope: "col" }, "Step"), el("th", { scope: "col" }, "Kind"), el("th", { scope: "col" }, "What happened"))),
      el("tbody", null, lines.map((line) => el("tr", null, el("td", { class: "num" }, line.step === null ? fmt.none : fmt.integer(line.step)),
        el("td", null, el("span", { class: `badge ${line.kind === "warning" ? "warn" : "calm"}` }, line.kind)), el("td", null, line.text)))),
      left > 0 && el("caption", { class: "below-table" }, `and ${fmt.integer(left)} earlier`));
  return card("Warnings and events", { note: detail.warnings.length ? fmt.plural(detail.warnings.length, "warning") : "no warnings" },
    el("div", { class: "panel-body scroll", tabindex: "0", role: "region", "aria-label": "Warnings and events" }, body));
}

/** @param {any} check */
function checkText(check) {
  const name = check.expert ? `${check.expert}: ` : "";
  if (check.file) return `${name}${check.file} read back, difference ${fmt.number(check.file_difference)}`;
  const idle = check.idle?.length ? `, ${check.idle.length} have learned nothing` : "";
  return `${name}${fmt.plural(check.layers, "layer")} trained${idle}${check.change === null ? "" : `, output changed by ${fmt.percent(check.change)}`}`;
}

/** The end of the run's log, read again while it is visible and the run is going on.
 * @param {string} id @param {() => boolean} isActive */
export function logPanel(id, isActive) {
  const text = el("pre", { class: "log-text", tabindex: "0", role: "log", "aria-label": "Log", "aria-live": "off" }, "");
  const source = el("span", { class: "mono" });
  const node = card("Log", { note: source, actions: copyButton(() => text.textContent ?? "") }, text);
  let visible = false;
  let loaded = false;

  async function load() {
    const answer = await api.get(`api/runs/${id}/log?lines=200`);
    const atEnd = text.scrollTop + text.clientHeight >= text.scrollHeight - 24;
    const joined = answer.lines.join("\n") || "The log is empty.";
    if (text.textContent !== joined) {
      text.textContent = joined;
      if (atEnd || !loaded) text.scrollTop = text.scrollHeight;
    }
    source.textContent = answer.source ?? "";
    loaded = true;
  }
  const failed = (/** @type {Error} */ error) => { text.textContent = error.message; };
  const observer = new IntersectionObserver(([entry]) => {
    visible = entry.isIntersecting;
    if (visible && !loaded) load().catch(failed);
  });
  observer.observe(node);
  const timer = window.setInterval(() => { if (visible && isActive() && !document.hidden) load().catch(failed); }, LOG_MS);
  return { node, reload: () => load().catch(failed), stop: () => { window.clearInterval(timer); observer.disconnect(); } };
}

/** The resolved configuration, one section a table. @param {any} detail */
export function configPanel(detail) {
  const flat = (/** @type {any} */ value, /** @type {string} */ path) => value !== null && typeof value === "object" && Object.keys(value).length > 0
    ? Object.entries(value).flatMap(([key, inner]) => flat(inner, Array.isArray(value) ? `${path}[${key}]` : path ? `${path}.${key}` : key))
    : [[path, typeof value === "string" ? value : JSON.stringify(value)]];
  const rows = flat(detail.config, "");
  const versions = Object.entries(detail.versions);
  const table = (/** @type {any[]} */ lines) => el("table", { class: "table config-table" }, el("tbody", null, lines.map(([key, value]) => el("tr", null, el("th", { scope: "row", class: "mono" }, key), el("td", { class: "mono" }, value)))));
  const field = el("input", { type: "search", placeholder: "Filter keys", "aria-label": "Filter keys of the configuration", class: "config-filter", oninput: () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const line of node.querySelectorAll("tbody tr")) {
      /** @type {HTMLElement} */ (line).hidden = !words.every((word) => line.textContent?.toLowerCase().includes(word));
    }
  } });
  const node = card("Configuration", { note: fmt.plural(rows.length, "value"), actions: [field, copyButton(() => JSON.stringify(detail.config, null, 2), "Copy as JSON")] },
    el("div", { class: "panel-body scroll", tabindex: "0", role: "region", "aria-label": "Configuration" }, table(rows),
      versions.length > 0 && [el("h3", { class: "sub" }, "Versions"), table(versions)]));
  return node;
}
