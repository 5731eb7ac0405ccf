/** What is wrong with a config, as a list: what was found, what was expected, what to type. */

import { el, fill, fmt, icon } from "../ui.js";
import { withCode } from "./option_field.js";

/** @typedef {{key: string, found: string, expected: string, try: string}} Problem */

/**
 * @param {HTMLElement} node
 * @param {Problem[]} problems
 * @param {string[]} notes
 * @param {(problem: Problem) => (() => void)|null} locate what shows the place of a problem; null if it has none
 */
export function showProblems(node, problems, notes, locate) {
  fill(node,
    problems.length ? el("ol", { class: "problems" }, problems.map((problem) => row(problem, locate(problem)))) : null,
    notes.length ? el("details", null,
      el("summary", null, fmt.plural(notes.length, "note")),
      el("ul", { class: "plain-list" }, notes.map((text) => el("li", null, withCode(text))))) : null);
}

/** @param {Problem} problem @param {(() => void)|null} go */
function row(problem, go) {
  const key = problem.key || "the file";
  return el("li", { class: "problem-row" }, icon("warning"),
    el("div", null,
      go ? el("button", { class: "link mono", type: "button", onclick: go, "aria-label": `Go to ${key}` }, key) : el("code", null, key),
      el("dl", null,
        problem.found && [el("dt", null, "found"), el("dd", null, problem.found)],
        problem.expected && [el("dt", null, "expected"), el("dd", null, withCode(problem.expected))],
        problem.try && [el("dt", null, "try"), el("dd", { class: "try" }, withCode(problem.try))])));
}

/** One problem beside what caused it. @param {{found: string, expected: string, hint: string}} problem */
export function problemBox({ found, expected, hint }) {
  return el("div", { class: "callout bad" }, icon("warning"), el("div", null, el("div", null, withCode(found)),
    expected && el("div", { class: "note" }, "expected: ", withCode(expected)), hint && el("div", { class: "note" }, "try: ", withCode(hint))));
}
