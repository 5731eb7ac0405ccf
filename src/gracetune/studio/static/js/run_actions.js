/** The buttons that act on a run. Each asks first, and says what the training process will do and when. */

import { api, confirmDialog, el, fill, icon, toast, toastError } from "./ui.js";

const ACTIONS = [
  { name: "sample", label: "Sample now", sign: "image", danger: false, title: "Generate samples now?",
    text: "After the current step, training pauses, the validation prompts are generated, and training goes on." },
  { name: "save", label: "Save now", sign: "save", danger: false, title: "Save a checkpoint now?",
    text: "After the current step, a checkpoint is written as a scheduled one would be." },
  { name: "stop", label: "Stop", sign: "stop", danger: true, title: "Stop this run?",
    text: "After the current step, a checkpoint is written and the run ends. It can be resumed at the same step." },
  { name: "resume", label: "Resume", sign: "play", danger: false, title: "Resume this run?",
    text: "A new training process starts from the last checkpoint, with the config of this run." },
];

/**
 * @param {string} id @param {(name: string) => void} done called after a request was accepted
 * @returns {{node: HTMLElement, update: (actions: any) => void}}
 */
export function runActions(id, done) {
  const node = el("div", { class: "actions run-actions" });
  const buttons = ACTIONS.map((action) => {
    const button = el("button", { class: "btn", type: "button", "data-action": action.name }, icon(action.sign), action.label);
    button.addEventListener("click", () => press(action, button));
    return button;
  });
  fill(node, buttons);

  /** @param {typeof ACTIONS[0]} action @param {HTMLButtonElement} button */
  async function press(action, button) {
    if (button.getAttribute("aria-disabled") === "true") {
      toast(button.title, "plain");
      return;
    }
    if (!(await confirmDialog({ title: action.title, text: action.text, action: action.label, danger: action.danger }))) return;
    try {
      toast((await api.post(`api/runs/${id}/actions/${action.name}`)).message, "good");
      done(action.name);
    } catch (error) {
      toastError(error);
    }
  }

  return {
    node,
    /** A button that cannot be used stays in reach of the keyboard, so that its reason can be read. */
    update(actions) {
      ACTIONS.forEach(({ name, label }, at) => {
        const { allowed, why } = actions[name] ?? { allowed: false, why: "" };
        buttons[at].setAttribute("aria-disabled", String(!allowed));
        buttons[at].title = allowed ? "" : why;
        if (allowed) buttons[at].removeAttribute("aria-label");
        else buttons[at].setAttribute("aria-label", `${label}. Not now: ${why}`);
      });
    },
  };
}
