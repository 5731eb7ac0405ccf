/** One item of a contact sheet: its image, its loss, and its caption, which is changed in place. */

import { api, ApiError, el, fill, fmt, icon, setText } from "../ui.js";

const MEDIA_SIGNS = { audio: "sound", video: "clip", image: "image" };

/**
 * @param {any} item @param {{base: string, media: string, editable: boolean, why: string, drafts: Map<string, string>,
 *   judged: boolean, place: string, announce: (text: string) => void}} sheet `place` is the query for this item alone
 */
export function captionCard(item, sheet) {
  let { caption } = item;
  /** @type {string|null} */
  let { undo } = item;
  const editable = sheet.editable && item.editable;
  const why = sheet.why || item.why;
  const area = el("textarea", { "aria-label": `Caption of ${item.file}`, readonly: !editable, spellcheck: "true",
    title: editable ? "Ctrl+Enter saves, Esc discards" : why, placeholder: "no caption" });
  area.value = sheet.drafts.get(item.key) ?? caption;
  const state = el("div", { class: "item-state" });
  const conflict = el("div", { role: "alert" });
  const node = el("li", { class: "item", dataset: { row: "", key: item.key }, tabindex: 0, "aria-label": item.file },
    el("div", { class: "item-picture" }, picture(item, sheet.media)),
    el("div", { class: "item-body" },
      el("div", { class: "item-name" }, el("b", { title: item.file }, item.file), el("span", null, shape(item))),
      sheet.judged ? el("div", { class: "item-loss" }, lossText(item)) : null,
      area, state, conflict,
      (item.notes ?? []).map((/** @type {string} */ note) => el("div", { class: "item-notes" }, note))));

  area.addEventListener("input", () => { sheet.drafts.set(item.key, area.value); draw(); });
  area.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); save(); }
    if (event.key === "Escape" && isEdited()) { event.preventDefault(); event.stopPropagation(); revert(); }
  });
  const isEdited = () => area.value !== caption;

  /** @param {string} [said] */
  function draw(said = "") {
    node.classList.toggle("is-edited", isEdited());
    if (!isEdited()) sheet.drafts.delete(item.key);
    if (isEdited()) {
      if (state.querySelector("[data-save]")) return;
      fill(state, el("button", { class: "btn small primary", type: "button", dataset: { save: "" }, onclick: () => save() }, "Save"),
        el("button", { class: "btn small", type: "button", onclick: revert }, "Discard"), el("span", null, "not saved"));
    } else {
      fill(state, said && [icon("check"), el("span", null, said)],
        undo && editable && el("button", { class: "btn small", type: "button", onclick: takeBack, "aria-label": `Undo the change of ${item.file}` }, "Undo"));
    }
  }

  function revert() {
    area.value = caption;
    fill(conflict);
    draw();
    area.focus();
  }

  /** @param {any} newer @param {string} said */
  function accept(newer, said) {
    caption = newer.caption;
    area.value = caption;
    fill(conflict);
    draw(said);
    sheet.announce(`${item.file}: ${said}`);
  }

  async function save(was = caption) {
    if (!isEdited()) return;
    const hadFocus = node.contains(document.activeElement);
    setText(/** @type {Element} */ (state.querySelector("[data-save]")), "Saving…");
    try {
      const answer = await api.put(`${sheet.base}/items/${encodeURIComponent(item.key)}/caption`, { text: area.value, was });
      undo = answer.undo;
      accept(answer.item, "saved");
    } catch (error) {
      fill(state);
      draw();
      refused(error);
    }
    if (hadFocus && !node.contains(document.activeElement)) area.focus();
  }

  async function takeBack() {
    const id = undo;
    try {
      const answer = await api.post(`${sheet.base}/undo`, { undo: id });
      undo = answer.item?.undo ?? null;
      accept(answer.item ?? { caption: "" }, "undone");
      area.focus();
    } catch (error) {
      refused(error);
    }
  }

  /** @param {unknown} error */
  function refused(error) {
    if (!(error instanceof ApiError)) throw error;
    if (error.status !== 409) {
      fill(conflict, el("div", { class: "conflict" }, [error.found, error.expected, error.hint].filter(Boolean).join(" · ")));
      return;
    }
    showConflict(error);
  }

  /** The file was changed by something else: show its text, and let the user choose. @param {ApiError} error */
  async function showConflict(error) {
    const theirs = await currentCaption();
    if (theirs === null) {
      fill(conflict, el("div", { class: "conflict" }, error.found));
      return;
    }
    fill(conflict, el("div", { class: "conflict" },
      el("b", null, "The file was changed meanwhile. It now says:"), el("q", null, theirs),
      el("div", { class: "row" },
        el("button", { class: "btn small", type: "button", onclick: () => { undo = null; accept({ caption: theirs }, "taken from the file"); } }, "Use the file's"),
        el("button", { class: "btn small", type: "button", onclick: () => { caption = theirs; save(theirs); } }, "Save mine over it"))));
  }

  /** The caption as the file is now; null if the list of items has changed. */
  async function currentCaption() {
    const page = await api.get(`${sheet.base}/items?${sheet.place}`);
    const found = page.items.find((/** @type {any} */ one) => one.key === item.key);
    return found ? found.caption : null;
  }

  draw();
  return { node, area };
}

/** @param {any} item @param {string} media */
function picture(item, media) {
  if (!item.thumbnail) return el("span", null, MEDIA_SIGNS[/** @type {keyof typeof MEDIA_SIGNS} */ (media)] ?? media);
  const image = el("img", { src: item.thumbnail, alt: "", loading: "lazy", decoding: "async" });
  image.addEventListener("error", () => image.replaceWith("no preview"));
  return image;
}

/** @param {any} item */
function shape(item) {
  const size = item.width ? `${item.width}×${item.height}` : "";
  return [size, item.frames > 1 ? `${item.frames} frames` : "", item.held_out ? "held out" : ""].filter(Boolean).join(" · ");
}

/** @param {any} item */
function lossText(item) {
  const { loss_before: before, loss_after: after } = item;
  if (typeof before !== "number" && typeof after !== "number") return "loss not judged";
  const change = typeof before === "number" && typeof after === "number" && before > 0 ? (after - before) / before : null;
  const words = change === null ? "" : Math.abs(change) < 0.0005 ? ", unchanged" : change < 0 ? `, ${fmt.percent(-change)} lower` : `, ${fmt.percent(change)} higher`;
  return `loss ${fmt.number(before, 3)} → ${fmt.number(after, 3)}${words}`;
}
