/** The first questions of a new run: the folder, what to teach, the model, the trigger word, the steps; or a file. */

import { api, ApiError, card, el, fill, fmt, icon, setText, toast } from "../ui.js";
import { problemBox } from "./problem_list.js";

/** Largest file that is read from a drop: configs are a few kilobytes. */
const MOST_BYTES = 2 * 1024 * 1024;
const MOST_FILES = 8;
const ACCEPT = ".yaml,.yml,.json,.toml";

/** @typedef {(text: string, name: string, others: Record<string, string>) => void} Imported `others` are files that it names */

/**
 * @param {any} form what `api/form` describes
 * @param {boolean} control whether this studio may do anything
 * @param {{proposed: (answer: any) => void, imported: Imported, written: () => void}} actions
 */
export function startCard(form, control, actions) {
  const folder = el("input", { id: "start-folder", type: "text", autocomplete: "off", spellcheck: "false", required: true,
    placeholder: "/data/photos", "aria-describedby": "start-folder-help start-problem" });
  const model = el("input", { id: "start-model", type: "text", list: "start-models", autocomplete: "off", spellcheck: "false",
    placeholder: "the first that fits this machine", "aria-describedby": "start-model-help" });
  const models = el("datalist", { id: "start-models" }, form.families.flatMap((/** @type {any} */ family) =>
    (family.flavours.length ? family.flavours.map((/** @type {any} */ one) => `${family.name}/${one.name ?? one}`) : [family.name])
      .map((/** @type {string} */ name) => el("option", { value: name }))));
  const trigger = el("input", { id: "start-trigger", type: "text", autocomplete: "off", spellcheck: "false",
    placeholder: "none if there are captions" });
  const steps = el("input", { id: "start-steps", type: "text", inputmode: "numeric", autocomplete: "off",
    placeholder: "by the number of files" });
  const problem = el("div", { id: "start-problem", role: "alert" });
  const button = el("button", { class: "btn primary", type: "submit" }, "Propose a config");
  const busy = el("span", { class: "note", role: "status" });

  const form_ = el("form", { class: "stack", novalidate: true, onsubmit: submit },
    field("Folder of images, clips or sounds", folder, "A folder on the machine that the studio runs on. Captions are .txt files beside them.", "start-folder-help"),
    presetChoice(form.presets),
    el("div", { class: "options" },
      field("Model", model, "A family, family/flavour, hub id, model folder, or FAMILY:FILE.", "start-model-help"), models,
      field("Trigger word", trigger), field("Steps", steps)),
    problem,
    el("div", { class: "row" }, button, busy));

  /** @param {SubmitEvent} event */
  async function submit(event) {
    event.preventDefault();
    fill(problem);
    if (!folder.value.trim()) {
      fill(problem, problemBox({ found: "nothing", expected: "a folder", hint: "/data/photos, for example" }));
      folder.focus();
      return;
    }
    const chosen = /** @type {HTMLInputElement|null} */ (form_.querySelector("input[name=preset]:checked"));
    const request = { folder: folder.value.trim(), model: model.value.trim() || null, preset: chosen?.value || null,
      trigger: trigger.value.trim() || null, steps: /^\d+$/.test(steps.value.trim()) ? Number(steps.value) : null };
    button.disabled = true;
    setText(busy, "Looking at the folder and planning the memory…");
    try {
      actions.proposed(await api.post("api/new/propose", request));
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      fill(problem, problemBox(error));
    } finally {
      button.disabled = false;
      setText(busy, "");
    }
  }

  const part = (/** @type {any[]} */ ...content) => el("fieldset", { class: "bare", disabled: !control }, content);
  const node = el("div", { class: "start" },
    control ? null : el("div", { class: "callout warn start-why" }, icon("lock"), el("div", null,
      "This studio is read only, so it makes no configs. To make some, start it with ", el("code", null, "gracetune studio --control"), ".")),
    card("From a folder", { class: "start-folder" }, part(form_)),
    card("From a file", { class: "start-file" }, part(dropZone(actions.imported),
      el("p", { class: "note" }, "Or begin with nothing: ",
        el("button", { class: "link", type: "button", onclick: actions.written }, "write a config by hand"), "."))));
  return { node, focus: () => folder.focus() };
}

