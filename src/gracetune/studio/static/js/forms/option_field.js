/** One option of a config as a labelled field that says its default, its help and what is wrong with it. */

import { el, fill, setText } from "../ui.js";

/** @typedef {{path: string, label: string, help: string, type: string, choices: any[]|null, default: any,
 *   common: boolean, required?: boolean, expects?: string}} Option */
/** @typedef {{option: Option, node: HTMLElement, input: any, update: (value: any) => void, report: (text: string) => void}} Field */

const NUMBER = /^[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$/i;
let count = 0;

/**
 * @param {Option} option
 * @param {(value: any) => void} change gets the new value; undefined goes back to the default
 * @param {(path: string) => void} openText shows the option in the text
 * @returns {Field}
 */
export function optionField(option, change, openText) {
  const id = `option-${(count += 1)}`;
  const input = inputFor(option, id);
  const problem = el("span", { class: "problem", id: `${id}-problem`, hidden: true });
  const reset = el("button", { class: "link reset", type: "button", hidden: true, "aria-label": `Reset ${option.label} to its default`,
    onclick: () => { change(undefined); input.focus(); } }, "reset");
  const elsewhere = el("button", { class: "btn small", type: "button", hidden: true,
    onclick: () => openText(option.path) }, "Edit in the YAML");
  const help = option.help ? el("span", { class: "help", id: `${id}-help` }, withCode(option.help)) : null;
  const describedBy = [help && `${id}-help`, `${id}-problem`].filter(Boolean).join(" ");
  input.setAttribute("aria-describedby", describedBy);
  const head = el("div", { class: "option-head" },
    el("label", { for: id }, option.label), el("code", { class: "option-path" }, option.path), reset);
  const node = el("div", { class: "field option", dataset: { path: option.path } }, head,
    option.type === "boolean" ? el("div", { class: "option-check" }, input, el("span", { class: "option-state" })) : input,
    elsewhere, help, problem);

  input.addEventListener(option.type === "choice" || option.type === "boolean" ? "change" : "input",
    () => change(valueOf(option, input)));

  return {
    option, node, input,
    update(value) {
      const isSet = value !== undefined && value !== null && !same(value, option.default);
      const isComplex = value !== null && typeof value === "object" && Object.values(value).some((one) => one !== null && typeof one === "object");
      reset.hidden = !isSet || option.required === true;
      node.classList.toggle("is-set", isSet);
      elsewhere.hidden = !isComplex;
      input.readOnly = isComplex;
      if (document.activeElement !== input || !same(valueOf(option, input) ?? null, isSet ? value : null)) {
        showValue(option, input, isSet ? value : undefined);
      }
      if (option.type === "boolean") setText(/** @type {Element} */ (node.querySelector(".option-state")), input.checked ? "on" : "off");
    },
    report(text) {
      problem.hidden = !text;
      fill(problem, withCode(text));
      if (text) input.setAttribute("aria-invalid", "true");
      else input.removeAttribute("aria-invalid");
      node.classList.toggle("has-problem", Boolean(text));
    },
  };
}

/** @param {Option} option @param {string} id @returns {any} */
function inputFor(option, id) {
  if (option.type === "boolean") return el("input", { id, type: "checkbox" });
  if (option.type === "choice") {
    return el("select", { id }, el("option", { value: "" }, "default"),
      (option.choices ?? []).map((choice) => el("option", { value: JSON.stringify(choice) }, String(choice))));
  }
  if (option.type === "list") return el("textarea", { id, rows: 2, spellcheck: "false", placeholder: "one on each line" });
  const numeric = option.type === "integer" || option.type === "number";
  return el("input", { id, type: "text", autocomplete: "off", spellcheck: "false", inputmode: numeric ? "decimal" : null });
}

/** What the field says now. @param {Option} option @param {any} input */
function valueOf(option, input) {
  if (option.type === "boolean") return input.checked === option.default ? undefined : input.checked;
  if (option.type === "choice") return input.value === "" ? undefined : JSON.parse(input.value);
  const text = input.value.trim();
  if (text === "") return undefined;
  if (option.type === "list") return text.split("\n").map((/** @type {string} */ line) => number(line.trim())).filter((/** @type {any} */ one) => one !== "");
  if (option.expects === "a mapping") return mapping(text);
  return option.type !== "string" && option.type !== "path" || /number/.test(option.expects ?? "") ? number(text) : text;
}

/** @param {string} text */
const number = (text) => (NUMBER.test(text) ? Number(text) : text);

/** A mapping is typed as JSON; the check says what is wrong with anything else. @param {string} text */
function mapping(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

/** @param {Option} option @param {any} input @param {any} value undefined: the default */
function showValue(option, input, value) {
  const standard = option.default;
  const none = standard === null || standard === undefined || (Array.isArray(standard) && !standard.length);
  if (option.type === "boolean") {
    input.checked = Boolean(value ?? standard);
  } else if (option.type === "choice") {
    setText(input.options[0], none ? (option.required ? "choose" : "not set") : `${standard} (default)`);
    const wanted = value === undefined ? "" : JSON.stringify(value);
    if (wanted && ![...input.options].some((one) => one.value === wanted)) input.append(el("option", { value: wanted }, String(value)));
    input.value = wanted;
  } else {
    input.value = value === undefined ? "" : asText(value);
    input.placeholder = !none ? `${asText(standard).replaceAll("\n", ", ")} (default)`
      : option.type === "list" ? "one on each line" : option.required ? "required" : "not set";
  }
}

/** @param {any} value @returns {string} */
function asText(value) {
  if (Array.isArray(value)) return value.map((one) => (one !== null && typeof one === "object" ? JSON.stringify(one) : String(one))).join("\n");
  return value !== null && typeof value === "object" ? JSON.stringify(value) : String(value ?? "");
}

/** @param {any} a @param {any} b */
const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);

/** Text whose parts in backticks are code. @param {string} text */
export function withCode(text) {
  return text.split(/`([^`]*)`/).map((part, index) => (index % 2 ? el("code", null, part) : part));
}
