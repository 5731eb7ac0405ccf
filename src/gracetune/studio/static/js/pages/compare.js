/** Any number of runs in one chart, the differences of their configurations, and their samples side by side. */

import { api, chart, el, emptyState, fill, fmt, pageHead, setTitle, stateBadge, stream } from "../ui.js";
import { replaceQuery } from "../router.js";
import { lastSmoothed } from "../live_series.js";
import { expertName } from "../run_charts.js";
import { runPicker } from "../run_picker.js";
import { differences } from "../config_differences.js";
import { sampleComparison } from "../sample_comparison.js";

/** What can be compared: label and, of one run's series, the curves by name.
 * @type {Record<string, {label: string, curves: (series: any) => Record<string, any>, format?: (value: number|null) => string}>} */
const MEASURES = {
  smoothed: { label: "Loss, smoothed", curves: (series) => mapped(series.loss, (curve) => ({ step: curve.step, value: curve.smoothed ?? curve.value })) },
  loss: { label: "Loss, each step", curves: (series) => series.loss },
  held_out: { label: "Held-out loss", curves: (series) => series.held_out },
  lr: { label: "Learning rate", curves: (series) => series.lr, format: (value) => (value === null ? fmt.none : value.toExponential(2)) },
  grad_norm: { label: "Gradient norm", curves: (series) => ({ "": series.grad_norm }) },
  step_ms: { label: "Step time", curves: (series) => ({ "": series.step_ms }), format: (value) => (value === null ? fmt.none : fmt.pace(value / 1000)) },
  data_wait_ms: { label: "Wait for data", curves: (series) => ({ "": series.data_wait_ms }), format: (value) => (value === null ? fmt.none : fmt.pace(value / 1000)) },
};

const FOLLOW_MS = 4000;

/** @param {string[]} ids */
const address = (ids) => `api/compare?${ids.map((id) => `run=${id}`).join("&")}`;

/** @param {Record<string, any>} curves @param {(curve: any) => any} change */
const mapped = (curves, change) => Object.fromEntries(Object.entries(curves).map(([key, curve]) => [key, change(curve)]));

