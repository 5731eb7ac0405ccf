/** One line of the list of runs. Its cells keep their size; a change sets text and nothing else. */

import { el, fill, fmt, icon, progress, setText, stateBadge } from "./ui.js";

/**
 * @param {any} row @param {(id: string, on: boolean) => void} select
 * @returns {{node: HTMLTableRowElement, update: (row: any) => void}}
 */
export function runRow(row, select) {
  const href = `#/run/${row.id}`;
  const box = el("input", { type: "checkbox", "aria-label": `Compare ${row.name}`, onchange: () => select(row.id, box.checked) });
  const thumbnail = el("span", { class: "thumb", "aria-hidden": "true" });
  const meta = el("span", { class: "run-meta" });
  const state = el("td", { class: "col-state" });
  const mini = el("span", { class: "run-mini" });
  const steps = el("span", { class: "steps-text" });
  const bar = progress(0, `Progress of ${row.name}`);
  const cells = Object.fromEntries(["loss", "held", "pace", "left"].map((key) => [key, el("td", { class: `col-${key}` })]));
  const memory = el("td", { class: "col-memory" });
  const when = el("time");
  const node = el("tr", { "data-row": true, onclick: open, onkeydown: mark },
    el("td", { class: "pick" }, el("label", { class: "pick-area" }, box)),
    el("td", { class: "col-run" }, el("div", { class: "run-cell" }, thumbnail, el("div", { class: "run-text" },
      el("a", { class: "run-name", href }, row.name), meta, mini))),
    state, el("td", { class: "col-steps" }, steps, bar),
    cells.loss, cells.held, cells.pace, cells.left, memory, el("td", { class: "col-when" }, when));
  let picture = "none yet";

  /** @param {MouseEvent} event */
  function open(event) {
    const target = /** @type {HTMLElement} */ (event.target);
    if (!target.closest("a, label, input") && !window.getSelection()?.toString()) location.hash = href;
  }

  /** @param {KeyboardEvent} event */
  function mark(event) {
    if (event.key !== "x" || event.target === box) return;
    box.checked = !box.checked;
    select(row.id, box.checked);
  }

  /** @param {any} newer */
  function update(newer) {
    const known = newer.total_steps ? newer.step / newer.total_steps : null;
    if (state.dataset.state !== newer.state + newer.reason) {
      state.dataset.state = newer.state + newer.reason;
      fill(state, stateBadge(newer.state, newer.reason));
    }
    setText(meta, [newer.family, newer.adapter, newer.path !== newer.name ? newer.path : ""].filter(Boolean).join(" · "));
    meta.title = newer.path;
    setText(mini, `${newer.state} · ${fmt.integer(newer.step)} / ${fmt.integer(newer.total_steps)}${newer.loss_smoothed === null ? "" : ` · loss ${fmt.number(newer.loss_smoothed)}`}`);
    setText(steps, `${fmt.integer(newer.step)} / ${fmt.integer(newer.total_steps)}`);
    bar.setAttribute("aria-valuenow", String(Math.round(100 * (known ?? 0))));
    /** @type {HTMLElement} */ (bar.firstElementChild).style.width = `${100 * Math.min(1, known ?? 0)}%`;
    setText(cells.loss, fmt.number(newer.loss_smoothed ?? newer.loss));
    setText(cells.held, fmt.number(newer.held_out));
    setText(cells.pace, fmt.pace(newer.seconds_per_step));
    setText(cells.left, newer.state === "running" ? fmt.duration(newer.eta_s) : fmt.none);
    setText(memory, newer.memory ? `${fmt.bytes(newer.memory.used_bytes)} / ${fmt.bytes(newer.memory.capacity_bytes)}` : fmt.none);
    when.dataset.ago = String(newer.updated_s ?? "");
    setText(when, fmt.ago(newer.updated_s));
    if (picture !== (newer.thumbnail ?? "")) {
      picture = newer.thumbnail ?? "";
      fill(thumbnail, !picture ? icon("image") : el("img", { src: picture, alt: "", loading: "lazy", decoding: "async", width: 44, height: 44 }));
    }
  }

  update(row);
  return { node, update };
}
