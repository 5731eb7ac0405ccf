/** The data of a run: buckets, captions that can be changed, dropped files, and the loss of each item when judged. */

import { api, card, el, emptyState, errorState, fill, fmt, icon, runHeader, setText, skeleton, tiles } from "../ui.js";
import { replaceQuery } from "../router.js";
import { captionCard } from "../forms/caption_card.js";

const PAGE_SIZES = [24, 60, 120];
/** @type {Map<string, Map<string, string>>} captions that are not saved, by the address of their dataset */
const unsaved = new Map();

/** @param {HTMLElement} root @param {any} params */
export async function show(root, params) {
  const run = await api.get(`api/runs/${params.id}`);
  const header = runHeader(run.row, "data");
  fill(root, header.node, el("p", { class: "note", role: "status" }, "Listing the data…"), skeleton(84), skeleton(420));
  let data;
  try {
    data = await api.get(`api/runs/${params.id}/data`);
  } catch (error) {
    fill(root, header.node, errorState(error, () => show(root, params)));
    return () => {};
  }
  if (data.datasets.length === 0) {
    fill(root, header.node, emptyState("No datasets", "The config of this run names no dataset that can be shown.",
      (data.notes ?? []).map((/** @type {string} */ note) => el("p", null, note))));
    return () => {};
  }
  const body = el("div", { class: "stack" });
  const notes = notesOf(data);
  const tabs = datasetTabs(data.datasets, (dataset) => open(dataset));
  fill(root, header.node, data.datasets.length > 1 ? tabs.node : null, body, notes);

  /** @type {Sheet|null} */
  let sheet = null;
  /** @param {any} dataset */
  function open(dataset) {
    tabs.mark(dataset.id);
    sheet = new Sheet(params, dataset, data.judged);
    fill(body, summary(dataset), sheet.node, el("div", { class: "data-top" }, buckets(dataset), dropped(dataset)), notesOf(dataset));
    sheet.load();
  }
  const wanted = params.query.get("dataset");
  open(data.datasets.find((/** @type {any} */ one) => one.id === wanted) ?? data.datasets[0]);

  /** @param {KeyboardEvent} event */
  const keys = (event) => sheet?.key(event);
  /** @param {BeforeUnloadEvent} event */
  const leaving = (event) => { if ([...unsaved.values()].some((drafts) => drafts.size > 0)) event.preventDefault(); };
  document.addEventListener("keydown", keys);
  window.addEventListener("beforeunload", leaving);
  return () => {
    document.removeEventListener("keydown", keys);
    window.removeEventListener("beforeunload", leaving);
  };
}

/** @param {any[]} datasets @param {(dataset: any) => void} open */
function datasetTabs(datasets, open) {
  const buttons = datasets.map((dataset) => el("button", { type: "button", dataset: { id: dataset.id }, onclick: () => open(dataset) },
    `${dataset.name ?? dataset.id} (${fmt.integer(dataset.items)})`));
  return {
    node: el("div", { class: "tabs", role: "group", "aria-label": "Datasets" }, buttons),
    /** @param {string} id */
    mark(id) {
      for (const button of buttons) {
        if (button.dataset.id === id) button.setAttribute("aria-current", "true");
        else button.removeAttribute("aria-current");
      }
    },
  };
}

/** @param {any} dataset */
function summary(dataset) {
  const parts = tiles([["items", "Items"], ["captions", "Captions"], ["buckets", "Buckets"], ["dropped", "Dropped files"]]);
  parts.set("items", fmt.integer(dataset.items), dataset.path);
  const { count, missing } = dataset.captions;
  parts.set("captions", fmt.integer(count), missing ? `${fmt.integer(missing)} missing` : "none missing");
  parts.set("buckets", fmt.integer(dataset.buckets.length), dataset.buckets.length ? `largest: ${largest(dataset.buckets).name}` : "");
  parts.set("dropped", fmt.integer(dataset.dropped.length), dataset.dropped.length ? "reasons below" : "every file is used");
  return parts.node;
}

