/** The machine: what `gracetune doctor` finds and how to repair it, its memory, and the baselines measured on it. */

import { api, card, copyButton, el, errorState, fill, fmt, icon, pageHead, setTitle, toastError } from "../ui.js";
import { baselineCards } from "../forms/baselines.js";

const SIGNS = { ok: ["✓", "ok", "good"], warn: ["!", "warning", "warn"], fail: ["✕", "problem", "bad"], error: ["✕", "problem", "bad"] };
const ORDER = ["fail", "error", "warn", "ok"];

/** @param {HTMLElement} root @param {any} params */
export async function show(root, params) {
  setTitle("Machine");
  const body = el("div", { class: "stack" });
  const baselines = el("div", { class: "stack" });
  const said = el("span", { class: "note", role: "status" });
  const why = params.studio.control ? "" : "This studio is read only. To examine the machine again: gracetune studio --control";
  const again = el("button", { class: "btn", type: "button", disabled: Boolean(why), title: why || null, onclick: () => refresh() }, "Examine again");
  fill(root, pageHead({ title: "Machine", note: params.studio.machine, actions: [said, again] }), body, baselines);

  async function refresh() {
    again.disabled = true;
    said.textContent = "Examining…";
    try {
      drawMachine(body, await api.post("api/machine/refresh"));
      said.textContent = "Examined just now.";
    } catch (error) {
      said.textContent = "";
      toastError(error);
    }
    again.disabled = false;
    again.focus();
  }

  async function load() {
    const [machine, measured] = await Promise.allSettled([api.get("api/machine"), api.get("api/baselines")]);
    if (machine.status === "fulfilled") drawMachine(body, machine.value);
    else fill(body, errorState(machine.reason, load));
    fill(baselines, measured.status === "fulfilled" ? baselineCards(measured.value) : card("Baselines", {}, errorState(measured.reason, load)));
  }
  await load();
  return () => {};
}

/** @param {HTMLElement} body @param {any} report */
function drawMachine(body, report) {
  fill(body, el("div", { class: "machine-grid" }, checks(report), el("div", { class: "stack" }, profile(report), memory(report.machine))));
}

/** @param {any} report */
function checks(report) {
  const sorted = [...report.checks].sort((a, b) => ORDER.indexOf(a.status) - ORDER.indexOf(b.status));
  const bad = sorted.filter((check) => check.status !== "ok").length;
  return card("Checks", { note: bad ? `${bad} of ${sorted.length} need attention` : `all ${sorted.length} are fine` },
    // On a phone the cells are laid out as a grid, which takes the roles of a table from them.
    el("table", { class: "table checks", role: "table" },
      el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, ["Check", "Result", "Finding"].map((head) => el("th", { scope: "col", role: "columnheader" }, head)))),
      el("tbody", { role: "rowgroup" }, sorted.map((check) => el("tr", { role: "row", dataset: { check: check.name } },
        el("th", { scope: "row", role: "rowheader" }, words(check.name)),
        el("td", { role: "cell" }, statusBadge(check.status)),
        el("td", { role: "cell" }, check.finding, check.remedy ? remedy(check.remedy) : null))))));
}

/** `gpu_memory` is "GPU memory". @param {string} name */
function words(name) {
  const text = name.replaceAll("_", " ").replace(/\b(gpu|cpu|numa|cuda|uvm)\b/g, (letters) => letters.toUpperCase());
  return text.charAt(0).toUpperCase() + text.slice(1);
}

/** @param {string} status */
function statusBadge(status) {
  const [sign, word, kind] = SIGNS[/** @type {keyof typeof SIGNS} */ (status)] ?? ["?", status, "calm"];
  return el("span", { class: `badge ${kind}` }, el("span", { class: "sign", "aria-hidden": "true" }, sign), word);
}

/** @param {string} text */
function remedy(text) {
  const isCommand = /^(sudo|gracetune|pip|export|nvidia-smi|modprobe|echo|ulimit|apt|apt-get) /.test(text);
  return el("div", { class: "remedy" }, el("span", { class: "note" }, "Remedy:"), isCommand ? [el("code", null, text), copyButton(() => text)] : el("span", null, text));
}

