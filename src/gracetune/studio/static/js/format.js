/** Numbers as people read them. Unknown values are an en dash everywhere. */

const NONE = "–";
const KIB = 1024;

/** @param {unknown} value @returns {value is number} */
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** @param {number} value @param {number} digits significant digits */
function significant(value, digits) {
  if (value === 0) return "0";
  const magnitude = Math.floor(Math.log10(Math.abs(value)));
  if (magnitude < -4 || magnitude >= 9) return value.toExponential(Math.max(0, digits - 1)).replace("e+", "e");
  return value.toFixed(Math.max(0, Math.min(6, digits - 1 - magnitude)));
}

export const fmt = {
  none: NONE,

  /** 85.8 GiB @param {number|null|undefined} value */
  bytes(value) {
    if (!isNumber(value)) return NONE;
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let unit = 0;
    let left = Math.abs(value);
    while (left >= KIB && unit < units.length - 1) { left /= KIB; unit += 1; }
    const text = unit === 0 || left >= 100 ? left.toFixed(0) : left.toFixed(1);
    return `${value < 0 ? "-" : ""}${text} ${units[unit]}`;
  },

  /** 2 h 05 min; 52 min; 8 min 09 s; 41 s @param {number|null|undefined} seconds */
  duration(seconds) {
    if (!isNumber(seconds) || seconds < 0) return NONE;
    if (seconds < 10) return `${seconds.toFixed(1)} s`;
    const whole = Math.round(seconds);
    if (whole < 60) return `${whole} s`;
    if (whole < 600) return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
    const minutes = Math.round(seconds / 60);
    if (minutes < 60) return `${minutes} min`;
    if (minutes < 60 * 48) return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
    return `${Math.floor(minutes / 1440)} d ${Math.round((minutes % 1440) / 60)} h`;
  },

  /** Duration of one step: 480 ms, 2.31 s @param {number|null|undefined} seconds */
  pace(seconds) {
    if (!isNumber(seconds)) return NONE;
    if (seconds > 0 && seconds < 1e-5) return "<0.01 ms";
    return seconds < 1 ? `${significant(seconds * 1000, seconds < 1e-3 ? 2 : 3)} ms` : `${significant(seconds, 3)} s`;
  },

  /** 0.08213 @param {number|null|undefined} value @param {number} [digits] */
  number(value, digits = 4) {
    return isNumber(value) ? significant(value, digits) : NONE;
  },

  /** 12,500 @param {number|null|undefined} value */
  integer(value) {
    return isNumber(value) ? Math.round(value).toLocaleString("en-US") : NONE;
  },

  /** @param {number|null|undefined} fraction */
  percent(fraction) {
    return isNumber(fraction) ? `${(100 * fraction).toFixed(fraction < 0.1 && fraction > 0 ? 1 : 0)} %` : NONE;
  },

  /** 14:05:09 or 19 Nov 14:05 @param {number|null|undefined} seconds since 1970 */
  time(seconds) {
    if (!isNumber(seconds)) return NONE;
    const when = new Date(seconds * 1000);
    if (Date.now() - when.getTime() < 86400000) return when.toLocaleTimeString("en-GB");
    return when.toLocaleString("en-GB", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });
  },

  /** 3 min ago @param {number|null|undefined} seconds since 1970 */
  ago(seconds) {
    if (!isNumber(seconds)) return NONE;
    const passed = Math.max(0, Date.now() / 1000 - seconds);
    if (passed < 5) return "now";
    if (passed < 60) return `${Math.floor(passed)} s ago`;
    if (passed < 3600) return `${Math.floor(passed / 60)} min ago`;
    if (passed < 86400) return `${Math.floor(passed / 3600)} h ago`;
    return `${Math.floor(passed / 86400)} d ago`;
  },

  /** "1 run", "2 runs" @param {number} count @param {string} one @param {string} [many] */
  plural(count, one, many = `${one}s`) {
    return `${fmt.integer(count)} ${count === 1 ? one : many}`;
  },
};
