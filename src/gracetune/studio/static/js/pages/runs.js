/** The list of runs: search, filter by state, sort, select for comparison. Rows change in place while runs go on. */

import { api, el, emptyState, fill, fmt, icon, pageHead, setTitle, stream } from "../ui.js";
import { replaceQuery } from "../router.js";
import { runRow } from "../run_row.js";

/** Name of a filter -> label and the states it shows. @type {Record<string, [string, string[]|null]>} */
const FILTERS = {
  all: ["All", null],
  active: ["Active", ["running", "preparing"]],
  finished: ["Finished", ["finished"]],
  stopped: ["Stopped", ["stopped"]],
  failed: ["Failed", ["failed", "stale"]],
};
/** @type {Record<string, [string, (a: any, b: any) => number]>} */
const ORDERS = {
  recent: ["Newest first", (a, b) => isActive(b) - isActive(a) || (b.began_s ?? 0) - (a.began_s ?? 0)],
  name: ["Name", (a, b) => a.name.localeCompare(b.name, "en", { numeric: true })],
  loss: ["Lowest loss", (a, b) => (a.loss_smoothed ?? Infinity) - (b.loss_smoothed ?? Infinity)],
  held: ["Lowest held-out loss", (a, b) => (a.held_out ?? Infinity) - (b.held_out ?? Infinity)],
  left: ["Least time left", (a, b) => (a.eta_s ?? Infinity) - (b.eta_s ?? Infinity)],
};
const COLUMNS = [["run", "Run"], ["state", "State"], ["steps", "Steps"], ["loss", "Loss"], ["held", "Held-out"],
  ["pace", "Per step"], ["left", "Time left"], ["memory", "Memory"], ["when", "Last event"]];

/** Rows made at first, and more whenever the end of the list comes near: a thousand at once would take a second. */
const ROWS = 60;

/** @param {any} row */
const isActive = (row) => Number(row.state === "running" || row.state === "preparing");

