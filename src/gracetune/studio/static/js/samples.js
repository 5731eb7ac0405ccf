/**
 * The samples of a run: each prompt at a step chosen with a slider, all steps as a table, or two steps with a wipe.
 * Boxes have a fixed height, so a sample that arrives moves nothing.
 */

import { el, emptyState, fill, fmt, setText } from "./ui.js";
import { medium, wipe } from "./sample_media.js";

const VIEWS = [["step", "One step"], ["all", "All steps"], ["wipe", "Before and after"]];

/** @typedef {{step: number, requested: boolean, duration_s: number, files: {url: string, kind: string, prompt: string, seed: number|null}[]}} Validation */

/** @param {Validation[]} given */
export function samples(given) {
  let validations = given;
  let view = "step";
  let at = Math.max(0, validations.length - 1);
  let before = 0;

  const slider = el("input", { type: "range", min: 0, step: 1, "aria-label": "Step of the samples", oninput: () => { at = Number(slider.value); draw(); } });
  const where = el("output", { class: "sample-where" });
  const first = el("select", { "aria-label": "Step on the left", onchange: () => { before = Number(first.value); draw(); } });
  const firstField = el("label", { class: "row small-label" }, "before", first);
  const tabs = el("div", { class: "views", role: "group", "aria-label": "View of the samples" }, VIEWS.map(([name, label]) =>
    el("button", { type: "button", class: "btn small", "data-view": name, onclick: () => { view = name; draw(); } }, label)));
  const tools = el("div", { class: "sample-tools" }, tabs, el("label", { class: "sample-slider" }, el("span", { class: "small-label" }, "step"), slider), where, firstField);
  const body = el("div", { class: "sample-body" });
  const node = el("section", { class: "card samples", "aria-label": "Samples" },
    el("div", { class: "card-head" }, el("h2", null, "Samples"), tools), body);

  function draw() {
    tools.hidden = validations.length === 0;
    if (validations.length === 0) {
      fill(body, emptyState("No samples yet", "They appear here after each validation, and after Sample now."));
      return;
    }
    at = Math.min(at, validations.length - 1);
    before = Math.min(before, validations.length - 1);
    slider.max = String(validations.length - 1);
    slider.value = String(at);
    const { step, requested, duration_s: seconds } = validations[at];
    slider.setAttribute("aria-valuetext", `step ${step}`);
    setText(where, `${fmt.integer(step)}${requested ? ", requested" : ""}${seconds ? `, in ${fmt.duration(seconds)}` : ""}`);
    for (const button of tabs.children) button.setAttribute("aria-pressed", String(/** @type {HTMLElement} */ (button).dataset.view === view));
    firstField.style.visibility = view === "wipe" ? "visible" : "hidden";
    slider.disabled = view === "all";
    if (first.options.length !== validations.length) {
      fill(first, validations.map((one, index) => el("option", { value: index }, fmt.integer(one.step))));
    }
    first.value = String(before);
    if (view === "all") drawTable();
    else drawStrip();
  }

  /** Samples of one step, or of two with a wipe. Boxes are kept, so that the slider does not flicker. */
  function drawStrip() {
    const { files } = validations[at];
    let strip = body.querySelector(".strip");
    if (strip === null || strip.children.length !== files.length || strip.getAttribute("data-view") !== view) {
      strip = el("ul", { class: "strip", "data-view": view, tabindex: "0", "aria-label": "Samples of this step" },
        files.map(() => el("li", null, el("div", { class: "sample-box" }), el("p", { class: "sample-prompt" }), el("p", { class: "sample-note" }))));
      fill(body, strip);
    }
    files.forEach((file, index) => {
      const [box, prompt, note] = /** @type {HTMLElement[]} */ ([.../** @type {Element} */ (strip).children[index].children]);
      const old = validations[before].files[index];
      if (view === "wipe" && old) wipe(box, old, file, validations[before].step, validations[at].step);
      else medium(box, file, validations[at].step);
      setText(prompt, file.prompt || "(no prompt)");
      prompt.title = file.prompt;
      setText(note, file.seed === null || file.seed === undefined ? "" : `seed ${file.seed}`);
    });
  }

  function drawTable() {
    const prompts = validations[validations.length - 1].files;
    const head = el("tr", null, el("th", { scope: "col" }, "Prompt"), validations.map((one) => el("th", { scope: "col" }, fmt.integer(one.step))));
    const lines = prompts.map((file, index) => el("tr", null, el("th", { scope: "row" }, el("span", { class: "clamp", title: file.prompt }, file.prompt || "(no prompt)")),
      validations.map((one, column) => el("td", null, cell(one, index, column)))));
    const scroller = el("div", { class: "sample-table", tabindex: "0", role: "region", "aria-label": "Samples of all steps" },
      el("table", null, el("caption", { class: "visually-hidden" }, "A row for each prompt, a column for each step"), el("thead", null, head), el("tbody", null, lines)));
    fill(body, scroller);
    scroller.scrollLeft = scroller.scrollWidth;
  }

  /** @param {Validation} one @param {number} index @param {number} column */
  function cell(one, index, column) {
    const file = one.files[index];
    if (!file) return fmt.none;
    const inner = file.kind === "image"
      ? el("img", { src: file.url, alt: `${file.prompt || "sample"}, step ${one.step}`, loading: "lazy", decoding: "async" })
      : el("span", { class: "sample-kind" }, file.kind);
    return el("button", { type: "button", class: "sample-cell", title: `Show step ${one.step}`,
      "aria-label": `Show sample ${index + 1} of step ${one.step}`, onclick: () => { at = column; view = "step"; draw(); } }, inner);
  }

  draw();
  return {
    node,
    /** Takes a newer list; a slider at the end stays at the end. @param {Validation[]} newer */
    update(newer) {
      if (newer.length === validations.length && newer.at(-1)?.files[0]?.url === validations.at(-1)?.files[0]?.url) return;
      const follows = at >= validations.length - 1;
      validations = newer;
      if (follows) at = Math.max(0, validations.length - 1);
      fill(body);
      draw();
    },
  };
}
