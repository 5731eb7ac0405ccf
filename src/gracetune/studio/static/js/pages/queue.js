/** The queue: jobs wait for their turn, one run at a time for each GPU. */

import { api, ApiError, confirmDialog, el, emptyState, errorState, fill, fmt, icon, pageHead, setText, setTitle, stateBadge, toastError } from "../ui.js";
import { problemBox } from "../forms/problem_list.js";

const EVERY_MS = 2000;

/** @param {HTMLElement} root @param {any} params */
export async function show(root, params) {
  setTitle("Queue");
  const page = new Queue(root, params.studio);
  await page.refresh(true);
  const timer = window.setInterval(() => { if (!document.hidden) page.refresh(false); }, EVERY_MS);
  return () => { window.clearInterval(timer); page.close(); };
}

class Queue {
  /** @param {HTMLElement} root @param {any} studio */
  constructor(root, studio) {
    this.control = studio.control;
    this.folder = studio.working_folder;
    this.configs = `${studio.root}/configs`;
    this.why = this.control ? "" : "This studio is read only. To act on the queue: gracetune studio --control";
    /** @type {Map<string, Job>} */
    this.jobs = new Map();
    this.turn = 0;
    this.runner = el("div", { class: "runner", role: "status" });
    this.failure = el("div", { class: "failure" });
    this.list = el("ol", { class: "jobs", "aria-label": "Jobs" });
    this.empty = el("div", { hidden: true }, emptyState("The queue is empty", "Make a config, save it and start it; or add one by its path.",
      el("a", { class: "btn primary", href: "#/new" }, "New run")));
    this.said = el("div", { class: "visually-hidden", role: "status" });
    fill(root, pageHead({ title: "Queue", note: "One run at a time for each GPU. Jobs are files: they survive a restart of the studio.",
      actions: el("a", { class: "btn", href: "#/new" }, "New run") }), this.adder(), this.runner, this.failure, this.list, this.empty, this.said);
  }

  adder() {
    const input = el("input", { id: "add-config", type: "text", autocomplete: "off", spellcheck: "false", disabled: !this.control,
      placeholder: `${this.configs}/my-run.yaml`, "aria-describedby": "add-why" });
    const why = el("span", { class: "help", id: "add-why" }, this.why || `Absolute, or relative to ${this.folder}, where the studio was started.`);
    const problem = el("div", { class: "add-problem", role: "alert" });
    const button = el("button", { class: "btn", type: "submit", disabled: !this.control, "aria-describedby": "add-why" }, "Add to the queue");
    return el("form", { class: "card", novalidate: true, onsubmit: async (/** @type {Event} */ event) => {
      event.preventDefault();
      if (!input.value.trim()) { input.focus(); return; }
      fill(problem);
      try {
        await api.post("api/queue", { config: input.value.trim() });
        setText(this.said, `${input.value.trim()} was added.`);
        input.value = "";
        await this.refresh(false);
      } catch (error) {
        if (!(error instanceof ApiError)) throw error;
        fill(problem, problemBox(error));
      }
      input.focus();
    } }, el("div", { class: "queue-add" }, el("div", { class: "field" }, el("label", { for: "add-config" }, "Config file"), input), button), why, problem);
  }

  /** @param {boolean} first */
  async refresh(first) {
    const turn = (this.turn += 1);
    try {
      const queue = await api.get("api/queue");
      if (turn === this.turn) this.draw(queue);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      if (turn !== this.turn) return;
      if (first || !this.failure.hasChildNodes()) fill(this.failure, errorState(error, () => this.refresh(true)));
    }
  }

  /** @param {any} queue */
  draw(queue) {
    fill(this.failure);
    this.drawRunner(queue);
    this.empty.hidden = queue.jobs.length > 0;
    const ids = new Set(queue.jobs.map((/** @type {any} */ one) => one.id));
    for (const [id, job] of this.jobs) if (!ids.has(id)) { this.removeJob(id, job); }
    const waiting = queue.jobs.filter((/** @type {any} */ one) => one.state === "waiting");
    queue.jobs.forEach((/** @type {any} */ data, /** @type {number} */ index) => {
      let job = this.jobs.get(data.id);
      if (!job) { job = new Job(data, this); this.jobs.set(data.id, job); }
      const place = waiting.indexOf(data);
      job.update(data, place, waiting.length);
      if (this.list.children[index] !== job.node) this.moveTo(job.node, index);
    });
  }

  /** Moving a node takes its focus away. @param {HTMLElement} node @param {number} index */
  moveTo(node, index) {
    const focused = /** @type {HTMLElement|null} */ (node.contains(document.activeElement) ? document.activeElement : null);
    this.list.insertBefore(node, this.list.children[index] ?? null);
    focused?.focus({ preventScroll: true });
  }

  /** @param {string} id @param {Job} job */
  removeJob(id, job) {
    const hadFocus = job.node.contains(document.activeElement);
    const next = /** @type {HTMLElement|null} */ (job.node.nextElementSibling ?? job.node.previousElementSibling);
    job.node.remove();
    this.jobs.delete(id);
    if (hadFocus) next?.focus();
  }

  /** @param {any} queue */
  drawRunner({ runner, jobs }) {
    const running = jobs.filter((/** @type {any} */ one) => one.state === "running").length;
    const words = !runner.active ? `Jobs are not started: ${runner.why || "no runner is active"}.`.replace(/\.\.$/, ".")
      : running ? `${fmt.plural(running, "job")} running.` : runner.why ? `Ready: ${runner.why}.` : "Ready for the next job.";
    if (this.runner.dataset.words === words) return;
    this.runner.dataset.words = words;
    fill(this.runner, el("div", { class: `callout ${runner.active ? (running ? "good" : "") : "warn"}` }, icon(runner.active ? "play" : "warning"), el("div", null, words)));
  }

