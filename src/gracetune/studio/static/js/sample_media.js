/** One sample in its box: an image that opens large, a video or sound that plays, or two images with a wipe. */

import { el, fill, modal } from "./ui.js";

/** @typedef {{url: string, kind: string, prompt: string}} File */

/** Shows a file in a box. The same kind of element is kept and only its address changes.
 * @param {HTMLElement} box @param {File} file @param {number} step */
export function medium(box, file, step) {
  const label = `${file.prompt || "Sample"}, step ${step}`;
  if (file.kind === "video" || file.kind === "audio") {
    const player = /** @type {HTMLMediaElement|null} */ (box.querySelector(file.kind));
    if (player?.dataset.url === file.url) return;
    fill(box, el(file.kind, { src: file.url, "data-url": file.url, controls: true, loop: true, preload: "metadata", muted: file.kind === "video", playsinline: true, "aria-label": label }));
    return;
  }
  let image = /** @type {HTMLImageElement|null} */ (box.querySelector(".sample-open > img"));
  if (image === null) {
    image = el("img", { decoding: "async" });
    const button = el("button", { type: "button", class: "sample-open", onclick: () => enlarge(/** @type {HTMLImageElement} */ (image)) }, image);
    fill(box, button);
  }
  if (image.getAttribute("src") !== file.url) image.src = file.url;
  image.alt = label;
  image.parentElement?.setAttribute("aria-label", `Enlarge: ${label}`);
}

/** @param {HTMLImageElement} image */
function enlarge(image) {
  const close = el("button", { class: "btn primary", type: "button", onclick: () => dialog.close() }, "Close");
  const dialog = modal(image.alt, el("img", { class: "enlarged", src: image.src, alt: image.alt }),
    el("a", { class: "btn", href: image.getAttribute("src"), download: true }, "Download"), close);
  dialog.classList.add("wide");
  dialog.showModal();
  close.focus();
}

/** Two images on top of each other; a slider moves the border between them. Other media are shown one after the other.
 * @param {HTMLElement} box @param {File} before @param {File} after @param {number} firstStep @param {number} lastStep */
export function wipe(box, before, after, firstStep, lastStep) {
  if (after.kind !== "image") {
    pair(box, before, after, firstStep, lastStep);
    return;
  }
  let holder = /** @type {HTMLElement|null} */ (box.querySelector(".wipe"));
  if (holder === null) {
    const range = el("input", { type: "range", min: 0, max: 100, value: 50, class: "wipe-range" });
    const place = el("div", { class: "wipe", style: { "--at": "50%" } },
      el("img", { class: "wipe-after" }), el("img", { class: "wipe-before" }), el("span", { class: "wipe-line", "aria-hidden": "true" }),
      el("span", { class: "wipe-label left" }), el("span", { class: "wipe-label right" }), range);
    range.addEventListener("input", () => place.style.setProperty("--at", `${range.value}%`));
    fill(box, place);
    holder = place;
  }
  const [last, first] = holder.querySelectorAll("img");
  if (last.getAttribute("src") !== after.url) last.src = after.url;
  if (first.getAttribute("src") !== before.url) first.src = before.url;
  last.alt = `${after.prompt || "Sample"}, step ${lastStep}`;
  first.alt = `The same at step ${firstStep}`;
  const [left, right] = holder.querySelectorAll(".wipe-label");
  left.textContent = `step ${firstStep}`;
  right.textContent = `step ${lastStep}`;
  holder.querySelector("input")?.setAttribute("aria-label", `Border between step ${firstStep} and step ${lastStep}: ${after.prompt || "sample"}`);
}

/** @param {HTMLElement} box @param {File} before @param {File} after @param {number} firstStep @param {number} lastStep */
function pair(box, before, after, firstStep, lastStep) {
  const key = `${before.url} ${after.url}`;
  if (box.dataset.pair === key && box.querySelector(".pair")) return;
  box.dataset.pair = key;
  const player = (/** @type {File} */ file, /** @type {number} */ step) =>
    el("div", null, el("span", { class: "small-label" }, `step ${step}`), el(/** @type {"video"} */ (file.kind),
      { src: file.url, controls: true, loop: true, preload: "metadata", playsinline: true, "aria-label": `${file.prompt || "Sample"}, step ${step}` }));
  fill(box, el("div", { class: "pair" }, player(before, firstStep), player(after, lastStep)));
}