/** @param {string} label @param {HTMLElement} input @param {string} [help] @param {string} [helpId] */
function field(label, input, help = "", helpId = "") {
  return el("div", { class: "field" }, el("label", { for: input.id }, label), input,
    help ? el("span", { class: "help", id: helpId }, help) : null);
}

/** @param {any[]} presets */
function presetChoice(presets) {
  const choices = [{ name: "", title: "chosen by what is in the folder", media: "" }, ...presets];
  return el("fieldset", { class: "presets" }, el("legend", { class: "label" }, "What to teach"),
    el("div", { class: "preset-grid" }, choices.map((preset, index) => el("label", { class: "preset" },
      el("input", { type: "radio", name: "preset", value: preset.name, checked: index === 0 }),
      el("span", { class: "preset-text" }, el("b", null, preset.name || "automatic"),
        el("span", { class: "help" }, preset.title))))));
}

/** @param {Imported} imported */
export function dropZone(imported) {
  const picker = el("input", { type: "file", accept: ACCEPT, multiple: true, id: "import-file", hidden: true, "aria-label": "Config files to import" });
  const node = el("div", { class: "drop" }, icon("download"),
    el("p", null, "Drop a config of gracetune, SimpleTuner or ai-toolkit here"),
    el("button", { class: "btn", type: "button", onclick: () => picker.click() }, "Choose a file"), picker,
    el("p", { class: "help" }, "Files are only read; nothing is written before you save. Of SimpleTuner, drop config.json and its multidatabackend.json together."));
  picker.addEventListener("change", () => { readInto(picker.files, imported); picker.value = ""; });
  return node;
}

/** Reads files that are dropped on an element. @param {HTMLElement} node @param {Imported} imported */
export function acceptDrops(node, imported) {
  /** @param {DragEvent} event */
  const hasFiles = (event) => event.dataTransfer?.types.includes("Files") ?? false;
  node.addEventListener("dragover", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    node.classList.add("dragging");
  });
  node.addEventListener("dragleave", (event) => {
    if (!node.contains(/** @type {Node|null} */ (event.relatedTarget))) node.classList.remove("dragging");
  });
  node.addEventListener("drop", (event) => {
    node.classList.remove("dragging");
    if (!hasFiles(event)) return;
    event.preventDefault();
    event.stopPropagation();
    readInto(event.dataTransfer?.files ?? null, imported);
  });
}

/** @param {FileList|null} list @param {Imported} imported */
async function readInto(list, imported) {
  const files = [...(list ?? [])];
  if (files.length === 0) return;
  const tooLarge = files.find((file) => file.size > MOST_BYTES);
  if (tooLarge || files.length > MOST_FILES) {
    const found = tooLarge ? `${tooLarge.name} has ${fmt.bytes(tooLarge.size)}.` : `${files.length} files.`;
    toast(`${found} Expected: a config of less than ${fmt.bytes(MOST_BYTES)}, and at most ${MOST_FILES - 1} files that it names.`, "bad");
    return;
  }
  const texts = await Promise.all(files.map(async (file) => (await file.text()).replaceAll("\r\n", "\n")));
  // SimpleTuner's list of datasets is a JSON list; its config, which names it, is not.
  const main = Math.max(0, texts.findIndex((text) => !text.trimStart().startsWith("[")));
  const others = Object.fromEntries(files.flatMap((file, index) => (index === main ? [] : [[file.name, texts[index]]])));
  imported(besides(texts[main], Object.keys(others)), files[main].name, others);
}

/** The text with the dropped files beside it, whatever folder it names: `"config/data.json"` is `"data.json"`.
 * @param {string} text @param {string[]} names */
function besides(text, names) {
  let moved = text;
  for (const name of names) {
    const quoted = name.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
    moved = moved.replace(new RegExp(`"[^"\\n]*/${quoted}"`, "g"), JSON.stringify(name));
  }
  return moved;
}