  /** @param {() => Promise<any>} request @param {string} said @returns {Promise<boolean>} */
  async act(request, said) {
    try {
      await request();
    } catch (error) {
      toastError(error);
      return false;
    }
    setText(this.said, said);
    await this.refresh(false);
    return true;
  }

  close() {
    this.turn += 1;
  }
}

class Job {
  /** @param {any} data @param {Queue} queue */
  constructor(data, queue) {
    this.queue = queue;
    this.data = data;
    this.number = 0;
    const button = (/** @type {string} */ text, /** @type {string} */ label, /** @type {() => void} */ onclick) =>
      el("button", { class: "btn small", type: "button", "aria-label": label, title: queue.why || label, onclick, disabled: !queue.control }, text);
    this.up = button("↑", `Move ${data.name} up`, () => this.move("up"));
    this.down = button("↓", `Move ${data.name} down`, () => this.move("down"));
    this.cancel = button("Cancel", `Cancel ${data.name}`, () => this.stop());
    this.drop = button("Remove", `Remove ${data.name} from the list`, () => this.remove());
    this.place = el("span", { class: "job-place" });
    this.state = el("div", { class: "job-state" });
    this.head = el("div", { class: "job-head" });
    this.line = el("div", { class: "job-line" });
    this.reason = el("div", { class: "job-why" });
    this.log = el("pre", { tabindex: 0, role: "region", "aria-label": `Log of ${data.name}` });
    this.details = el("details", null, el("summary", null, "Log"), this.log);
    this.node = el("li", { class: "job", tabindex: 0, dataset: { row: "" } }, this.state,
      el("div", null, this.head, this.line, this.reason),
      el("div", { class: "job-actions" }, this.up, this.down, this.cancel, this.drop), this.details);
    this.node.addEventListener("keydown", (event) => this.key(event));
  }

  /** @param {any} data @param {number} place @param {number} waiting */
  update(data, place, waiting) {
    this.data = data;
    const isWaiting = data.state === "waiting";
    setText(this.place, isWaiting ? `${place + 1} of ${waiting}` : "");
    this.number = place + 1;
    const head = `${data.state}|${data.run}|${data.name}`;
    if (this.head.dataset.of !== head) {
      this.head.dataset.of = head;
      fill(this.head, el("h2", null, data.run && !isWaiting ? el("a", { href: `#/run/${data.run}` }, data.name) : data.name));
      fill(this.state, stateBadge(data.state), this.place);
    }
    setText(this.line, `${data.config} · ${times(data)}`);
    setText(this.reason, data.why ?? "");
    this.node.setAttribute("aria-label", `${data.name}, ${data.state}${isWaiting ? `, ${place + 1} of ${waiting}` : ""}`);
    show_(this.up, isWaiting && waiting > 1);
    show_(this.down, isWaiting && waiting > 1);
    show_(this.cancel, isWaiting || data.state === "running");
    show_(this.drop, !isWaiting && data.state !== "running");
    // A disabled button loses the focus, and a user who moves a job step by step needs it.
    this.up.setAttribute("aria-disabled", String(place <= 0));
    this.down.setAttribute("aria-disabled", String(place >= waiting - 1));
    this.details.hidden = data.log.length === 0;
    const atEnd = this.log.scrollTop + this.log.clientHeight >= this.log.scrollHeight - 8;
    setText(this.log, data.log.join("\n"));
    if (atEnd) this.log.scrollTop = this.log.scrollHeight;
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    if (!event.altKey || (event.key !== "ArrowUp" && event.key !== "ArrowDown")) return;
    event.preventDefault();
    if (this.queue.control && this.data.state === "waiting") this.move(event.key === "ArrowUp" ? "up" : "down");
  }

  /** @param {"up"|"down"} where */
  async move(where) {
    if ((where === "up" ? this.up : this.down).getAttribute("aria-disabled") === "true") return;
    await this.queue.act(() => this.post(where), "");
    setText(this.queue.said, `${this.data.name} is now number ${this.number}.`);
  }

  async stop() {
    const running = this.data.state === "running";
    const text = running ? "The run stops after the current step and saves its state: it can be resumed." : "It is not started. The config stays.";
    if (!(await confirmDialog({ title: `Cancel ${this.data.name}?`, text, action: running ? "Stop the run" : "Cancel the job", danger: true }))) return;
    await this.queue.act(() => this.post("cancel"), `${this.data.name} was cancelled.`);
    this.node.focus();
  }

  async remove() {
    await this.queue.act(() => this.post("remove"), `${this.data.name} was removed.`);
  }

  /** @param {string} action */
  post(action) {
    return api.post(`api/queue/${encodeURIComponent(this.data.id)}/${action}`);
  }
}

/** @param {HTMLElement} node @param {boolean} visible */
function show_(node, visible) {
  node.hidden = !visible;
}

/** @param {any} data */
function times(data) {
  if (data.state === "waiting") return `added ${fmt.time(data.added_s)}`;
  if (data.state === "running") return `started ${fmt.time(data.started_s)}, running for ${fmt.duration(Date.now() / 1000 - data.started_s)}`;
  const took = data.started_s && data.ended_s ? `, took ${fmt.duration(data.ended_s - data.started_s)}` : "";
  const code = typeof data.exit_code === "number" && data.exit_code !== 0 ? `, exit code ${data.exit_code}` : "";
  return `ended ${fmt.time(data.ended_s)}${took}${code}`;
}
