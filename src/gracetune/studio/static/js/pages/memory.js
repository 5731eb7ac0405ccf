/** Where a run's memory is: a bar for each pool, what changed and why, traffic between the pools, what moves next. */

import { BINARY_STEPS, TIME_STEPS, api, card, chart, el, emptyState, fill, fmt, runHeader, stream } from "../ui.js";
import { colourNumber, poolPanel } from "../pool_panel.js";
import { changesPanel, nextPanel, stagePanel, unavailablePanel } from "../memory_panels.js";

const REFRESH_MS = 1000;
const POLL_MS = 5000;
const REFRESHING = new Set(["MemorySampled", "MemoryStageChanged", "MemoryReclaimed", "OverflowArenaChanged", "LookAheadChanged",
  "StageSwitched", "Planned", "RunEnded"]);

/** @param {HTMLElement} root @param {{id: string}} params */
export async function show(root, { id }) {
  const path = `api/runs/${id}`;
  let [{ row }, memory] = await Promise.all([api.get(path), api.get(`${path}/memory`)]);
  const head = runHeader(row, "memory");
  const pools = el("div", { class: "grid tier-panels" });
  const link = chart({ title: "Link traffic", unit: "GB/s between CPU and GPU", curves: [{ key: "link", label: "traffic", colour: 0 }], zero: true,
    xLabel: "after", xSteps: TIME_STEPS, xFormat: (seconds) => fmt.duration(Math.max(0, seconds)), format: (value) => (value === null ? fmt.none : fmt.number(value, 3)), height: 180 });
  const waits = chart({ title: "Waits for prefetched batches", curves: [{ key: "wait", label: "wait", colour: 1, dash: [] }], zero: true,
    format: (value) => (value === null ? fmt.none : fmt.pace(value / 1000)), height: 180 });
  const depth = chart({ title: "Look-ahead", unit: "batches moved ahead", curves: [{ key: "depth", label: "batches ahead", colour: 2, dash: [] }], zero: true,
    format: (value) => fmt.number(value, 2), height: 180 });
  const charts = el("div", { class: "charts" }, [link, waits, depth].map(({ node }) => el("div", { class: "card" }, node)));
  /** @type {Map<string, ReturnType<typeof chart>>} */
  const histories = new Map();
  /** @type {Map<string, string>} owners drawn in each chart */
  const known = new Map();
  const panels = el("div", { class: "grid two" });
  fill(root, head.node, pools, charts, panels);
  /** @type {Map<string, ReturnType<typeof poolPanel>>} */
  const bars = new Map();
  let panelsKey = "";

  function drawPools() {
    if (memory.tiers.length === 0) {
      fill(pools, card("Memory", {}, emptyState("Nothing measured yet", "A run measures its memory at its first log step, and every 30 seconds.")));
      bars.clear();
      return;
    }
    if ([...bars.keys()].join() !== memory.tiers.map((/** @type {any} */ tier) => tier.name).join()) {
      bars.clear();
      for (const tier of memory.tiers) bars.set(tier.name, poolPanel(tier, memory.one_pool));
      fill(pools, [...bars.values()].map(({ node }) => node));
    }
    for (const tier of memory.tiers) bars.get(tier.name)?.update(tier);
  }

  function draw() {
    drawPools();
    link.setEmpty(memory.unavailable["link traffic"] ? `Not available: ${memory.unavailable["link traffic"]}` : "No values yet");
    depth.setEmpty(memory.unavailable["uvm.stage"] ? `Not available: ${memory.unavailable["uvm.stage"]}` : "The look-ahead has not changed");
    const traffic = memory.link?.gb_per_s ?? { time_s: [], value: [] };
    const first = row.began_s ?? traffic.time_s[0] ?? 0;
    link.set({ link: { step: traffic.time_s.map((/** @type {number} */ time) => time - first), value: traffic.value } });
    waits.set({ wait: memory.link?.wait_ms ?? { step: [], value: [] } });
    depth.set({ depth: stairs(memory.look_ahead, row.step) });
    drawHistory();
    const key = JSON.stringify([memory.stages, memory.next, memory.reclamations, memory.arena, memory.look_ahead, memory.unavailable, memory.stages.length ? row.step : 0]);
    if (key === panelsKey) return;
    panelsKey = key;
    fill(panels, stagePanel(memory, row), nextPanel(memory), changesPanel(memory), unavailablePanel(memory));
  }

  /** Use over time, a chart for each pool. */
  function drawHistory() {
    for (const tier of memory.tiers) {
      const owners = Object.keys(memory.history?.[tier.name] ?? {});
      const curves = owners.map((owner) => ({ key: owner, label: owner, colour: colourNumber(owner) }));
      let one = histories.get(tier.name);
      if (one === undefined) {
        one = chart({ title: `${capital(tier.label || tier.name)} over time`, curves, zero: true, height: 180, format: (value) => fmt.bytes(value), steps: BINARY_STEPS });
        histories.set(tier.name, one);
        charts.append(el("div", { class: "card" }, one.node));
      } else if (known.get(tier.name) !== owners.join()) one.setCurves(curves);
      known.set(tier.name, owners.join());
      one.set(memory.history?.[tier.name] ?? {});
    }
  }

  let timer = 0;
  async function refresh() {
    timer = 0;
    memory = await api.get(`${path}/memory`);
    draw();
  }
  function schedule() {
    if (timer === 0) timer = window.setTimeout(() => refresh().catch(console.error), REFRESH_MS);
  }

  draw();
  const poll = window.setInterval(() => { if (row.state === "running" && !document.hidden) schedule(); }, POLL_MS);
  const close = stream(`${path}/stream`, {
    status(newer) { row = newer; head.update(row); },
    event(event) { if (REFRESHING.has(event.kind)) schedule(); },
    reset: schedule,
    reconnected: schedule,
  });
  return () => {
    close();
    window.clearInterval(poll);
    window.clearTimeout(timer);
    for (const one of [link, waits, depth, ...histories.values()]) one.destroy();
  };
}

/** @param {string} text */
const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

/** A value that stays until it changes. @param {{step: number, before: number, after: number}[]} changes @param {number} end */
function stairs(changes, end) {
  /** @type {{step: number[], value: number[]}} */
  const points = { step: [], value: [] };
  changes.forEach((change, at) => {
    if (at > 0) { points.step.push(change.step - 0.001); points.value.push(change.before); }
    points.step.push(change.step);
    points.value.push(change.after);
  });
  if (changes.length > 0 && end > changes[changes.length - 1].step) {
    points.step.push(end);
    points.value.push(changes[changes.length - 1].after);
  }
  return points;
}
