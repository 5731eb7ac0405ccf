/**
 * The curves of one run in the browser: what the server sent, and the points that have arrived since. Points are
 * thinned by pairs once there are many, so that a page left open for days stays as light as a new one.
 */

const MOST_POINTS = 6000;

/** @typedef {{step: number[], value: (number|null)[], smoothed?: (number|null)[]}} Curve */

/** @param {Curve} curve */
function thin(curve) {
  if (curve.step.length < MOST_POINTS) return;
  const keep = (/** @type {any} */ _value, /** @type {number} */ index) => index % 2 === 0 || index > MOST_POINTS - 200;
  curve.step = curve.step.filter(keep);
  curve.value = curve.value.filter(keep);
  if (curve.smoothed) curve.smoothed = curve.smoothed.filter(keep);
}

/** Adds a point unless it is already there. @param {Curve} curve @param {number} step @param {number|null|undefined} value
 * @param {boolean} [gaps] whether null is a gap in the curve; otherwise it is a value that was not measured */
function add(curve, step, value, gaps = false) {
  if (value === undefined || (value === null && !gaps) || (curve.step.at(-1) ?? -1) >= step) return false;
  curve.step.push(step);
  curve.value.push(Number.isFinite(value) ? value : null);
  thin(curve);
  return true;
}

/** @param {Record<string, Curve>} curves @param {string} key @returns {Curve} */
function of(curves, key) {
  curves[key] ??= { step: [], value: [] };
  return curves[key];
}

/** Weight of a new value, as in the server's moving average over a twentieth of all points.
 * @param {number} count points until now */
const weightOf = (count) => 2 / (Math.max(1, count / 20) + 1);

/** The last smoothed loss: that of the expert trained last. @param {any} series @returns {number|null} */
export function lastSmoothed(series) {
  const curves = Object.values(series.loss).filter((curve) => curve.step.length > 0);
  const latest = curves.sort((a, b) => b.step.at(-1) - a.step.at(-1))[0];
  return latest?.smoothed?.findLast((/** @type {number|null} */ value) => value !== null) ?? null;
}

/** @param {any} series what `api/runs/ID/series` sent */
export function liveSeries(series) {
  // The server thins long curves, so the number of points is told from the steps that they cover.
  const share = Object.keys(series.loss).length || 1;
  const counts = Object.fromEntries(Object.entries(series.loss).map(([expert, curve]) =>
    [expert, Math.max(curve.step.length, (curve.step.at(-1) ?? 0) / share)]));
  let samples = 0;
  let sampledStep = 0;

  return {
    series,
    /** Takes one step event; true if it was new. @param {any} event */
    step(event) {
      const expert = event.expert ?? "";
      const loss = of(series.loss, expert);
      if (!add(loss, event.step, event.loss, true)) return false;
      loss.smoothed ??= [];
      counts[expert] = (counts[expert] ?? 0) + 1;
      const before = loss.smoothed.at(-1);
      const last = loss.value.at(-1) ?? null;
      loss.smoothed.push(before === null || before === undefined || last === null ? last ?? before ?? null
        : before + weightOf(counts[expert]) * (last - before));
      for (const [group, value] of Object.entries(event.lr ?? {})) add(of(series.lr, group), event.step, value);
      add(series.grad_norm, event.step, event.grad_norm);
      add(series.step_ms, event.step, event.step_ms);
      add(series.data_wait_ms, event.step, event.data_wait_ms);
      if (samples && event.step > sampledStep) add(series.batch, event.step, (event.samples - samples) / (event.step - sampledStep));
      [samples, sampledStep] = [event.samples, event.step];
      return true;
    },
    /** Takes any other event; true if it changed a curve. @param {any} event */
    event(event) {
      if (event.kind === "HeldOutLoss") return add(of(series.held_out, event.stage ?? ""), event.step, event.mean);
      if (event.kind !== "MemorySampled") return false;
      let changed = false;
      for (const [tier, owners] of Object.entries(event.used_bytes ?? {})) {
        const total = Object.values(owners).reduce((sum, bytes) => sum + bytes, 0);
        changed = add(of(series.memory, tier), event.step, total) || changed;
      }
      return changed;
    },
  };
}
