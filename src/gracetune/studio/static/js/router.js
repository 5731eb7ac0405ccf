/** Which page an address names. Addresses are `#/runs`, `#/run/ID/memory`, `#/compare?ids=A,B` and so on. */

const PAGES = new Set(["runs", "compare", "new", "queue", "machine"]);
const RUN_PAGES = new Set(["memory", "data"]);

/**
 * @param {string} hash
 * @returns {{page: string, section: string, params: {id: string, query: URLSearchParams}}}
 */
export function route(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?", 2);
  const parts = path.split("/").filter(Boolean);
  const params = { id: "", query: new URLSearchParams(query) };
  if (parts[0] === "run" && /^[0-9a-f]{12}$/.test(parts[1] ?? "")) {
    params.id = parts[1];
    return { page: RUN_PAGES.has(parts[2]) ? parts[2] : "run", section: "runs", params };
  }
  const page = PAGES.has(parts[0]) ? parts[0] : "runs";
  return { page, section: page, params };
}

/** Changes what follows `?` without another history entry and without showing the page anew.
 * @param {Record<string, string>} values empty ones are left out */
export function replaceQuery(values) {
  const query = new URLSearchParams(Object.entries(values).filter(([, value]) => value !== ""));
  const text = query.toString().replaceAll("%2C", ",");
  history.replaceState(null, "", `${location.hash.split("?")[0]}${text && `?${text}`}`);
}
