/**
 * The config that is being written: its text, the last check of it, and its plan.
 *
 * The server changes single values in the text, because it reads it with the parser that the run will use. Answers to
 * an older text are dropped, and changes that they should have brought are sent again with the newer text.
 */

import { api, ApiError } from "../ui.js";

const AFTER_TYPING_MS = 350;
const AFTER_CHANGE_MS = 120;
const STORED = "gracetune-new-run";
const NOT_CHANGED = 409;

/** @typedef {{ok: boolean, dialect: string|null, problems: any[], notes: string[], values: Record<string, any>,
 *   yaml: string|null}} Checked */
/** @typedef {"text"|"check"|"plan"} What */

export class Draft {
  text = "";
  /** Name of the file that the text came from. */
  name = "";
  /** @type {Checked|null} */
  checked = null;
  /** @type {any} */
  plan = null;
  /** @type {ApiError|null} why there is no check or no plan */
  failed = null;
  /** @type {"idle"|"checking"|"planning"} */
  doing = "idle";
  /** @type {Record<string, any>} changes of the form that are not in the text yet */
  #changes = {};
  /** @type {Record<string, string>} other files that the text names */
  #files = {};
  #turn = 0;
  #timer = 0;

  /** @param {(what: What) => void} changed */
  constructor(changed) {
    this.changed = changed;
    const stored = JSON.parse(sessionStorage.getItem(STORED) ?? "{}");
    this.text = stored.text ?? "";
    this.name = stored.name ?? "";
  }

  get isNative() {
    return !this.checked || this.checked.dialect === "native" || this.checked.dialect === null;
  }

  /** The values to show, with the changes that are on their way. */
  get values() {
    return { ...this.checked?.values, ...this.#changes };
  }

  /** Another config. @param {string} text @param {string} name @param {Record<string, string>} [files] */
  begin(text, name, files = {}) {
    this.checked = this.plan = this.failed = null;
    this.#changes = {};
    this.#files = files;
    this.write(text, name);
  }

  /** The text after the user changed it. @param {string} text @param {string} [name] */
  write(text, name = this.name) {
    this.#keep(text, name);
    this.changed("text");
    this.checkSoon(AFTER_TYPING_MS);
  }

  /** @param {string} text @param {string} name */
  #keep(text, name) {
    this.text = text;
    this.name = name;
    sessionStorage.setItem(STORED, JSON.stringify({ text, name }));
  }

  /** Sets one option; null goes back to its default. A peer's file is translated first.
   * @param {string} path @param {any} value */
  set(path, value) {
    if (!this.isNative && this.checked?.yaml) this.translate();
    this.#changes[path] = value;
    this.checkSoon(AFTER_CHANGE_MS);
    this.changed("check");
  }

  /** Replaces a peer's text by the same config in gracetune's own options. */
  translate() {
    if (!this.checked?.yaml) return;
    const { yaml } = this.checked;
    this.checked = { ...this.checked, dialect: "native" };
    this.write(yaml, this.name.replace(/\.[^.]*$/, ".yaml"));
  }

  /** @param {number} [wait_ms] */
  checkSoon(wait_ms = 0) {
    window.clearTimeout(this.#timer);
    const turn = (this.#turn += 1);
    if (!this.text.trim()) {
      this.checked = this.plan = this.failed = null;
      this.doing = "idle";
      return;
    }
    this.doing = "checking";
    this.#timer = window.setTimeout(() => this.#checkAndPlan(turn), wait_ms);
  }

  /** @param {number} turn */
  async #checkAndPlan(turn) {
    try {
      const sent = this.#changes;
      const checked = await api.post("api/new/check", { text: this.text, name: this.name || "run.yaml", set: sent, files: this.#files });
      if (turn !== this.#turn) return;
      this.#changes = {};
      this.#accept(checked, Object.keys(sent).length > 0);
      if (!this.isNative && checked.yaml && Object.keys(this.#files).length > 0) {
        // A file of its own does not find the others: it becomes one config of ours.
        this.#files = {};
        this.translate();
        return;
      }
      if (!checked.ok) return;
      const plan = await api.post("api/new/plan", { text: this.text, name: this.name || "run.yaml" });
      if (turn !== this.#turn) return;
      this.plan = plan;
    } catch (error) {
      if (turn !== this.#turn) return;
      if (!(error instanceof ApiError)) throw error;
      if (error.status === NOT_CHANGED) this.#changes = {};
      this.failed = error;
    }
    this.doing = "idle";
    this.changed("plan");
  }

  /** @param {Checked} checked @param {boolean} wasChanged */
  #accept(checked, wasChanged) {
    this.checked = checked;
    this.failed = null;
    this.doing = checked.ok ? "planning" : "idle";
    if (wasChanged && checked.yaml !== null) {
      this.#keep(checked.yaml, this.name);
      this.changed("text");
    }
    this.changed("check");
  }

  close() {
    window.clearTimeout(this.#timer);
    this.#turn += 1;
  }
}
