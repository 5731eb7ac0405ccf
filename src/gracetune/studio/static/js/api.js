/** Talks to the server: JSON requests, and server-sent events that reconnect. Addresses are relative to the page. */

/** What the server says is wrong: what it found, what it expected, and what to do. */
export class ApiError extends Error {
  /** @param {number} status @param {{found?: string, expected?: string, hint?: string}} detail */
  constructor(status, detail) {
    super(detail.found || `The server answered ${status}.`);
    this.status = status;
    this.found = detail.found ?? `The server answered ${status}.`;
    this.expected = detail.expected ?? "";
    this.hint = detail.hint ?? "";
  }
}

/** @param {string} method @param {string} path @param {{body?: any, signal?: AbortSignal}} options */
async function request(method, path, { body, signal } = {}) {
  /** @type {Record<string, string>} */
  const headers = { Accept: "application/json" };
  if (method !== "GET") headers["X-Gracetune-Studio"] = "1";
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method, headers, signal, credentials: "same-origin", body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    throw new ApiError(0, {
      found: "The studio does not answer.",
      expected: "A running `gracetune studio`. Training is not affected.",
      hint: "Start it again, or check the SSH tunnel.",
    });
  }
  const isJson = (response.headers.get("content-type") ?? "").includes("json");
  const answer = isJson ? await response.json() : null;
  if (response.ok) return answer;
  throw new ApiError(response.status, answer?.error ?? explain(response.status));
}

/** @param {number} status */
function explain(status) {
  if (status === 401) {
    return { found: "This browser has no access any more.", hint: "Open the link that `gracetune studio` printed." };
  }
  return { found: `The server answered ${status}.` };
}

export const api = {
  /** @param {string} path @param {AbortSignal} [signal] */
  get: (path, signal) => request("GET", path, { signal }),
  /** @param {string} path @param {any} [body] */
  post: (path, body = {}) => request("POST", path, { body }),
  /** @param {string} path @param {any} body */
  put: (path, body) => request("PUT", path, { body }),
  /** @param {string} path */
  remove: (path) => request("DELETE", path),
};

const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 15000;
const HIDDEN_MS = 20000;
/** @type {Map<object, boolean>} open streams, and whether each is connected */
const streams = new Map();

function announce() {
  const states = [...streams.values()];
  const state = states.length === 0 ? "idle" : states.every(Boolean) ? "live" : "lost";
  window.dispatchEvent(new CustomEvent("studio:connection", { detail: state }));
}

/**
 * Listens to server-sent events until the returned function is called. After an interruption it connects again, at
 * first soon and then at longer intervals, and calls `handlers.reconnected`, because events were missed. A tab in the
 * background disconnects after a while: a browser allows six connections to one server, over all its tabs.
 * @param {string} url
 * @param {Record<string, (data: any) => void>} handlers by event name
 * @returns {() => void}
 */
export function stream(url, handlers) {
  const key = {};
  let wait = FIRST_WAIT_MS;
  let timer = 0;
  let opened = false;
  /** @type {EventSource|null} */
  let source = null;

  function connect() {
    window.clearTimeout(timer);
    source = new EventSource(url);
    source.onopen = () => {
      wait = FIRST_WAIT_MS;
      streams.set(key, true);
      announce();
      if (opened && handlers.reconnected) handlers.reconnected(null);
      opened = true;
    };
    source.onerror = () => {
      // The browser's own retry gives up on HTTP errors, for example while the studio restarts.
      disconnect();
      streams.set(key, false);
      announce();
      timer = window.setTimeout(connect, wait);
      wait = Math.min(LONGEST_WAIT_MS, wait * 2);
    };
    for (const [name, handle] of Object.entries(handlers)) {
      if (name !== "reconnected") source.addEventListener(name, (event) => handle(JSON.parse(event.data)));
    }
  }

  function disconnect() {
    window.clearTimeout(timer);
    source?.close();
    source = null;
  }

  function followVisibility() {
    if (document.hidden) timer = window.setTimeout(disconnect, HIDDEN_MS);
    else if (source === null) connect();
    else window.clearTimeout(timer);
  }

  streams.set(key, true);
  connect();
  announce();
  document.addEventListener("visibilitychange", followVisibility);
  return () => {
    document.removeEventListener("visibilitychange", followVisibility);
    disconnect();
    streams.delete(key);
    announce();
  };
}
