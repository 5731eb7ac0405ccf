/** Everything a page uses, from one place. Pages import from here only. */

export { el, svg, fill, icon, setText, setStyle } from "./dom.js";
export { fmt } from "./format.js";
export { api, ApiError, stream } from "./api.js";
export { toast, toastError, confirmDialog, modal, helpDialog, copyButton } from "./dialogs.js";
export { card, emptyState, errorState, pageHead, progress, setTitle, skeleton, stateBadge, tiles } from "./parts.js";
export { runHeader } from "./run_header.js";
export { BINARY_STEPS, TIME_STEPS, chart } from "./chart.js";
