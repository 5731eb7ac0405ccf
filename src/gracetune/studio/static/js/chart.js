/**
 * A line chart of fixed height around uPlot: its own legend (buttons that hide a curve and show the value under the
 * pointer), zoom by dragging, the same pointer position in all charts of a page, and the arrow keys.
 */

import uPlot from "../vendor/uplot/uPlot.esm.js";
import { el, fill, setText } from "./dom.js";
import { fmt } from "./format.js";

/**
 * @typedef {{key: string, label: string, colour: number, faint?: boolean, dash?: number[], width?: number,
 *   points?: boolean, hidden?: boolean}} Curve `colour` counts from 0; the first eight have a colour and a dash pattern each, and
 *   the following ones the same colours with other patterns
 * @typedef {{step: number[], value: (number|null)[]}} Points
 */

const DASHES = [[], [7, 3], [2, 3], [9, 3, 2, 3], [4, 2], [1, 3], [12, 4], [3, 6]];
const COLOURS = DASHES.length;

/** Distances between ticks of axes that count bytes or seconds. */
export const BINARY_STEPS = Array.from({ length: 48 }, (_, power) => 2 ** power);
export const TIME_STEPS = [1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200, 86400, 172800, 604800];

/** @param {string} name */
const cssColour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/**
 * @param {{title: string, curves: Curve[], height?: number, unit?: string, format?: (value: number|null) => string,
 *   lead?: Node, log?: boolean, zero?: boolean, empty?: string, sync?: string, steps?: number[], xSteps?: number[], xLabel?: string, xFormat?: (value: number) => string, actions?: any}} options
 */
export function chart(options) {
  const { title, height = 220, format = (value) => fmt.number(value), sync, xLabel = "step",
    xFormat = (value) => fmt.integer(value) } = options;
  let curves = options.curves;
  let log = options.log ?? false;
  /** @type {Map<string, Points>} */
  const points = new Map();
  const hidden = new Set(curves.filter((curve) => curve.hidden).map((curve) => curve.key));
  /** @type {Map<string, HTMLElement>} */
  const values = new Map();
  const legend = el("div", { class: "legend", role: "group", "aria-label": `Curves of ${title}` });
  const where = el("span", { class: "legend-x" }, "");
  const plot = el("div", { class: "plot", style: { height: `${height}px` }, tabindex: "0", role: "img", "aria-label": `${title}. No values yet.` });
  const nothing = el("p", { class: "plot-empty" }, options.empty ?? "No values yet");
  const logButton = el("button", { class: "btn small quiet", type: "button", "aria-pressed": String(log), onclick: () => { log = !log; logButton.setAttribute("aria-pressed", String(log)); rebuild(); } }, "log scale");
  const node = el("figure", { class: "chart" },
    el("figcaption", null, options.lead ?? el("span", { class: "chart-title" }, title),
      options.unit && el("span", { class: "chart-unit" }, options.unit), where,
      el("span", { class: "chart-actions" }, options.actions, options.log === undefined ? null : logButton)),
    legend, plot);
  plot.append(nothing);
  /** @type {any} */
  let graph = null;
  let frame = 0;

  function drawLegend() {
    values.clear();
    fill(legend, curves.map((curve) => {
      const value = el("span", { class: "legend-value" }, "");
      values.set(curve.key, value);
      const mark = el("span", { class: `mark c${curve.colour % COLOURS}${curve.faint ? " faint" : ""}`, "aria-hidden": "true" });
      return el("button", { class: "legend-item", type: "button", "aria-pressed": String(!hidden.has(curve.key)),
        title: "Show or hide this curve", onclick: (/** @type {Event} */ event) => toggle(curve.key, event) }, mark, el("span", { class: "legend-label" }, curve.label), value);
    }));
  }

  /** @param {string} key @param {Event} event */
  function toggle(key, event) {
    if (!hidden.delete(key)) hidden.add(key);
    /** @type {HTMLElement} */ (event.currentTarget).setAttribute("aria-pressed", String(!hidden.has(key)));
    graph?.setSeries(curves.findIndex((curve) => curve.key === key) + 1, { show: !hidden.has(key) });
  }

  function aligned() {
    const tables = curves.map((curve) => {
      const given = points.get(curve.key);
      return [given?.step ?? [], given?.value ?? []];
    });
    if (tables.length === 0) return [[]];
    // A missing step is no gap; a value that is not finite is.
    return uPlot.join(tables);
  }

  /** @param {any} u @param {number|null} index */
  function showValues(u, index) {
    const at = index ?? null;
    setText(where, at === null ? "" : `${xLabel} ${xFormat(u.data[0][at])}`);
    curves.forEach((curve, position) => {
      const column = u.data[position + 1] ?? [];
      let shown = at ?? column.length - 1;
      if (at === null) while (shown > 0 && (column[shown] === null || column[shown] === undefined)) shown -= 1;
      const place = values.get(curve.key);
      if (place) setText(place, column[shown] === null || column[shown] === undefined ? "" : format(column[shown]));
    });
  }

  function build() {
    const axis = {
      stroke: () => cssColour("--soft"), font: `11px ${cssColour("--font")}`, labelFont: `11px ${cssColour("--font")}`,
      grid: { stroke: () => cssColour("--grid"), width: 1 }, ticks: { show: false },
    };
    graph = new uPlot({
      width: Math.max(120, plot.clientWidth), height, legend: { show: false }, pxAlign: true,
      padding: [8, 20, 0, 0],
      cursor: { sync: sync ? { key: sync, setSeries: false } : undefined, drag: { x: true, y: false, setScale: true },
        points: { size: 6 }, focus: { prox: 24 } },
      scales: { x: { time: false }, y: { distr: log ? 3 : 1, range: log ? undefined : rangeOf(options.zero ?? false) } },
      axes: [
        { ...axis, size: 26, gap: 4, values: (_u, splits) => splits.map(xFormat), space: 64, ...(options.xSteps && { incrs: options.xSteps }) },
        { ...axis, size: 60, gap: 6, values: (_u, splits) => splits.map((value) => value === null ? "" : format(value)), space: 34, ...(options.steps && { incrs: options.steps }) },
      ],
      series: [{}, ...curves.map((curve) => ({
        label: curve.label, show: !hidden.has(curve.key), spanGaps: false,
        stroke: () => cssColour(`--c${curve.colour % COLOURS}`), alpha: curve.faint ? 0.35 : 1,
        width: curve.width ?? (curve.faint ? 1 : 1.75), dash: curve.faint ? [] : curve.dash ?? DASHES[(curve.colour + Math.floor(curve.colour / COLOURS)) % COLOURS],
        points: { show: curve.points ?? false, size: 5 },
      }))],
      hooks: { setCursor: [(u) => showValues(u, u.cursor.idx)], setData: [(u) => showValues(u, u.cursor.idx)] },
    }, aligned(), plot);
    showValues(graph, null);
  }

  function rebuild() {
    graph?.destroy();
    graph = null;
    draw();
  }

  function draw() {
    frame = 0;
    const any = [...points.values()].some((given) => given.step.length > 0);
    nothing.hidden = any;
    if (!any) return;
    if (graph === null) build();
    else {
      const zoomed = isZoomed(graph);
      const scale = { ...graph.scales.x };
      graph.setData(aligned(), !zoomed);
      if (zoomed) graph.setScale("x", { min: scale.min, max: scale.max });
    }
    plot.setAttribute("aria-label", describe(title, curves, points, format));
  }

  const observer = new ResizeObserver(() => {
    if (graph && plot.clientWidth > 0) graph.setSize({ width: plot.clientWidth, height });
  });
  observer.observe(plot);
  const redraw = () => rebuild();
  window.addEventListener("studio:theme", redraw);
  plot.addEventListener("keydown", (event) => moveCursor(graph, event));
  drawLegend();

  return {
    node,
    /** Replaces curves' points and draws once in the next frame. @param {Record<string, Points>} given */
    set(given) {
      for (const [key, value] of Object.entries(given)) points.set(key, value);
      if (frame === 0) frame = requestAnimationFrame(draw);
    },
    /** @param {Curve[]} replaced */
    setCurves(replaced) {
      curves = replaced;
      for (const curve of curves) if (curve.hidden) hidden.add(curve.key);
      const kept = new Set(curves.map((curve) => curve.key));
      for (const key of [...points.keys()]) if (!kept.has(key)) points.delete(key);
      drawLegend();
      rebuild();
    },
    /** What is shown in place of curves. @param {string} text */
    setEmpty(text) { setText(nothing, text); },
    destroy() {
      cancelAnimationFrame(frame);
      observer.disconnect();
      window.removeEventListener("studio:theme", redraw);
      graph?.destroy();
    },
  };
}

