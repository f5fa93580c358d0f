// Client of the gateway's API: the same endpoints as any client, with the key of the signed-in user.

import { answered, lost } from "./connection.js";

const STORED = "penstock.key"; // in this tab only, until it is closed

export const session = { key: sessionStorage.getItem(STORED) || "" };

export function signIn(key) {
  session.key = key;
  if (key) sessionStorage.setItem(STORED, key);
  else sessionStorage.removeItem(STORED);
}

export class ApiError extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

// The server cannot be reached; the shell says so, and pages continue when it is back.
export class Unreachable extends Error {
  constructor() {
    super("The server does not answer.");
  }
}

// A page of another origin cannot send this header: it tells a server without keys that the console asks.
const OWN = { "x-penstock-console": "1" };

function headers(more = {}) {
  return session.key ? { ...OWN, authorization: `Bearer ${session.key}`, ...more } : { ...OWN, ...more };
}

async function refused(response) {
  let said = {};
  try {
    said = (await response.json()).error || {};
  } catch {
    // not JSON: for example a proxy's error page
  }
  const wait = response.headers.get("retry-after");
  const text = said.message || `${response.status} ${response.statusText}`;
  return new ApiError(response.status, wait ? `${text} Try again in ${wait} s.` : text, said.code);
}

export async function call(method, path, body, { signal, type, more = {} } = {}) {
  const raw = type !== undefined || body instanceof FormData;
  const typed = body === undefined || body instanceof FormData ? {} : { "content-type": raw ? type : "application/json" };
  let response;
  try {
    response = await fetch(path, { method, signal, headers: headers({ ...typed, ...more }), body: body === undefined || raw ? body : JSON.stringify(body) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    lost();
    throw new Unreachable();
  }
  // What a proxy says in place of a server that is away.
  if ((response.status === 502 || response.status === 504) && !response.headers.get("content-type")?.includes("json")) {
    lost();
    throw new Unreachable();
  }
  answered();
  if (response.status === 401) window.dispatchEvent(new Event("penstock:refused"));
  if (!response.ok) throw await refused(response);
  return response;
}

// A request whose body is large: `onProgress` is told the share that was sent.
export function upload(path, body, { type, onProgress = () => {} } = {}) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("POST", path);
    for (const [name, value] of Object.entries(headers(type ? { "content-type": type } : {}))) request.setRequestHeader(name, value);
    request.upload.onprogress = (event) => event.lengthComputable && onProgress(event.loaded / event.total);
    request.onerror = () => {
      lost();
      reject(new Unreachable());
    };
    request.onload = async () => {
      const response = new Response(request.responseText, { status: request.status, statusText: request.statusText });
      if (request.status === 401) window.dispatchEvent(new Event("penstock:refused"));
      if (response.ok) resolve(await response.json());
      else reject(await refused(response));
    };
    request.send(body);
  });
}

const PATIENCE_MS = 30_000;
export const get = async (path) => (await call("GET", path, undefined, { signal: AbortSignal.timeout(PATIENCE_MS) })).json();
// The entries of a list that comes in pages, at least `most` of them if there are so many, and whether there are more.
export async function list(path, most = Infinity) {
  const entries = [];
  let page = null;
  do {
    const after = page ? { after: page.last_id } : {};
    page = await get(`${path}?${new URLSearchParams({ limit: 100, ...after })}`);
    entries.push(...page.data);
  } while (page.has_more && entries.length < most);
  return { data: entries, more: Boolean(page.has_more) };
}
export const post = async (path, body) => (await call("POST", path, body)).json();
export const patch = async (path, body) => (await call("PATCH", path, body)).json();
export const remove = async (path) => (await call("DELETE", path)).json();
export const text = async (path) => (await call("GET", path, undefined, { signal: AbortSignal.timeout(PATIENCE_MS) })).text();

// Events of a stream as they arrive: {event, id, data, comment} with data parsed, until [DONE]. A stream that ends before it is
// broken, like one whose connection fails.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    const { value, done } = await reader.read();
    if (done) throw new TypeError("the connection was closed before the end");
    rest += value;
    let end;
    while ((end = rest.indexOf("\n\n")) >= 0) {
      const lines = rest.slice(0, end).split("\n");
      rest = rest.slice(end + 2);
      const event = lines.filter((line) => line.startsWith("event:")).map((line) => line.slice(6).trim())[0] || "";
      const id = lines.filter((line) => line.startsWith("id:")).map((line) => line.slice(3).trim())[0] || null;
      const data = lines.filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart()).join("\n");
      if (data === "[DONE]") return;
      const comment = lines.filter((line) => line.startsWith(":")).map((line) => line.slice(1).trim()).join("\n");
      if (data || comment) yield { event, id, data: data ? JSON.parse(data) : {}, comment };
    }
  }
}