/** @param {HTMLElement} root @param {{query: URLSearchParams}} params */
export async function show(root, { query }) {
  setTitle("Compare");
  const { runs } = await api.get("api/runs");
  const known = new Set(runs.map((/** @type {any} */ row) => row.id));
  const picked = (query.get("ids") ?? "").split(",").filter((id) => known.has(id));
  let measure = query.get("of") ?? "smoothed";
  if (!(measure in MEASURES)) measure = "smoothed";
  const newest = [...runs].sort((a, b) => (b.began_s ?? 0) - (a.began_s ?? 0)).slice(0, 2).map((row) => row.id);
  let turn = 0;
  let timer = 0;
  let drawn = "";
  /** @type {Map<string, any>} newer rows of runs */
  const changes = new Map();
  /** @type {any} */
  let answer = null;
  /** @type {Record<string, any>} */
  let details = {};

  const choice = el("select", { "aria-label": "What the chart shows", onchange: () => { measure = choice.value; remember(); drawChart(); } },
    Object.entries(MEASURES).map(([name, { label }]) => el("option", { value: name }, label)));
  choice.value = measure;
  const plot = chart({ title: "Curves", lead: choice, curves: [], height: 380, log: false, format: (value) => (MEASURES[measure].format ?? fmt.number)(value) });
  const chartCard = el("div", { class: "card chart-large compare-chart" }, plot.node);
  const table = el("div", { class: "compare-table" });
  const below = el("div", { class: "stack below" });
  const picker = runPicker(runs, picked, load);
  const note = el("div");
  fill(root, pageHead({ title: "Compare", note: "Curves, configurations and samples of several runs" }), picker.node, note, table, chartCard, below);

  function remember() {
    replaceQuery({ ids: picker.ids().join(","), of: measure === "smoothed" ? "" : measure });
  }

  async function load() {
    const ids = picker.ids();
    const mine = (turn += 1);
    remember();
    const some = ids.length > 0;
    for (const part of [chartCard, table, below]) part.hidden = !some;
    fill(note, some ? null : el("div", { class: "card" }, emptyState("Choose runs to compare", "Add runs above, or select them in the list of runs.",
      runs.length > 1 && el("button", { class: "btn", type: "button", onclick: () => picker.add(newest) }, "Compare the two newest"))));
    if (!some) return;
    const [compared, found] = await Promise.all([
      api.get(address(ids)),
      Promise.all(ids.map((id) => api.get(`api/runs/${id}`))),
    ]);
    if (mine !== turn) return;
    answer = compared;
    details = Object.fromEntries(found.map((detail) => [detail.row.id, detail]));
    drawTable();
    drawChart();
    fill(below, differences(answer.runs, answer.differences), sampleComparison(answer.runs, details));
  }

  function drawTable() {
    const columns = ["Run", "State", "Steps", "Loss, smoothed", "Held-out", "Per step", "Memory"];
    fill(table, el("div", { class: "card flush" }, el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Compared runs" }, el("table", { class: "table" },
      el("thead", null, el("tr", null, columns.map((name) => el("th", { scope: "col" }, name)))),
      el("tbody", null, answer.runs.map((/** @type {any} */ row, /** @type {number} */ at) => el("tr", { "data-row": true },
        el("th", { scope: "row" }, el("span", { class: "row nowrap" }, el("span", { class: `mark c${at % 8}`, "aria-hidden": "true" }), el("a", { href: `#/run/${row.id}` }, row.name))),
        el("td", null, stateBadge(row.state, row.reason)), el("td", { class: "num nowrap-text" }, `${fmt.integer(row.step)} / ${fmt.integer(row.total_steps)}`),
        el("td", { class: "num nowrap-text" }, fmt.number(lastSmoothed(answer.series[row.id]) ?? row.loss_smoothed)), el("td", { class: "num nowrap-text" }, fmt.number(row.held_out)),
        el("td", { class: "num nowrap-text" }, fmt.pace(row.seconds_per_step)), el("td", { class: "num nowrap-text" }, row.memory ? fmt.bytes(row.memory.used_bytes) : fmt.none))))))));
  }

  function drawChart() {
    if (answer === null) return;
    /** @type {Record<string, any>} */
    const points = {};
    const curves = answer.runs.flatMap((/** @type {any} */ row, /** @type {number} */ at) => {
      const found = Object.entries(MEASURES[measure].curves(answer.series[row.id]));
      return found.map(([name, curve], index) => {
        const key = `${row.id} ${name}`;
        points[key] = curve;
        const label = found.length > 1 || name ? [row.name, expertName(name, "")].filter(Boolean).join(" · ") : row.name;
        return { key, label, colour: at, width: measure === "smoothed" ? 2 : 1.5, points: measure === "held_out", dash: index === 0 ? undefined : [2, 2 + 3 * index] };
      });
    });
    const names = curves.map((/** @type {any} */ curve) => curve.key).join();
    if (drawn !== measure + names) plot.setCurves(curves);
    drawn = measure + names;
    plot.set(points);
  }

  /** Newer curves of the runs that changed; the rest of the page stays. */
  async function follow() {
    timer = 0;
    const mine = turn;
    const rows = picker.ids().flatMap((id) => changes.get(id) ?? []);
    changes.clear();
    const { series } = rows.length === 0 ? { series: {} } : await api.get(address(rows.map((row) => row.id)));
    if (mine !== turn) return;
    const newer = new Map(rows.map((row) => [row.id, row]));
    answer = { ...answer, runs: answer.runs.map((/** @type {any} */ row) => newer.get(row.id) ?? row), series: { ...answer.series, ...series } };
    drawTable();
    drawChart();
  }

  await load();
  const close = stream("api/runs/stream", {
    runs({ changed }) {
      const chosen = new Set(picker.ids());
      for (const row of changed) changes.set(row.id, row);
      if (timer === 0 && changed.some((/** @type {any} */ row) => chosen.has(row.id))) {
        timer = window.setTimeout(() => follow().catch(console.error), FOLLOW_MS);
      }
    },
  });
  return () => { turn += 1; close(); window.clearTimeout(timer); plot.destroy(); };
}
