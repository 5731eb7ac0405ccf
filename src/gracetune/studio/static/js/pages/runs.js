/** The list of runs. */

import { pageHead, setTitle, fill } from "../ui.js";

/** @param {HTMLElement} root */
export async function show(root) {
  setTitle("Runs");
  fill(root, pageHead({ title: "Runs" }));
}
