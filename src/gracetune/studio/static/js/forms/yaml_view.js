/** The text of a config with line numbers. */

import { card, copyButton, el, icon, setText } from "../ui.js";

/** @param {{change: (text: string) => void, fileName: () => string}} actions */
export function yamlView(actions) {
  const gutter = el("pre", { class: "yaml-gutter", "aria-hidden": "true" });
  const area = el("textarea", { class: "yaml-text mono", spellcheck: "false", autocomplete: "off", wrap: "off",
    "aria-label": "Text of the config", rows: 24 });
  const download = el("button", { class: "btn small", type: "button" }, icon("download"), "Download");
  const node = card("YAML", { class: "yaml", actions: [copyButton(() => area.value), download] },
    el("div", { class: "yaml-box" }, gutter, area));

  const number = () => {
    const lines = area.value.split("\n").length;
    setText(gutter, Array.from({ length: lines }, (_, index) => index + 1).join("\n"));
  };
  area.addEventListener("input", () => { number(); actions.change(area.value); });
  area.addEventListener("scroll", () => { gutter.scrollTop = area.scrollTop; });
  download.addEventListener("click", () => {
    const address = URL.createObjectURL(new Blob([area.value], { type: "text/plain" }));
    el("a", { href: address, download: actions.fileName() }).click();
    URL.revokeObjectURL(address);
  });

  return {
    node,
    /** @param {string} text */
    update(text) {
      if (area.value === text) return;
      const { selectionStart, scrollTop } = area;
      area.value = text;
      area.selectionStart = area.selectionEnd = Math.min(selectionStart, text.length);
      area.scrollTop = scrollTop;
      number();
    },
    /** Puts the cursor on the line of an option. @param {string} path */
    goTo(path) {
      const lines = area.value.split("\n");
      const line = lineOf(lines, path);
      const start = lines.slice(0, line).join("\n").length + (line ? 1 : 0);
      area.focus();
      area.setSelectionRange(start, start + (lines[line]?.length ?? 0));
      area.scrollTop = Math.max(0, line - 5) * parseFloat(getComputedStyle(area).lineHeight);
      node.scrollIntoView({ block: "nearest" });
    },
  };
}

/** The line that an option, or else the section around it, is probably on. @param {string[]} lines @param {string} path */
function lineOf(lines, path) {
  let at = 0;
  for (const key of path.replace(/\[[^\]]*\]/g, "").split(".")) {
    const found = lines.findIndex((line, index) => index >= at && new RegExp(`(^|[\\s{,-])${key}:`).test(line));
    if (found < 0) break;
    at = found;
  }
  return at;
}
