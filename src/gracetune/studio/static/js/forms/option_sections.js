/** Which sections of options a config has: the schema describes one entry of each list, and a config may have several. */

/** @typedef {import("./option_field.js").Option} Option */
/** @typedef {{title: string, path: string, help?: string, fields: Option[]}} SchemaGroup */
/** @typedef {{path: string, title: string, help: string, options: Option[], list: {path: string, index: number, count: number}|null}} Section */
/** @typedef {{title: string, sections: Section[]}} Chapter */

/** Lists whose entries can be added and removed in the form, and what a new entry sets. */
export const NEW_ENTRIES = {
  datasets: (/** @type {number} */ index) => ({ [`datasets[${index}].id`]: `dataset-${index + 1}` }),
  "validation.prompts": (/** @type {number} */ index) => ({ [`validation.prompts[${index}].prompt`]: "describe a sample" }),
};

/**
 * The sections by their first word, with one section for each entry of a list.
 * @param {SchemaGroup[]} groups @param {Record<string, any>} values @returns {Chapter[]}
 */
export function chaptersOf(groups, values) {
  /** @type {Map<string, Chapter>} */
  const chapters = new Map();
  const keys = Object.keys(values);
  for (const group of groups) {
    const name = group.path.split(/[.[]/)[0] || "run";
    const chapter = chapters.get(name) ?? { title: capital(name), sections: [] };
    chapters.set(name, chapter);
    for (const path of instances(group.path, keys)) chapter.sections.push(sectionAt(group, path, keys));
  }
  return [...chapters.values()];
}

/** `a[0].b[0]` for every entry that the values have, and at least the first. @param {string} pattern @param {string[]} keys
 * @returns {string[]} */
function instances(pattern, keys) {
  let paths = [""];
  for (const part of pattern.split(/(?<=\[0\])/)) {
    if (!part.endsWith("[0]")) paths = paths.map((path) => path + part);
    else {
      const list = part.slice(0, -3);
      paths = paths.flatMap((path) => Array.from({ length: Math.max(1, countOf(path + list, keys)) }, (_, index) => `${path}${list}[${index}]`));
    }
  }
  return paths;
}

/** @param {string} list @param {string[]} keys */
function countOf(list, keys) {
  let most = 0;
  for (const key of keys) {
    if (key.startsWith(`${list}[`)) most = Math.max(most, 1 + (Number.parseInt(key.slice(list.length + 1), 10) || 0));
  }
  return most;
}

/** @param {SchemaGroup} group @param {string} path @param {string[]} keys @returns {Section} */
function sectionAt(group, path, keys) {
  const entry = /^(.*)\[(\d+)\]$/.exec(path);
  return {
    path, title: titleOf(path), help: group.help ?? "",
    options: group.fields.map((option) => ({ ...option, path: path + option.path.slice(group.path.length) })),
    list: entry && { path: entry[1], index: Number(entry[2]), count: countOf(entry[1], keys) },
  };
}

/** `datasets[1].local_copy` is "dataset 2 › local copy". @param {string} path */
function titleOf(path) {
  const parts = path.split(".").map((part) => {
    const entry = /^(.*?)s?\[(\d+)\]$/.exec(part);
    return (entry ? `${entry[1]} ${Number(entry[2]) + 1}` : part).replaceAll("_", " ");
  });
  return parts.slice(path.includes("[") && parts.length === 1 ? 0 : Number(!path.startsWith("datasets["))).join(" › ");
}

/** @param {string} text */
export const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1).replaceAll("_", " ");
