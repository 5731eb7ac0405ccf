/** A new run: a form, the text and the plan of one config, kept equal while either is changed; then save and start. */

import { api, ApiError, card, confirmDialog, el, fill, icon, pageHead, setText, setTitle, toast, toastError } from "../ui.js";
import { Draft } from "../forms/draft.js";
import { optionForm } from "../forms/option_form.js";
import { showPlan } from "../forms/plan_view.js";
import { problemBox, showProblems } from "../forms/problem_list.js";
import { acceptDrops, startCard } from "../forms/start_card.js";
import { yamlView } from "../forms/yaml_view.js";

const VIEWS = [["form", "Form"], ["both", "Form and YAML"], ["yaml", "YAML"]];
const VIEW_KEPT = "gracetune-new-view";
const BLANK = "gracetune: 1\nname: my-run\noutput_dir: output/my-run\nmodel:\n  family: sdxl\ndatasets:\n  - id: photos\n    path: /data/photos\n";

/** @param {HTMLElement} root @param {any} params */
export async function show(root, params) {
  setTitle("New run");
  const form = await api.get("api/form");
  const page = new NewRun(root, form, params.studio);
  return () => page.close();
}

class NewRun {
  /** @param {HTMLElement} root @param {any} form @param {any} studio */
  constructor(root, form, studio) {
    this.root = root;
    this.studio = studio;
    this.draft = new Draft((what) => this.changed(what));
    this.start = startCard(form, studio.control, {
      proposed: (answer) => this.begin(answer.yaml, `${nameIn(answer.yaml) || "my-run"}.yaml`),
      imported: (text, name, others) => this.imported(text, name, others),
      written: () => { this.begin(BLANK, "my-run.yaml"); this.setView("both"); },
    });
    this.options = optionForm(form, { change: (path, value) => this.draft.set(path, value ?? null), openText: (path) => this.openText(path) });
    this.yaml = yamlView({ change: (text) => this.draft.write(text), fileName: () => this.fileName.value });
    this.status = el("div", { class: "check-status", role: "status" });
    this.problems = el("div", { class: "stack" });
    this.planNode = el("div", { class: "stack plan" });
    this.planState = el("div", { class: "plan-state", role: "status" });
    this.bar = el("div", { class: "new-bar" });
    this.origin = el("div", { class: "origin" });
    this.fileName = el("input", { id: "file-name", type: "text", autocomplete: "off", spellcheck: "false", "aria-describedby": "save-why" });
    this.saved = el("div", { role: "status" });
    this.named = false;
    /** @type {any} */
    this.shownPlan = null;
    this.fileName.addEventListener("input", () => { this.named = this.fileName.value !== ""; });
    this.build();
    if (this.draft.text && studio.control) { this.changed("text"); this.draft.checkSoon(); } else this.showStart();
  }

  build() {
    const allowed = this.studio.control;
    const why = allowed ? "" : "This studio is read only. To save and start runs: gracetune studio --control";
    const button = (/** @type {string} */ text, /** @type {boolean} */ start) => el("button", {
      class: start ? "btn primary" : "btn", type: "button", disabled: !allowed, "aria-describedby": "save-why",
      onclick: () => this.save(start) }, text);
    this.saveButtons = [button("Save", false), button("Save and start", true)];
    this.views = el("div", { class: "segments", role: "group", "aria-label": "View" }, VIEWS.map(([name, label]) =>
      el("button", { class: "btn small", type: "button", dataset: { view: name }, onclick: () => this.setView(name) }, label)));
    this.startOver = el("button", { class: "btn", type: "button", onclick: () => this.clear() }, "Start over");
    this.editor = el("div", { class: "new-grid" },
      el("div", { class: "new-main" }, this.origin, el("div", { class: "new-views" }, this.options.node, this.yaml.node)),
      this.side = el("div", { class: "new-side" },
        card("Check", { class: "check" }, this.status, this.problems),
        card("Plan", { class: "plan-card", actions: this.planState }, this.planNode),
        card("Save", { class: "save" },
          el("div", { class: "field" }, el("label", { for: "file-name" }, "File name"), this.fileName,
            el("span", { class: "help", id: "save-why" }, why || `Written to ${this.studio.root}/configs; never over another file.`)),
          el("div", { class: "row" }, this.saveButtons), this.saved)),
      this.bar);
    this.head = pageHead({ title: "New run", note: "From a folder or a file to a config that is checked and planned before it starts.",
      actions: [this.views, this.startOver] });
    fill(this.root, this.head, this.start.node, this.editor);
    if (allowed) acceptDrops(this.root, (text, name, others) => this.imported(text, name, others));
    this.setView(localStorage.getItem(VIEW_KEPT) ?? (window.innerWidth >= 1700 ? "both" : "form"));
  }