/** Room above and below the curve; from zero where asked. @param {boolean} zero */
function rangeOf(zero) {
  return (/** @type {any} */ _u, /** @type {number|null} */ low, /** @type {number|null} */ high) => {
    if (low === null || high === null) return [0, 1];
    const room = (high - low) * 0.08 || Math.abs(high) * 0.1 || 1;
    return [zero ? Math.min(0, low) : low - room, high + room];
  };
}

/** @param {any} u */
function isZoomed(u) {
  const steps = u.data[0];
  return steps.length > 1 && (u.scales.x.min > steps[0] || u.scales.x.max < steps[steps.length - 1]);
}

/** Left and right move the pointer by one point, Home and End to the ends, Escape shows everything again.
 * @param {any} u @param {KeyboardEvent} event */
function moveCursor(u, event) {
  if (u === null) return;
  const last = u.data[0].length - 1;
  const from = u.cursor.idx ?? last;
  const jump = Math.max(1, Math.round(last / 100));
  const to = { ArrowLeft: from - (event.shiftKey ? 1 : jump), ArrowRight: from + (event.shiftKey ? 1 : jump), Home: 0, End: last }[event.key];
  if (event.key === "Escape") u.setScale("x", { min: u.data[0][0], max: u.data[0][last] });
  if (to === undefined) return;
  event.preventDefault();
  const index = Math.min(last, Math.max(0, to));
  u.setCursor({ left: u.valToPos(u.data[0][index], "x"), top: u.over.clientHeight / 2 });
}

/** What a screen reader says instead of the drawing.
 * @param {string} title @param {Curve[]} curves @param {Map<string, Points>} points @param {(value: number|null) => string} format */
function describe(title, curves, points, format) {
  const parts = curves.filter((curve) => points.get(curve.key)?.step.length).map((curve) => {
    const { step, value } = /** @type {Points} */ (points.get(curve.key));
    return `${curve.label}: ${format(value[0])} at step ${step[0]}, ${format(value[value.length - 1])} at step ${step[step.length - 1]}`;
  });
  return `${title}. ${parts.join("; ")}.`;
}
