// The client of the REST API. The session is a cookie that scripts cannot read.

export const BASE = new URL("../../", import.meta.url);

/** A response with an error status. `field` is the field that the error names, if any. */
export class ApiError extends Error {
  constructor(status, body, requestId, retryAfter) {
    const text = body?.error || `the server answered with status ${status}`;
    super(text);
    this.status = status;
    this.requestId = body?.request_id || requestId || "";
    this.retryAfter = retryAfter;
    this.body = body;
    const named = /^([a-z_]+(?:\[\d+\])?(?:\.[a-z_]+)*): (.+)$/s.exec(text);
    this.field = named ? named[1] : null;
    this.text = named ? named[2] : text;
  }
}

/** Returns an error of an invalid request with the field of the form that its text names, if it has none. */
export function withField(error, names) {
  if (error.field === null && error.status === 400)
    error.field = names.find((name) => new RegExp(`\\b${name}s?\\b`).test(error.text)) ?? null;
  return error;
}

let onUnauthenticated = () => {};
export const whenUnauthenticated = (callback) => {
  onUnauthenticated = callback;
};

let check = null;

/** Reports the end of the session. Calls that the namespace may not make are answered with 401 as well. */
function checkSession() {
  check ??= fetch(url("/auth/session"), { credentials: "same-origin", cache: "no-store" })
    .then(
      (response) => {
        if (response.status === 401) onUnauthenticated();
      },
      () => {},
    )
    .finally(() => {
      check = null;
    });
}

export const url = (path) => new URL(path.replace(/^\//, ""), BASE);

/** Encodes a name as one segment of a path. */
export const seg = encodeURIComponent;

/** How often a request is repeated whose response was lost, and the milliseconds before the first repetition. */
const MAX_REPEATS = 3;
const REPEAT_PAUSE = 500;

const pause = (milliseconds) =>
  new Promise((resolve) => {
    setTimeout(resolve, milliseconds);
  });

/**
 * Returns a new idempotency key, with which a request can be repeated without being executed twice. Logins and parts of
 * uploads have none, and simulated requests need none.
 */
function idempotencyKey(method, path, body, raw) {
  if (method !== "POST" || raw !== undefined || path === "/auth/session" || body?.dry_run) return null;
  // `randomUUID` needs TLS.
  return Array.from(crypto.getRandomValues(new Uint32Array(4)), (word) => word.toString(16).padStart(8, "0")).join("");
}

/** Returns whether a request was refused because the namespace has used all of its idempotency keys. */
async function isOutOfKeys(response) {
  if (response.status !== 429) return false;
  const body = await response
    .clone()
    .json()
    .catch(() => null);
  return body?.error?.startsWith("Idempotency-Key:") ?? false;
}

async function send(method, path, { body, raw, signal, quiet } = {}) {
  const headers = { Accept: "application/json" };
  let key = idempotencyKey(method, path, body, raw);
  if (key) headers["Idempotency-Key"] = key;
  if (raw !== undefined) headers["Content-Type"] = "application/octet-stream";
  else if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  for (let repeats = 0; ; repeats++) {
    try {
      response = await fetch(url(path), {
        method,
        headers,
        signal,
        credentials: "same-origin",
        cache: "no-store",
        redirect: "error",
        body: raw !== undefined ? raw : body === undefined ? undefined : JSON.stringify(body),
      });
      // The request was not executed, and can be sent without a key.
      if (key && (await isOutOfKeys(response))) {
        key = null;
        delete headers["Idempotency-Key"];
        continue;
      }
      // The first request with this key is still being executed.
      const isExecuting = repeats > 0 && response.status === 409 && response.headers.has("retry-after");
      if (!isExecuting || repeats >= MAX_REPEATS) break;
    } catch (error) {
      if (error.name === "AbortError") throw error;
      if (!key || repeats >= MAX_REPEATS)
        throw new ApiError(0, { error: "the server is unreachable; check that it runs, then try again" });
    }
    await pause(REPEAT_PAUSE * 2 ** repeats);
  }
  if (!response.ok) {
    let parsed = null;
    try {
      parsed = await response.json();
    } catch {
      /* not a JSON document */
    }
    const error = new ApiError(
      response.status,
      parsed,
      response.headers.get("x-request-id"),
      response.headers.get("retry-after"),
    );
    if (response.status === 401 && !quiet) checkSession();
    throw error;
  }
  return response;
}

async function json(method, path, options) {
  const response = await send(method, path, options);
  const text = await response.text();
  return text.trim() === "" ? null : JSON.parse(text);
}

/** Returns a part of a list, and the cursor of the next part; it is `null` at the end. */
export async function getPage(path, limit, cursor) {
  const response = await send("GET", `${path}?limit=${limit}${cursor ? `&cursor=${encodeURIComponent(cursor)}` : ""}`);
  return { records: await response.json(), cursor: response.headers.get("x-next-cursor") };
}

export const get = (path, options) => json("GET", path, options);
export const post = (path, body = {}, options) => json("POST", path, { body, ...options });
export const put = (path, body = {}, options) => json("PUT", path, { body, ...options });
export const del = (path, body, options) => json("DELETE", path, { body, ...options });
/** Sends bytes. */
export const postBytes = (path, raw, options) => json("POST", path, { raw, ...options });
/** Returns the bytes of a response as a Blob. */
export const getBlob = async (path, options) => (await send("GET", path, options)).blob();
/** Returns the text of a response. */
export const getText = async (path, options) => (await send("GET", path, options)).text();
