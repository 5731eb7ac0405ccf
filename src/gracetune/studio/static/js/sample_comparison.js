/** Samples of several runs beside each other: a row for each prompt, a column for each run, at a common step. */

import { card, el, emptyState, fill, fmt, setText } from "./ui.js";
import { medium } from "./sample_media.js";

/** @param {any[]} runs @param {Record<string, any>} details */
export function sampleComparison(runs, details) {
  const steps = [...new Set(runs.flatMap((row) => details[row.id].validations.map((/** @type {any} */ one) => one.step)))].sort((a, b) => a - b);
  if (steps.length === 0) return card("Samples", {}, emptyState("No samples yet", "None of these runs has generated samples."));
  const prompts = [...new Set(runs.flatMap((row) => (details[row.id].validations.at(-1)?.files ?? []).map((/** @type {any} */ file) => file.prompt)))];
  const where = el("output", { class: "sample-where" });
  const slider = el("input", { type: "range", min: 0, max: steps.length - 1, value: steps.length - 1, "aria-label": "Step of the samples", oninput: draw });
  const boxes = prompts.map(() => runs.map(() => ({ box: el("div", { class: "sample-box" }), note: el("p", { class: "sample-note" }) })));
  const grid = el("table", { class: "side-by-side", style: { "--runs": runs.length } }, el("caption", { class: "visually-hidden" }, "A row for each prompt, a column for each run"),
    el("thead", null, el("tr", null, runs.map((row, at) => el("th", { scope: "col" }, el("span", { class: "row nowrap" }, el("span", { class: `mark square c${at % 8}`, "aria-hidden": "true" }), row.name))))),
    prompts.map((prompt, line) => el("tbody", null,
      el("tr", null, el("th", { scope: "rowgroup", colspan: runs.length, class: "prompt-row" }, prompt || "(no prompt)")),
      el("tr", null, boxes[line].map(({ box, note }) => el("td", null, box, note))))));

  /** The newest samples of each run that are not newer than the chosen step. */
  function draw() {
    const step = steps[Number(slider.value)];
    setText(where, `up to step ${fmt.integer(step)}`);
    slider.setAttribute("aria-valuetext", `step ${step}`);
    runs.forEach((row, column) => {
      const found = details[row.id].validations.filter((/** @type {any} */ one) => one.step <= step).at(-1);
      prompts.forEach((prompt, line) => {
        const { box, note } = boxes[line][column];
        const file = found?.files.find((/** @type {any} */ one) => one.prompt === prompt);
        if (file) medium(box, file, found.step);
        else fill(box, el("span", { class: "note" }, "not generated"));
        setText(note, file ? `step ${fmt.integer(found.step)}` : "");
      });
    });
  }

  draw();
  return card("Samples", { note: el("label", { class: "sample-slider" }, el("span", { class: "small-label" }, "step"), slider), actions: where },
    el("div", { class: "side-scroll", tabindex: "0", role: "region", "aria-label": "Samples side by side" }, grid));
}
