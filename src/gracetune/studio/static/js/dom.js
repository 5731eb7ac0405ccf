/**
 * Builds elements. Text is only ever set as text, never parsed as markup, so nothing a run contains can run here.
 */

const SVG = "http://www.w3.org/2000/svg";

/** @typedef {Node | string | number | null | undefined | false | Array<any>} Child */

/** @param {Element} node @param {Child[]} children */
function append(node, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

/** @param {Element} node @param {Record<string, any>} attributes */
function assign(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") setStyle(/** @type {HTMLElement} */ (node), value);
    else if (name === "dataset") Object.assign(/** @type {HTMLElement} */ (node).dataset, value);
    else if (name === "value") /** @type {HTMLInputElement} */ (node).value = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
}

/** The content security policy forbids style attributes; properties set from here are allowed.
 * @param {HTMLElement} node @param {Record<string, string|number>} style */
export function setStyle(node, style) {
  for (const [name, value] of Object.entries(style)) {
    if (name.startsWith("--")) node.style.setProperty(name, String(value));
    else node.style[name] = value;
  }
}

/**
 * `el("button", {class: "btn", onclick: save}, "Save")`. Attributes that are null or false are left out; `style` is an
 * object; `on…` are listeners.
 * @template {keyof HTMLElementTagNameMap} T
 * @param {T} tag @param {Record<string, any>|null} [attributes] @param {...Child} children
 * @returns {HTMLElementTagNameMap[T]}
 */
export function el(tag, attributes = null, ...children) {
  const node = document.createElement(tag);
  // A select takes its value only once it has its options.
  append(node, children);
  assign(node, attributes ?? {});
  return node;
}

/** As `el`, for SVG. @param {string} tag @param {Record<string, any>|null} [attributes] @param {...Child} children */
export function svg(tag, attributes = null, ...children) {
  const node = document.createElementNS(SVG, tag);
  assign(node, attributes ?? {});
  append(node, children);
  return node;
}

/** Replaces what an element contains. @param {Element} node @param {...Child} children */
export function fill(node, ...children) {
  node.replaceChildren();
  append(node, children);
  return node;
}

/** Changes text only if it differs, so that an unchanged value costs no layout. @param {Element} node @param {any} text */
export function setText(node, text) {
  const value = String(text);
  if (node.textContent !== value) node.textContent = value;
}

/** A plain line icon, hidden from screen readers. @param {string} name */
export function icon(name) {
  return svg("svg", { class: "icon", viewBox: "0 0 24 24", "aria-hidden": "true", focusable: "false" },
    svg("path", { d: ICONS[name] }));
}

const ICONS = {
  sun: "M12 4V2m0 20v-2m8-8h2M2 12h2m13.7-5.7 1.4-1.4M4.9 19.1l1.4-1.4m11.4 0 1.4 1.4M4.9 4.9l1.4 1.4M16 12a4 4 0 1 1-8 0 4 4 0 0 1 8 0Z",
  moon: "M20 14.5A8 8 0 0 1 9.5 4a8 8 0 1 0 10.5 10.5Z",
  auto: "M12 3a9 9 0 1 0 0 18 9 9 0 0 0 0-18Zm0 0v18m0-15 6 3m-6 1 8 4m-8 1 5 3",
  help: "M9.5 9a2.6 2.6 0 1 1 3.7 2.4c-.8.4-1.2 1-1.2 2.1m0 3v.1M21 12a9 9 0 1 1-18 0 9 9 0 0 1 18 0Z",
  lock: "M7 11V8a5 5 0 0 1 10 0v3M5 11h14v9H5z",
  unlock: "M7 11V8a5 5 0 0 1 9.7-1.7M5 11h14v9H5z",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  check: "m5 12.5 4.5 4.5L19 7.5",
  close: "M6 6l12 12M18 6 6 18",
  download: "M12 4v11m0 0 4.5-4.5M12 15l-4.5-4.5M4 20h16",
  image: "M4 5h16v14H4zm0 11 5-5 4 4 3-3 4 4M15.5 9.5h.01",
  save: "M5 4h11l3 3v13H5zm3 0v5h7V4M8 20v-6h8v6",
  stop: "M6 6h12v12H6z",
  play: "M8 5.5v13l10.5-6.5z",
  search: "M16 16l4.5 4.5M18 11a7 7 0 1 1-14 0 7 7 0 0 1 14 0Z",
  warning: "M12 4 2.5 20h19zm0 6v5m0 2.5v.1",
  empty: "M4 13h5l1.5 2.5h3L15 13h5M4 13l3-8h10l3 8v6H4z",
  chart: "M4 4v16h16M8 15l4-5 3 3 5-7",
};
