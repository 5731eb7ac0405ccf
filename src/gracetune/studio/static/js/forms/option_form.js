/** All options of a config as a form: the common ones first, the others grouped, collapsed and searchable. */

import { card, el, fill, fmt, icon, setText } from "../ui.js";
import { optionField } from "./option_field.js";

/** @typedef {import("./option_field.js").Option} Option */
/** @typedef {import("./option_field.js").Field} Field */
/** @typedef {{title: string, fields: Field[], details: any, note: HTMLElement}} Group */

const LIST = /^datasets\[[^\]]*\]/;

/**
 * @param {{groups: {title: string, fields: Option[]}[]}} schema
 * @param {{change: (path: string, value: any) => void, openText: (path: string) => void}} actions
 */
export function optionForm(schema, actions) {
  const all = schema.groups.flatMap((group) => group.fields);
  const essentials = el("div", { class: "options" });
  const groupList = el("div", { class: "option-groups" });
  const found = el("span", { class: "note", role: "status" });
  const search = el("input", { type: "search", "data-search": true, "aria-label": "Search the options", placeholder: "Search the options",
    oninput: () => filter() });
  const onlySet = el("input", { type: "checkbox", id: "only-set", onchange: () => filter() });
  const node = el("div", { class: "stack" },
    card("The essentials", { class: "essentials" }, essentials),
    card("All other options", { note: `${all.length} options; those that are not set have a default`, class: "all-options" },
      el("div", { class: "option-tools" },
        el("div", { class: "search" }, icon("search"), search, el("kbd", { "aria-hidden": "true" }, "/")),
        el("label", { class: "row", for: "only-set" }, onlySet, "only what is set"), found),
      groupList));

  /** @type {Field[]} */
  let fields = [];
  /** @type {Group[]} */
  let groups = [];
  let datasets = -1;

  /** The schema describes one dataset; a config may have several. @param {number} amount */
  function build(amount) {
    datasets = amount;
    fields = [];
    groups = [];
    fill(essentials);
    fill(groupList);
    for (const group of schema.groups) {
      const perDataset = group.fields.some((option) => LIST.test(option.path));
      for (let number = 0; number < (perDataset ? amount : 1); number += 1) {
        addGroup(perDataset && amount > 1 ? `${group.title} ${number + 1}` : group.title, group.fields, number);
      }
    }
  }

  /** @param {string} title @param {Option[]} options @param {number} number */
  function addGroup(title, options, number) {
    /** @type {Field[]} */
    const own = [];
    for (const given of options) {
      const option = { ...given, path: given.path.replace(LIST, `datasets[${number}]`) };
      const field = optionField(option, (value) => actions.change(option.path, value), actions.openText);
      fields.push(field);
      if (option.common) essentials.append(field.node);
      else own.push(field);
    }
    if (own.length === 0) return;
    const note = el("span", { class: "note" });
    const details = el("details", { class: "option-group" }, el("summary", { "data-row": true }, title, " ", note),
      el("div", { class: "options" }, own.map((field) => field.node)));
    groups.push({ title, fields: own, details, note });
    groupList.append(details);
  }

  function filter() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const searching = words.length > 0 || onlySet.checked;
    let shown = 0;
    for (const group of groups) {
      let inGroup = 0;
      for (const { option, node: field } of group.fields) {
        const text = `${option.path} ${option.label} ${option.help} ${group.title}`.toLowerCase();
        const hit = words.every((word) => text.includes(word)) && (!onlySet.checked || field.classList.contains("is-set"));
        field.hidden = !hit;
        inGroup += Number(hit);
      }
      group.details.hidden = inGroup === 0;
      if (searching) group.details.open = inGroup > 0;
      shown += inGroup;
    }
    if (!searching) for (const group of groups) group.details.open = group.fields.some((one) => one.node.classList.contains("has-problem"));
    setText(found, searching ? `${fmt.plural(shown, "option")} found` : "");
  }

  return {
    node,
    /** Shows a config's values. @param {Record<string, any>} values by path */
    update(values) {
      const numbers = Object.keys(values).map((path) => Number(/^datasets\[(\d+)\]/.exec(path)?.[1] ?? 0));
      const amount = 1 + Math.max(0, ...numbers);
      if (amount !== datasets) build(amount);
      for (const field of fields) field.update(valueAt(values, field.option.path));
      for (const group of groups) {
        const set = group.fields.filter((field) => field.node.classList.contains("is-set")).length;
        setText(group.note, set ? `${set} of ${group.fields.length} set` : `${group.fields.length}`);
      }
    },
    /** Shows problems at their fields. @param {Map<string, string>} byPath */
    report(byPath) {
      for (const field of fields) field.report(byPath.get(field.option.path) ?? "");
      for (const group of groups) if (group.fields.some((one) => byPath.has(one.option.path))) group.details.open = true;
    },
    /** The field at or around a path; null if there is none. @param {string} path @returns {Field|null} */
    fieldOf(path) {
      const hits = fields.filter((field) => path === field.option.path || path.startsWith(`${field.option.path}.`)
        || path.startsWith(`${field.option.path}[`));
      return hits.sort((a, b) => b.option.path.length - a.option.path.length)[0] ?? null;
    },
    /** @param {Field} field */
    focus(field) {
      search.value = "";
      onlySet.checked = false;
      filter();
      const group = groups.find((one) => one.fields.includes(field));
      if (group) group.details.open = true;
      field.node.scrollIntoView({ block: "center" });
      field.input.focus({ preventScroll: true });
    },
  };
}

/** The value of an option; lists and mappings may be given by their leaves. @param {Record<string, any>} values @param {string} path */
function valueAt(values, path) {
  if (path in values) return values[path];
  const inside = Object.keys(values).filter((key) => key.startsWith(`${path}[`) || key.startsWith(`${path}.`));
  if (inside.length === 0) return undefined;
  return inside.map((key) => ({ [key.slice(path.length)]: values[key] }));
}