/** @param {HTMLElement} root @param {{query: URLSearchParams, studio: any}} params */
export async function show(root, { query, studio }) {
  setTitle("Runs");
  const answer = await api.get("api/runs");
  /** @type {Map<string, any>} */
  const rows = new Map(answer.runs.map((/** @type {any} */ row) => [row.id, row]));
  /** @type {Map<string, ReturnType<typeof runRow>>} */
  const shown = new Map();
  const selected = new Set();
  let filter = query.get("state") ?? "all";
  if (!(filter in FILTERS)) filter = "all";

  let limit = ROWS;

  const head = el("div");
  const search = el("input", { type: "search", id: "search", placeholder: "Search name, family, adapter, machine",
    "aria-label": "Search runs", "data-search": true, value: query.get("q") ?? "", oninput: () => { limit = ROWS; arrange(); } });
  const order = el("select", { "aria-label": "Order of the runs", onchange: () => { limit = ROWS; arrange(); } },
    Object.entries(ORDERS).map(([name, [label]]) => el("option", { value: name }, label)));
  order.value = query.get("order") ?? "recent";
  if (!order.value) order.value = "recent";
  const chips = el("div", { class: "chips", role: "group", "aria-label": "Filter by state" });
  const compare = el("a", { class: "btn", role: "link" }, icon("chart"), el("span", null, "Compare"));
  const body = el("tbody");
  const table = el("table", { class: "table runs" },
    el("caption", { class: "visually-hidden" }, "Runs below this folder"),
    el("thead", null, el("tr", null, el("th", { class: "pick", scope: "col" }, el("span", { class: "visually-hidden" }, "Compare")),
      COLUMNS.map(([key, label]) => el("th", { scope: "col", class: `col-${key}` }, label)))), body);
  const none = el("div", { hidden: true });
  const end = el("p", { class: "runs-end note" }, "more runs below");
  const list = el("div", { class: "card runs-card" }, table, end, none);
  const observer = new IntersectionObserver(([entry]) => {
    if (entry.isIntersecting && !end.hidden) { limit += 3 * ROWS; arrange(); }
  }, { rootMargin: "1200px" });
  observer.observe(end);

  function drawHead() {
    const active = [...rows.values()].filter(isActive).length;
    fill(head, pageHead({ title: "Runs",
      note: [fmt.plural(rows.size, "run"), active ? `${active} active` : null, studio.root].filter(Boolean).join(" · "),
      actions: studio.control ? el("a", { class: "btn primary", href: "#/new" }, "New run") : null }));
    fill(chips, Object.entries(FILTERS).map(([name, [label, states]]) => {
      const count = [...rows.values()].filter((row) => states === null || states.includes(row.state)).length;
      return el("button", { class: "btn small", type: "button", "aria-pressed": String(name === filter),
        onclick: () => { filter = name; limit = ROWS; arrange(); drawHead(); } }, label, el("span", { class: "count" }, fmt.integer(count)));
    }));
  }

  function drawCompare() {
    const ids = [...selected].filter((id) => rows.has(id));
    const ready = ids.length >= 2;
    compare.setAttribute("aria-disabled", String(!ready));
    if (ready) compare.setAttribute("href", `#/compare?ids=${ids.join(",")}`);
    else compare.removeAttribute("href");
    compare.title = ready ? "" : "Select two or more runs";
    fill(/** @type {Element} */ (compare.lastElementChild), ready ? `Compare ${ids.length} runs` : "Compare");
  }

  function matching() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const states = FILTERS[filter][1];
    return [...rows.values()].filter((row) => {
      const text = [row.name, row.path, row.family, row.model, row.adapter, row.machine, row.state].join(" ").toLowerCase();
      return (states === null || states.includes(row.state)) && words.every((word) => text.includes(word));
    }).sort(ORDERS[order.value][1]);
  }

  /** Puts the rows that match into their order. */
  function arrange() {
    const found = matching();
    replaceQuery({ q: search.value, state: filter === "all" ? "" : filter, order: order.value === "recent" ? "" : order.value });
    body.replaceChildren(...found.slice(0, limit).map((row) => {
      let line = shown.get(row.id);
      if (line === undefined) {
        line = runRow(row, (id, on) => { if (on) selected.add(id); else selected.delete(id); drawCompare(); });
        shown.set(row.id, line);
      }
      return line.node;
    }));
    end.hidden = found.length <= limit;
    table.hidden = found.length === 0;
    none.hidden = found.length > 0;
    if (found.length === 0) fill(none, nothing(rows.size, studio.root));
  }

  drawHead();
  drawCompare();
  arrange();
  fill(root, head, el("div", { class: "row runs-tools" },
    el("div", { class: "search" }, icon("search"), search, el("kbd", { "aria-hidden": "true" }, "/")),
    chips, el("span", { class: "spacer" }), order, compare), list);

  const close = stream("api/runs/stream", {
    runs({ changed, removed }) {
      let moved = false;
      for (const row of changed) {
        const before = rows.get(row.id);
        moved ||= before === undefined || before.state !== row.state;
        rows.set(row.id, row);
        shown.get(row.id)?.update(row);
      }
      for (const id of removed) {
        moved = rows.delete(id) || moved;
        shown.delete(id);
        selected.delete(id);
      }
      if (moved) { drawHead(); arrange(); drawCompare(); }
    },
    async reconnected() {
      for (const row of (await api.get("api/runs")).runs) { rows.set(row.id, row); shown.get(row.id)?.update(row); }
      drawHead();
      arrange();
    },
  });
  return () => { close(); observer.disconnect(); };
}

/** @param {number} total @param {string} root */
function nothing(total, root) {
  if (total > 0) return emptyState("No run matches", "Change the search or the filter.");
  return emptyState("No runs yet", el("span", null, "There is no run below ", el("span", { class: "mono" }, root),
    ". A run appears here as soon as it starts:"), el("pre", null, "gracetune demo\ngracetune train my-config.yaml"));
}