/** @param {any[]} all */
const largest = (all) => all.reduce((most, one) => (one.items > most.items ? one : most), all[0]);

/** @param {any} dataset */
function buckets(dataset) {
  const all = dataset.buckets;
  if (all.length === 0) return card("Buckets", {}, el("p", { class: "note" }, "No items."));
  const most = Math.max(...all.map((/** @type {any} */ one) => one.items));
  return card("Buckets", { note: "Items of one bucket have the same size and are batched together." },
    el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table of buckets" }, el("table", { class: "table compact" },
      el("thead", null, el("tr", null, el("th", { scope: "col" }, "Size"), el("th", { scope: "col", class: "right" }, "Items"),
        el("th", { scope: "col", class: "share-cell" }, el("span", { class: "visually-hidden" }, "Share")),
        el("th", { scope: "col", class: "right" }, "Batches per epoch"))),
      el("tbody", null, all.map((/** @type {any} */ one) => el("tr", null, el("th", { scope: "row" }, one.name),
        el("td", { class: "right" }, fmt.integer(one.items)),
        el("td", { "aria-hidden": "true" }, el("span", { class: "share", style: { width: `${(100 * one.items) / most}%` } })),
        el("td", { class: "right" }, fmt.integer(one.batches))))))));
}

/** @param {any} dataset */
function dropped(dataset) {
  const all = dataset.dropped;
  if (all.length === 0) return card("Dropped files", {}, el("p", { class: "note" }, "None: every file of the dataset is used."));
  /** @type {Map<string, string[]>} */
  const byReason = new Map();
  for (const { file, reason } of all) byReason.set(reason, [...(byReason.get(reason) ?? []), file]);
  return card("Dropped files", { note: `${fmt.plural(all.length, "file")} that the run does not use` },
    el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Files and reasons" },
      [...byReason].map(([reason, files]) => el("details", { open: all.length <= 20 },
        el("summary", null, `${reason} (${fmt.integer(files.length)})`),
        el("ul", { class: "reason-list" }, files.map((file) => el("li", { class: "mono" }, file)))))));
}

/** @param {any} dataset or the answer for all of them */
function notesOf(dataset) {
  return dataset.notes?.length ? card(dataset.id ? `Notes on ${dataset.id}` : "Notes", {}, el("ul", { class: "plain-list" }, dataset.notes.map((/** @type {string} */ note) => el("li", null, note)))) : null;
}

/** The contact sheet of a dataset, one page at a time. */
class Sheet {
  /** @param {any} params @param {any} dataset @param {boolean} judged */
  constructor(params, dataset, judged) {
    this.dataset = dataset;
    this.judged = judged;
    this.base = `api/runs/${params.id}/data/${encodeURIComponent(dataset.id)}`;
    if (!unsaved.has(this.base)) unsaved.set(this.base, new Map());
    this.offset = Math.max(0, Number(params.query.get("offset")) || 0);
    this.limit = PAGE_SIZES.includes(Number(params.query.get("limit"))) ? Number(params.query.get("limit")) : PAGE_SIZES[0];
    this.sort = judged && params.query.get("sort") === "loss" ? "loss" : "name";
    this.total = dataset.items;
    this.turn = 0;
    const control = params.studio.control;
    this.why = !control ? "This studio is read only. To change captions: gracetune studio --control"
      : dataset.editable ? "" : dataset.why ? `Captions cannot be changed here: ${dataset.why}.` : "The captions of this dataset are not text files beside its items, so they cannot be changed here.";
    this.editable = dataset.editable && control;
    this.cards = /** @type {{node: HTMLElement, area: HTMLTextAreaElement}[]} */ ([]);
    this.build();
  }