  showStart() {
    this.start.node.hidden = false;
    this.editor.hidden = true;
    this.views.hidden = this.startOver.hidden = true;
  }

  /** @param {string} view */
  setView(view) {
    this.editor.dataset.view = view;
    localStorage.setItem(VIEW_KEPT, view);
    for (const button of this.views.children) {
      button.setAttribute("aria-pressed", String(/** @type {HTMLElement} */ (button).dataset.view === view));
    }
  }

  /** @param {string} text @param {string} name @param {Record<string, string>} [others] */
  begin(text, name, others = {}) {
    this.named = false;
    fill(this.saved);
    this.draft.begin(text, name, others);
    /** @type {HTMLElement} */ (this.head.querySelector("h1")).focus();
  }

  /** @param {string} text @param {string} name @param {Record<string, string>} others */
  async imported(text, name, others) {
    if (this.draft.text && !(await this.mayReplace(`Replace it by ${name}?`))) return;
    this.begin(text, name, others);
    toast(`${name} was read.`, "good");
  }

  /** @param {string} question */
  mayReplace(question) {
    return confirmDialog({ title: "There is a config on this page", text: `It was not saved from here. ${question}`, action: "Replace" });
  }

  async clear() {
    const question = { title: "Start over?", text: "The config on this page is discarded. Saved files stay.", action: "Discard", danger: true };
    if (!(await confirmDialog(question))) return;
    this.draft.begin("", "");
    this.showStart();
    this.start.focus();
  }

  /** @param {string} path */
  openText(path) {
    if (this.editor.dataset.view === "form") this.setView("both");
    this.yaml.goTo(path);
  }

  /** @param {"text"|"check"|"plan"} what */
  changed(what) {
    const { draft } = this;
    if (!draft.text) return;
    this.start.node.hidden = true;
    this.editor.hidden = false;
    this.views.hidden = this.startOver.hidden = false;
    this.yaml.update(draft.text);
    if (what === "check") this.showForm();
    this.showOrigin();
    this.showStatus();
    if (what === "check") this.showCheck();
    this.showPlan();
  }

  showForm() {
    this.options.update(this.draft.values);
  }

  showOrigin() {
    const { draft } = this;
    if (!this.named) this.fileName.value = draft.name || `${nameIn(draft.text) || "my-run"}.yaml`;
    const dialect = draft.isNative ? "" : draft.checked?.dialect ?? "";
    if (this.origin.dataset.of === dialect) return;
    this.origin.dataset.of = dialect;
    fill(this.origin, dialect && el("div", { class: "callout" }, icon("download"),
      el("div", null, `A file of ${dialect}. It is saved as it is, and gracetune trains with it. The first change in the form translates it to gracetune's own options; or `,
        el("button", { class: "link", type: "button", onclick: () => this.draft.translate() }, "translate it now"), ".")));
  }

  showCheck() {
    const { checked } = this.draft;
    if (!checked) return;
    const byPath = new Map();
    /** @type {Map<any, any>} */
    const places = new Map();
    for (const problem of checked.problems) {
      const field = this.options.fieldOf(this.positionOf(problem.key));
      if (!field) continue;
      places.set(problem, field);
      const said = [problem.found && `found ${problem.found}`, problem.expected && `expected ${problem.expected}`, problem.try && `try ${problem.try}`];
      byPath.set(field.option.path, said.filter(Boolean).join("; "));
    }
    this.options.report(byPath);
    showProblems(this.problems, checked.problems, checked.notes, (problem) => {
      const field = places.get(problem);
      return field ? () => { if (this.editor.dataset.view === "yaml") this.openText(field.option.path); else this.options.focus(field); } : null;
    });
  }

