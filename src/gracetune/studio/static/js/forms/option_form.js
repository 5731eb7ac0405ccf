/** All options of a config as a form: the common ones first, the others in chapters, collapsed and searchable. */

import { card, el, fill, fmt, icon, setText } from "../ui.js";
import { optionField, withCode } from "./option_field.js";
import { chaptersOf, NEW_ENTRIES } from "./option_sections.js";

/** @typedef {import("./option_field.js").Field} Field */
/** @typedef {import("./option_sections.js").Section} Section */
/** @typedef {{title: string, fields: Field[], details: any, note: HTMLElement}} Group */

/**
 * @param {any} form what `api/form` describes
 * @param {{change: (path: string, value: any) => void, openText: (path: string) => void}} actions
 */
export function optionForm(form, actions) {
  const amount = form.groups.reduce((/** @type {number} */ sum, /** @type {any} */ group) => sum + group.fields.length, 0);
  const essentials = el("div", { class: "stack" });
  const groupList = el("div", { class: "option-groups" });
  const found = el("span", { class: "note", role: "status" });
  const search = el("input", { type: "search", "data-search": true, "aria-label": "Search the options", placeholder: "Search the options",
    oninput: () => filter() });
  const onlySet = el("input", { type: "checkbox", id: "only-set", onchange: () => filter() });
  const flavours = el("datalist", { id: "flavours" });
  const node = el("div", { class: "stack" },
    card("The essentials", { class: "essentials" }, essentials, flavours),
    card("All other options", { note: `${amount} options in all; those that are not set have a default`, class: "all-options" },
      el("div", { class: "option-tools" },
        el("div", { class: "search" }, icon("search"), search, el("kbd", { "aria-hidden": "true" }, "/")),
        el("label", { class: "row", for: "only-set" }, onlySet, "only what is set"), found),
      groupList));

  /** @type {Field[]} */
  let fields = [];
  /** @type {Group[]} */
  let groups = [];
  let built = "";

  /** @param {import("./option_sections.js").Chapter[]} chapters */
  function build(chapters) {
    const focused = fields.find((field) => field.input === document.activeElement)?.option.path;
    const open = new Set(groups.filter((group) => group.details.open).map((group) => group.title));
    fields = [];
    groups = [];
    fill(essentials);
    fill(groupList);
    for (const chapter of chapters) {
      const first = el("div", { class: "options" });
      /** @type {Group} */
      const group = { title: chapter.title, fields: [], details: null, note: el("span", { class: "note" }) };
      const inside = chapter.sections.map((section) => sectionNode(section, first, group));
      if (first.hasChildNodes()) {
        essentials.append(el("fieldset", { class: "chapter" }, el("legend", null, chapter.title), first));
      }
      if (group.fields.length === 0) continue;
      group.details = el("details", { class: "option-group", open: open.has(chapter.title) },
        el("summary", { "data-row": true }, chapter.title, " ", group.note), inside);
      groups.push(group);
      groupList.append(group.details);
    }
    if (focused) fields.find((field) => field.option.path === focused)?.input.focus({ preventScroll: true });
  }

  /** @param {Section} section @param {HTMLElement} first where common options go @param {Group} group */
  function sectionNode(section, first, group) {
    const own = el("div", { class: "options" });
    for (const option of section.options) {
      const field = optionField(option, (value) => actions.change(option.path, value), actions.openText);
      if (option.path === "model.flavour") field.input.setAttribute("list", flavours.id);
      fields.push(field);
      if (option.common && (section.list?.index ?? 0) === 0) first.append(field.node);
      else { own.append(field.node); group.fields.push(field); }
    }
    const node = el("fieldset", { class: "section", hidden: !own.hasChildNodes() && !section.list },
      el("legend", null, section.title || group.title), entryButtons(section),
      section.help ? el("p", { class: "help" }, withCode(section.help)) : null, own);
    return node;
  }

  /** @param {Section} section */
  function entryButtons({ list, title }) {
    if (!list || !(list.path in NEW_ENTRIES)) return null;
    const add = () => {
      const values = NEW_ENTRIES[/** @type {keyof typeof NEW_ENTRIES} */ (list.path)](list.count);
      for (const [path, value] of Object.entries(values)) actions.change(path, value);
    };
    return el("div", { class: "row entry-buttons" },
      list.count > 1 ? el("button", { class: "btn small", type: "button", onclick: () => actions.change(`${list.path}[${list.index}]`, undefined) },
        `Remove ${title}`) : null,
      list.index >= list.count - 1 ? el("button", { class: "btn small", type: "button", onclick: add }, `Add a ${title.replace(/ \d+$/, "")}`) : null);
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
      for (const section of group.details.querySelectorAll("fieldset.section")) {
        section.hidden = searching && !section.querySelector(".option:not([hidden])");
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
      const chapters = chaptersOf(form.groups, values);
      const shape = chapters.flatMap((chapter) => chapter.sections.map((section) => `${section.path} ${section.list?.count}`)).join();
      if (shape !== built) { build(chapters); built = shape; }
      const family = form.families.find((/** @type {any} */ one) => one.name === values["model.family"]);
      fill(flavours, (family?.flavours ?? []).map((/** @type {string} */ name) => el("option", { value: name })));
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
      const hits = fields.filter(({ option }) => path === option.path || path.startsWith(`${option.path}.`) || path.startsWith(`${option.path}[`));
      return hits.sort((a, b) => b.option.path.length - a.option.path.length)[0] ?? null;
    },
    /** @param {Field} field */
    focus(field) {
      if (field.node.hidden) {
        search.value = "";
        onlySet.checked = false;
        filter();
      }
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
  if (inside.every((key) => /^\[\d+\]$/.test(key.slice(path.length)))) return inside.map((key) => values[key]);
  return Object.fromEntries(inside.map((key) => [key.slice(path.length + 1), values[key]]));
}