  build() {
    this.list = el("ul", { class: "sheet", "aria-label": "Contact sheet" });
    this.said = el("div", { class: "visually-hidden", role: "status" });
    this.place = el("span", { class: "note", role: "status" });
    const button = (/** @type {string} */ text, /** @type {number} */ by) => el("button", { class: "btn", type: "button", onclick: () => this.turnPage(by) }, text);
    this.back = button("Previous", -1);
    this.next = button("Next", 1);
    const size = el("select", { id: "page-size", value: String(this.limit), onchange: () => { this.limit = Number(size.value); this.load(0); } },
      PAGE_SIZES.map((amount) => el("option", { value: String(amount) }, String(amount))));
    const sort = el("select", { id: "sort", value: this.sort, onchange: () => { this.sort = sort.value; this.load(0); } },
      el("option", { value: "name" }, "file name"), el("option", { value: "loss" }, "loss, highest first"));
    this.node = card("Items", { note: this.why || "Ctrl+Enter saves a caption. The next run, or the next epoch that encodes anew, reads it." },
      el("div", { class: "sheet-tools" },
        this.judged ? el("label", { for: "sort" }, "Sorted by", sort) : null,
        el("label", { for: "page-size" }, "Per page", size),
        el("div", { class: "pager" }, this.back, this.place, this.next)),
      this.list, this.said);
  }

  /** @param {1|-1|number} by */
  turnPage(by) {
    const offset = this.offset + by * this.limit;
    if (offset < 0 || offset >= this.total) return;
    this.load(offset, true);
  }

  /** @param {number} [offset] @param {boolean} [scroll] */
  async load(offset = this.offset, scroll = false) {
    const turn = (this.turn += 1);
    this.offset = offset;
    this.list.setAttribute("aria-busy", "true");
    replaceQuery({ dataset: this.dataset.id, sort: this.sort === "name" ? "" : this.sort,
      limit: this.limit === PAGE_SIZES[0] ? "" : String(this.limit), offset: offset ? String(offset) : "" });
    try {
      const page = await api.get(`${this.base}/items?offset=${offset}&limit=${this.limit}&sort=${this.sort}`);
      if (turn === this.turn) this.draw(page, scroll);
    } catch (error) {
      if (turn === this.turn) fill(this.list, el("li", { class: "item" }, errorState(error, () => this.load())));
    }
    this.list.removeAttribute("aria-busy");
  }

  /** @param {any} page @param {boolean} scroll */
  draw(page, scroll) {
    this.total = page.total;
    const last = Math.min(page.total, this.offset + page.items.length);
    setText(this.place, page.total ? `${fmt.integer(this.offset + 1)}–${fmt.integer(last)} of ${fmt.integer(page.total)}` : "no items");
    this.back.disabled = this.offset === 0;
    this.next.disabled = last >= page.total;
    // Previews and captions have fixed heights: the sheet keeps its own while a page is replaced.
    this.cards = page.items.map((/** @type {any} */ item, /** @type {number} */ index) => captionCard(item, {
      place: `offset=${this.offset + index}&limit=1&sort=${this.sort}`, base: this.base, media: this.dataset.media, editable: this.editable,
      why: this.why, drafts: /** @type {Map<string, string>} */ (unsaved.get(this.base)), judged: this.judged,
      announce: (text) => setText(this.said, text) }));
    fill(this.list, this.cards.map((one) => one.node));
    if (scroll) this.node.scrollIntoView({ block: "start" });
    if (scroll && document.activeElement === document.body) (this.next.disabled ? this.back : this.next).focus({ preventScroll: true });
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    const target = /** @type {HTMLElement} */ (event.target);
    if (event.ctrlKey || event.metaKey || event.altKey || target.matches("textarea, input, select") || document.querySelector("dialog[open]")) return;
    if (event.key === "n") this.turnPage(1);
    if (event.key === "p") this.turnPage(-1);
    const current = this.cards.find((one) => one.node === target);
    if (current && (event.key === "Enter" || event.key === "e")) { event.preventDefault(); current.area.focus(); }
  }
}
