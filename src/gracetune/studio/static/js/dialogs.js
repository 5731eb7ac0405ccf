/** Short messages and questions: toasts, confirmation, the list of keys. */

import { el, fill, icon } from "./dom.js";
import { ApiError } from "./api.js";

const TOAST_MS = 6000;

/**
 * Shows a message in the corner for a few seconds. Errors stay until closed.
 * @param {string} message @param {"good"|"bad"|"plain"} [kind]
 */
export function toast(message, kind = "plain") {
  const place = /** @type {HTMLElement} */ (document.getElementById("toasts"));
  const note = el("div", { class: `toast ${kind}` },
    icon(kind === "bad" ? "warning" : "check"),
    el("span", null, message),
    el("button", { class: "icon-btn", type: "button", "aria-label": "Close this message", onclick: () => note.remove() },
      icon("close")));
  place.append(note);
  if (kind !== "bad") window.setTimeout(() => note.remove(), TOAST_MS);
}

/** Shows what went wrong, and what to do about it. @param {unknown} error */
export function toastError(error) {
  if (!(error instanceof ApiError)) throw error;
  toast([error.found, error.expected && `Expected: ${error.expected}`, error.hint].filter(Boolean).join(" "), "bad");
}

/**
 * Asks before something that cannot be undone by clicking again. Resolves to whether the user agreed.
 * @param {{title: string, text: string|Node, action: string, danger?: boolean}} question
 * @returns {Promise<boolean>}
 */
export function confirmDialog({ title, text, action, danger = false }) {
  return new Promise((resolve) => {
    const yes = el("button", { class: danger ? "btn danger" : "btn primary", type: "button",
      onclick: () => dialog.close("yes") }, action);
    const dialog = modal(title, el("div", { class: "dialog-text" }, text),
      el("button", { class: "btn", type: "button", onclick: () => dialog.close("no") }, "Cancel"), yes);
    dialog.addEventListener("close", () => { dialog.remove(); resolve(dialog.returnValue === "yes"); });
    dialog.showModal();
    yes.focus();
  });
}

/**
 * A modal dialog with a heading; the browser keeps the focus inside it. Removed when closed.
 * @param {string} title @param {Node} content @param {...Node} buttons
 */
export function modal(title, content, ...buttons) {
  const id = `dialog-${Math.random().toString(36).slice(2)}`;
  const dialog = el("dialog", { "aria-labelledby": id },
    el("h2", { id }, title), content, el("div", { class: "dialog-actions" }, buttons));
  dialog.addEventListener("close", () => dialog.remove());
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
  document.body.append(dialog);
  return dialog;
}

/** Lists the keys. @param {[string, string][]} keys */
export function helpDialog(keys) {
  if (document.querySelector("dialog[open]")) return;
  const rows = keys.map(([key, meaning]) => el("tr", null, el("th", { scope: "row" }, el("kbd", null, key)), el("td", null, meaning)));
  const dialog = modal("Keys", el("table", { class: "keys" }, el("tbody", null, rows)),
    el("button", { class: "btn primary", type: "button", onclick: () => dialog.close() }, "Close"));
  dialog.showModal();
}

/** A button that copies text. @param {() => string} text @param {string} [label] */
export function copyButton(text, label = "Copy") {
  const button = el("button", { class: "btn small", type: "button" }, icon("copy"), el("span", null, label));
  button.addEventListener("click", async () => {
    await copy(text());
    fill(button, icon("check"), el("span", null, "Copied"));
    window.setTimeout(() => fill(button, icon("copy"), el("span", null, label)), 1500);
  });
  return button;
}

/** The clipboard interface exists on HTTPS and loopback only. @param {string} text */
async function copy(text) {
  if (navigator.clipboard && window.isSecureContext) return navigator.clipboard.writeText(text);
  const area = el("textarea", { class: "visually-hidden", "aria-label": "Text to copy" });
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}
