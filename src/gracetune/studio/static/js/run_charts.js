/** The charts of one run, and which curve is drawn how. Charts share the pointer's position. */

import { BINARY_STEPS, chart, el, fmt } from "./ui.js";

const SYNC = "run";

/** Name of an expert as it is shown; a model with one denoiser has none. @param {string} expert @param {string} otherwise */
export const expertName = (expert, otherwise) => (expert ? expert.replaceAll("_", " ") : otherwise);

/** @param {any} series @returns {import("./chart.js").Curve[]} */
function lossCurves(series) {
  const experts = Object.keys(series.loss);
  return experts.flatMap((expert, at) => [
    { key: `raw ${expert}`, label: [expertName(expert, ""), "raw"].filter(Boolean).join(" · "), colour: at, faint: true },
    { key: `smoothed ${expert}`, label: [expertName(expert, ""), "smoothed"].filter(Boolean).join(" · "), colour: at, width: 2, dash: [] },
  ]).concat(Object.keys(series.held_out).map((expert, at) =>
    ({ key: `held ${expert}`, label: [expertName(expert, ""), "held-out"].filter(Boolean).join(" · "), colour: experts.length + at, points: true, faint: false, width: 2, dash: [5, 4] })));
}

/** @param {any} series */
function lossPoints(series) {
  /** @type {Record<string, any>} */
  const points = {};
  for (const [expert, curve] of Object.entries(series.loss)) {
    points[`raw ${expert}`] = curve;
    points[`smoothed ${expert}`] = { step: curve.step, value: curve.smoothed ?? curve.value };
  }
  for (const [expert, curve] of Object.entries(series.held_out)) points[`held ${expert}`] = curve;
  return points;
}

/** @param {Record<string, any>} curves @param {(key: string) => string} label */
const byKey = (curves, label) => Object.keys(curves).map((key, at) => ({ key, label: label(key), colour: at }));

/** @param {number|null} value */
const milliseconds = (value) => (value === null ? fmt.none : fmt.pace(value / 1000));

/** @param {any} series */
export function runCharts(series) {
  const loss = chart({ title: "Loss", curves: lossCurves(series), height: 300, log: false, sync: SYNC });
  const rate = chart({ title: "Learning rate", curves: byKey(series.lr, (key) => key.replaceAll("_", " ")), sync: SYNC,
    format: (value) => (value === null ? fmt.none : value === 0 ? "0" : value.toExponential(2)), zero: true, height: 180 });
  const norm = chart({ title: "Gradient norm", unit: "before clipping", sync: SYNC, height: 180, log: false,
    curves: [{ key: "norm", label: "gradient norm", colour: 3, dash: [] }] });
  const time = chart({ title: "Step time", sync: SYNC, format: milliseconds, zero: true, height: 180,
    curves: [{ key: "step", label: "step", colour: 0 }, { key: "wait", label: "of it waiting for data", colour: 1 }] });
  const batch = chart({ title: "Effective batch", unit: "samples per step", sync: SYNC, zero: true, height: 180,
    format: (value) => fmt.number(value, 3), curves: [{ key: "batch", label: "batch", colour: 2, dash: [] }] });
  const memory = chart({ title: "Memory", curves: byKey(series.memory, (key) => key), sync: SYNC, zero: true, height: 180,
    format: (value) => fmt.bytes(value), steps: BINARY_STEPS });
  const all = [loss, rate, norm, time, batch, memory];
  let known = signature(series);

  /** @param {any} newer */
  function set(newer) {
    if (known !== signature(newer)) {
      known = signature(newer);
      loss.setCurves(lossCurves(newer));
      rate.setCurves(byKey(newer.lr, (key) => key.replaceAll("_", " ")));
      memory.setCurves(byKey(newer.memory, (key) => key));
    }
    loss.set(lossPoints(newer));
    rate.set(newer.lr);
    norm.set({ norm: newer.grad_norm });
    time.set({ step: newer.step_ms, wait: newer.data_wait_ms });
    batch.set({ batch: newer.batch });
    memory.set(newer.memory);
  }

  set(series);
  const [large, ...small] = all.map(({ node }) => el("div", { class: "card" }, node));
  large.classList.add("chart-large");
  return { large, small, set, destroy: () => all.forEach((one) => one.destroy()) };
}

/** Which curves there are. @param {any} series */
function signature(series) {
  return [series.loss, series.held_out, series.lr, series.memory].map((curves) => Object.keys(curves).join()).join(";");
}
