/** Starts the studio: navigation, theme, connection, keys, and the page that the address names. */

import { api, el, errorState, fill, fmt, helpDialog, icon, setTitle, skeleton } from "./ui.js";
import { route } from "./router.js";
import { handleKey, KEYS } from "./keys.js";

const NAV = [["runs", "Runs"], ["compare", "Compare"], ["new", "New run"], ["queue", "Queue"], ["machine", "Machine"]];
const THEMES = [["", "auto", "Theme: as the system"], ["light", "sun", "Theme: light"], ["dark", "moon", "Theme: dark"]];

const main = /** @type {HTMLElement} */ (document.getElementById("main"));
const nav = /** @type {HTMLElement} */ (document.getElementById("nav"));

/** @type {(() => void)|void} */
let cleanup;
let shown = 0;
/** @type {Promise<any>|null} */
let studio = null;

/** What the server is, fetched once; again after a failure. */
function studioInfo() {
  studio ??= api.get("api/studio").catch((error) => { studio = null; throw error; });
  return studio;
}

async function showPage() {
  const turn = (shown += 1);
  const target = route(location.hash);
  cleanup?.();
  cleanup = undefined;
  markCurrent(target.section);
  setTitle("");
  const root = el("div", { class: `page page-${target.page}` }, skeleton(72), skeleton(420));
  fill(main, root);
  window.scrollTo(0, 0);
  try {
    const [page, info] = await Promise.all([import(`./pages/${target.page}.js`), studioInfo()]);
    if (turn !== shown) return;
    const done = await page.show(root, { ...target.params, studio: info });
    if (turn === shown) cleanup = done;
    else done?.();
  } catch (error) {
    if (turn === shown) fill(root, errorState(error, showPage));
  }
  if (turn === shown && document.activeElement === document.body) main.focus({ preventScroll: true });
}

/** @param {string} section */
function markCurrent(section) {
  fill(nav, NAV.map(([name, label]) =>
    el("a", { href: `#/${name}`, "aria-current": name === section ? "page" : null }, label)));
}

function themeButton() {
  const current = () => Math.max(0, THEMES.findIndex(([name]) => name === (document.documentElement.dataset.theme ?? "")));
  const button = el("button", { class: "icon-btn", type: "button" });
  const draw = () => {
    const [, sign, label] = THEMES[current()];
    button.setAttribute("aria-label", label);
    button.title = label;
    fill(button, icon(sign));
  };
  button.addEventListener("click", () => {
    const [name] = THEMES[(current() + 1) % THEMES.length];
    if (name) {
      document.documentElement.dataset.theme = name;
      localStorage.setItem("gracetune-theme", name);
    } else {
      delete document.documentElement.dataset.theme;
      localStorage.removeItem("gracetune-theme");
    }
    draw();
    window.dispatchEvent(new Event("studio:theme"));
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => window.dispatchEvent(new Event("studio:theme")));
  draw();
  return button;
}

function connectionSign() {
  const text = el("span", { class: "bar-text" }, "");
  const node = el("span", { class: "connection idle", role: "status" }, el("span", { class: "dot", "aria-hidden": "true" }), text);
  const words = { idle: "", live: "live", lost: "connecting" };
  window.addEventListener("studio:connection", (event) => {
    const state = /** @type {CustomEvent<"idle"|"live"|"lost">} */ (event).detail;
    node.className = `connection ${state}`;
    text.textContent = words[state];
    node.title = state === "lost" ? "The studio does not answer. Training is not affected." : "";
  });
  return node;
}

function controlSign() {
  const node = el("span", { class: "control-sign" });
  studioInfo().then((info) => {
    const text = info.control ? "control" : "read only";
    node.title = info.control
      ? "This studio may act on runs: it was started with --control."
      : "This studio only shows. To act on runs, start it with: gracetune studio --control";
    fill(node, icon(info.control ? "unlock" : "lock"), el("span", { class: "bar-text" }, text));
    document.documentElement.dataset.control = String(info.control);
    node.setAttribute("aria-label", `${text}. ${node.title}`);
    node.setAttribute("role", "note");
  }, () => fill(node));
  return node;
}

fill(/** @type {HTMLElement} */ (document.getElementById("bar-end")), connectionSign(), controlSign(), themeButton(),
  el("button", { class: "icon-btn", type: "button", "aria-label": "Keys", title: "Keys (?)", onclick: () => helpDialog(KEYS) }, icon("help")));
document.addEventListener("keydown", handleKey);
document.getElementById("skip")?.addEventListener("click", (event) => { event.preventDefault(); main.focus(); });
window.addEventListener("hashchange", showPage);
window.setInterval(() => {
  for (const node of document.querySelectorAll("time[data-ago]")) {
    node.textContent = fmt.ago(Number(/** @type {HTMLElement} */ (node).dataset.ago));
  }
}, 5000);
showPage();