/** @param {any} report */
function profile(report) {
  const { machine } = report;
  const { host, software } = machine;
  const gpus = machine.gpus.map((/** @type {any} */ gpu) => [`GPU ${gpu.index}`,
    `${gpu.name}, ${gpu.multiprocessors} multiprocessors, compute capability ${gpu.compute_capability}${gpu.coherent_link ? ", coherent link" : ""}`]);
  const rows = [
    ["Profile", `${report.profile}: ${report.reason}`],
    ["Memory mode", `${machine.memory_mode.value}: ${machine.memory_mode.reason}`],
    ...gpus,
    ["CPU", `${host.cpu_model ?? "unknown"}, ${fmt.plural(host.cpu_count, "core")}, ${host.architecture}`],
    ["Kernel", `${host.kernel}, pages of ${fmt.bytes(host.page_size)}`],
    ["Driver", machine.driver.status === "ok" ? `CUDA ${machine.driver.cuda_version ?? "unknown"}` : `${machine.driver.status}: ${machine.driver.detail}`],
    ["Python", `${software.python}, torch ${software.torch ?? "not installed"}`],
    ...(host.container ? [["Container", host.container]] : []),
  ];
  return card("Profile", { actions: copyButton(() => JSON.stringify(report, null, 2), "Copy the report") },
    el("dl", { class: "facts" }, rows.map(([name, value]) => [el("dt", null, name), el("dd", null, value)])),
    libraries(software.libraries ?? {}));
}

/** @param {Record<string, string|null>} all */
function libraries(all) {
  const names = Object.keys(all);
  if (names.length === 0) return null;
  return el("details", null, el("summary", null, fmt.plural(names.length, "library", "libraries")),
    el("table", { class: "table compact" }, el("thead", null, el("tr", null, el("th", { scope: "col" }, "Library"), el("th", { scope: "col" }, "Version"))),
      el("tbody", null, names.map((name) => el("tr", null, el("th", { scope: "row" }, name), el("td", null, all[name] ?? "not installed"))))));
}

/** @param {any} machine */
function memory(machine) {
  const { host } = machine;
  const pools = machine.gpus.map((/** @type {any} */ gpu) => pool(`GPU ${gpu.index}: ${gpu.name}`, gpu.memory_total, gpu.memory_free));
  pools.push(pool("Main memory", host.cpu_mem_total ?? host.mem_total, host.cpu_mem_available ?? host.mem_available));
  const nodes = host.numa_nodes.filter((/** @type {any} */ node) => node.memory_total > 0);
  return card("Memory", { note: "at the time of the examination" }, el("div", { class: "pools" }, pools),
    nodes.length > 1 ? el("details", null, el("summary", null, fmt.plural(nodes.length, "NUMA node")), numa(nodes)) : null);
}

/** @param {string} name @param {number|null} total @param {number|null} free */
function pool(name, total, free) {
  const used = total === null || free === null ? null : Math.max(0, total - free);
  const words = used === null ? "unknown" : `${fmt.bytes(used)} used of ${fmt.bytes(total)}`;
  const share = used === null || !total ? 0 : (100 * used) / total;
  return el("div", { class: "pool" }, el("div", { class: "pool-head" }, el("span", null, name), el("span", { class: "num" }, words)),
    el("div", { class: "pool-bar", role: "img", "aria-label": `${name}: ${words}` }, el("span", { style: { width: `${share}%` } })));
}

/** @param {any[]} nodes */
function numa(nodes) {
  const head = ["Node", "CPUs", "Memory", "Free", "Page cache"];
  return el("table", { class: "table compact" },
    el("thead", null, el("tr", null, head.map((text, index) => el("th", { scope: "col", class: index > 1 ? "right" : null }, text)))),
    el("tbody", null, nodes.map((node) => el("tr", null,
      el("th", { scope: "row" }, `${node.id}${node.is_gpu_memory ? " (GPU memory)" : ""}`), el("td", null, node.cpus || "none"),
      el("td", { class: "right" }, fmt.bytes(node.memory_total)), el("td", { class: "right" }, fmt.bytes(node.memory_free)),
      el("td", { class: "right" }, fmt.bytes(node.page_cache))))));
}
