/** One run, live: figures, charts, samples, plan against reality, files, log, and the buttons that act on it. */

import { api, el, fill, fmt, runHeader, stream, tiles } from "../ui.js";
import { lastSmoothed, liveSeries } from "../live_series.js";
import { runActions } from "../run_actions.js";
import { runCharts } from "../run_charts.js";
import { configPanel, eventsPanel, filesPanel, logPanel, planPanel } from "../run_panels.js";
import { samples } from "../samples.js";

const DRAW_MS = 250;
const REFRESH_MS = 400;
/** Events after which the rest of the page is fetched again. */
const REFRESHING = new Set(["ValidationDone", "CheckpointWritten", "Warned", "RunEnded", "RunStarted", "Planned", "SelfChecked",
  "StageSwitched", "EffectiveBatchChanged", "RequestServed"]);

/** @param {HTMLElement} root @param {{id: string}} params */
export async function show(root, { id }) {
  const path = `api/runs/${id}`;
  let [detail, series, memory] = await Promise.all([api.get(path), api.get(`${path}/series?points=2000`), memoryOf(path)]);
  let live = liveSeries(series);
  let row = detail.row;

  const actions = runActions(id, () => scheduleRefresh());
  const head = runHeader(row, "", actions.node);
  const figures = tiles([["step", "Step"], ["loss", "Loss, smoothed"], ["held", "Held-out loss"], ["pace", "Per step"],
    ["left", "Time left"], ["epoch", "Epoch"], ["memory", "Memory"], ["written", "Last event"]]);
  const charts = runCharts(series);
  const shown = samples(detail.validations);
  const log = logPanel(id, () => row.state === "running" || row.state === "preparing");
  const panels = el("div", { class: "grid two panels" });
  fill(root, head.node, figures.node, charts.large, shown.node, el("div", { class: "charts" }, charts.small), panels);

  function drawFigures() {
    const done = row.total_steps ? row.step / row.total_steps : null;
    figures.set("step", fmt.integer(row.step), done === null ? "" : `${fmt.percent(done)} of ${fmt.integer(row.total_steps)}`);
    figures.set("epoch", fmt.integer(row.epoch), "counted from 0");
    figures.set("loss", fmt.number(lastSmoothed(live.series) ?? row.loss_smoothed), row.loss === null ? "" : `last step ${fmt.number(row.loss)}`);
    figures.set("held", fmt.number(row.held_out), row.held_out === null ? "not evaluated" : "never trained on");
    figures.set("pace", fmt.pace(row.seconds_per_step), row.seconds_per_step ? `${fmt.integer(3600 / row.seconds_per_step)} steps/h` : "");
    figures.set("left", row.state === "running" ? fmt.duration(row.eta_s) : fmt.none,
      row.state === "running" && row.eta_s ? `until ${fmt.time(Date.now() / 1000 + row.eta_s)}` : row.state);
    figures.set("memory", row.memory ? fmt.bytes(row.memory.used_bytes) : fmt.none, row.memory ? `of ${fmt.bytes(row.memory.capacity_bytes)} · ${row.memory.tier}` : "");
    figures.set("written", fmt.ago(row.updated_s), fmt.time(row.updated_s));
  }

  function drawPanels() {
    const kept = [...panels.querySelectorAll(".panel-body")].map((body) => body.scrollTop);
    fill(panels, planPanel(detail.plan, memory), filesPanel(detail), log.node, eventsPanel(detail), configPanel(detail));
    panels.querySelectorAll(".panel-body").forEach((body, at) => { body.scrollTop = kept[at] ?? 0; });
  }

  function drawAll() {
    head.update(row);
    actions.update(detail.actions);
    drawFigures();
  }

  let drawTimer = 0;
  function scheduleDraw() {
    if (drawTimer === 0) drawTimer = window.setTimeout(() => { drawTimer = 0; charts.set(live.series); }, DRAW_MS);
  }

  async function refresh() {
    [detail, memory] = await Promise.all([api.get(path), memoryOf(path)]);
    row = detail.row;
    shown.update(detail.validations);
    drawAll();
    drawPanels();
  }
  let refreshTimer = 0;
  function scheduleRefresh() {
    if (refreshTimer === 0) refreshTimer = window.setTimeout(() => { refreshTimer = 0; refresh().catch(console.error); }, REFRESH_MS);
  }

  async function reset() {
    live = liveSeries(await api.get(`${path}/series?points=2000`));
    charts.set(live.series);
    log.reload();
    scheduleRefresh();
  }

  drawAll();
  drawPanels();
  const clock = window.setInterval(() => figures.set("written", fmt.ago(row.updated_s), fmt.time(row.updated_s)), 1000);
  const close = stream(`${path}/stream`, {
    status(newer) {
      const changed = newer.state !== row.state;
      row = newer;
      head.update(row);
      drawFigures();
      if (changed) scheduleRefresh();
    },
    step(event) { if (live.step(event)) scheduleDraw(); },
    event(event) {
      if (live.event(event)) scheduleDraw();
      if (REFRESHING.has(event.kind)) scheduleRefresh();
    },
    reset() { reset().catch(console.error); },
    reconnected() { reset().catch(console.error); },
  });
  return () => {
    close();
    window.clearInterval(clock);
    window.clearTimeout(drawTimer);
    window.clearTimeout(refreshTimer);
    log.stop();
    charts.destroy();
  };
}

/** Memory in use, for the table beside the plan; a run that has not measured any has none. @param {string} path */
async function memoryOf(path) {
  return api.get(`${path}/memory`).catch(() => null);
}