  /** Datasets are named by their id in problems and by their position in the form. @param {string} key */
  positionOf(key) {
    return key.replace(/^datasets\[([^\]]+)\]/, (whole, id) => {
      const named = Object.entries(this.draft.values).find(([path, value]) => /^datasets\[\d+\]\.id$/.test(path) && value === id);
      return named ? named[0].slice(0, -3) : whole;
    });
  }

  showStatus() {
    const { checked, failed, doing } = this.draft;
    const amount = checked?.problems.length ?? 0;
    const words = doing === "checking" ? "Checking…" : failed ? `Cannot check: ${failed.found} ${failed.hint}`
      : !checked ? "" : checked.ok ? "No problems found" : amount === 1 ? "1 problem" : `${amount} problems`;
    const kind = doing === "checking" ? "busy" : failed ? "warn" : checked?.ok ? "good" : "bad";
    const sign = { busy: "◔", warn: "!", good: "✓", bad: "✕" }[kind];
    if (this.status.textContent === `${sign}${words}`) return;
    const badge = () => words && el("span", { class: `badge ${kind}` }, el("span", { class: "sign", "aria-hidden": "true" }, sign), words);
    fill(this.status, badge());
    // On a narrow screen the check and the plan are below the form; this bar is always in view.
    fill(this.bar, badge(), el("button", { class: "btn small", type: "button", onclick: () => this.side.scrollIntoView({ block: "start" }) }, "Check, plan and save"));
  }

  showPlan() {
    const { draft, planNode } = this;
    const isOld = draft.plan !== null && (draft.doing !== "idle" || !draft.checked?.ok);
    planNode.classList.toggle("is-old", isOld);
    const broken = draft.checked !== null && !draft.checked.ok;
    setText(this.planState, draft.doing === "planning" ? "Planning…" : isOld && broken ? "of the last text without problems" : "");
    if (draft.plan && this.shownPlan !== draft.plan) {
      this.shownPlan = draft.plan;
      showPlan(planNode, draft.plan);
    } else if (!draft.plan) {
      this.shownPlan = null;
      fill(planNode, el("p", { class: "note" }, broken ? "A plan needs a config without problems." : ""));
    }
  }

  /** @param {boolean} start */
  async save(start) {
    const { draft } = this;
    const name = this.fileName.value.trim();
    if (!name) { this.fileName.focus(); return; }
    if (start && draft.checked && !draft.checked.ok) {
      toast("The config has problems: a run would end at once. Repair them first, or only save.", "bad");
      return;
    }
    if (start && draft.plan?.verdict === "does not fit") {
      const go = await confirmDialog({ title: "It does not fit", text: draft.plan.summary, action: "Start all the same", danger: true });
      if (!go) return;
    }
    for (const button of this.saveButtons) button.disabled = true;
    try {
      const answer = await api.post("api/new/save", { text: draft.text, file_name: name, start });
      if (start) {
        toast(`Saved as ${answer.path}, and added to the queue.`, "good");
        location.hash = "#/queue";
        return;
      }
      fill(this.saved, this.savedNote(answer.path));
    } catch (error) {
      this.saveFailed(error);
    } finally {
      for (const button of this.saveButtons) button.disabled = false;
    }
  }

  /** @param {unknown} error */
  saveFailed(error) {
    if (!(error instanceof ApiError)) throw error;
    fill(this.saved, problemBox(error));
    this.fileName.focus();
  }

  /** @param {string} path */
  savedNote(path) {
    const enqueue = el("button", { class: "link", type: "button", onclick: async () => {
      try {
        await api.post("api/queue", { config: path });
        location.hash = "#/queue";
      } catch (error) {
        toastError(error);
      }
    } }, "Add it to the queue");
    return el("div", { class: "callout good" }, icon("check"),
      el("div", null, "Saved as ", el("code", null, path), ". ", enqueue, ", or on a terminal: ", el("code", null, `gracetune train ${path}`)));
  }

  close() {
    this.draft.close();
  }
}

/** The run's name as written. @param {string} text */
function nameIn(text) {
  return /^name:\s*["']?([^"'#\n]+?)["']?\s*(#.*)?$/m.exec(text)?.[1] ?? "";
}
