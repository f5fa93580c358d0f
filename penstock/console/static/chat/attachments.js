// Files of a chat: each conversation has a collection of its own, made with the first file and deleted with the
// conversation. Answers are then given from it, with citations.

import { ApiError, get, post, remove, upload } from "../api.js";

const TYPES = { md: "text/markdown", markdown: "text/markdown", html: "text/html", htm: "text/html", pdf: "application/pdf" };
const PAUSE_MS = 400;

export const ACCEPTED = ".txt,.md,.markdown,.html,.htm,.pdf,.rst,.csv,.json,.yaml,.yml,.log,.py,.js,.ts,.java,.go,.rs,.c,.h,.cpp,.sql,.sh";
export const finished = (file) => ["ready", "duplicate", "failed"].includes(file.status);
export const usable = (file) => ["ready", "duplicate"].includes(file.status);

const typeOf = (name) => TYPES[name.split(".").pop().toLowerCase()] || "text/plain";
const at = (collection, rest = "") => `/v1/collections/${encodeURIComponent(collection)}${rest}`;

async function collectionOf(conversation) {
  conversation.collection ??= (await post("/v1/collections", { name: `chat-${conversation.id}`, description: "Files attached to a chat in the console", metadata: { console: "chat" } })).id;
  return conversation.collection;
}

// Sends a file and follows it until it can be searched; `shown` is the entry of the conversation that says how far it is.
export async function attach(conversation, file, shown) {
  try {
    const collection = await collectionOf(conversation);
    const path = at(collection, `/documents?name=${encodeURIComponent(file.name)}`);
    let document = await upload(path, file, { type: typeOf(file.name), onProgress: (share) => (shown.sent = share) });
    while (true) {
      Object.assign(shown, { id: document.id, status: document.status, error: document.error, chunks: document.chunks, read: document.chunks_done });
      if (finished(shown)) return;
      await new Promise((resolve) => setTimeout(resolve, PAUSE_MS));
      document = await get(at(collection, `/documents/${encodeURIComponent(document.id)}`));
    }
  } catch (error) {
    Object.assign(shown, { status: "failed", error: error.message });
  }
}

async function gone(work) {
  try {
    await work;
  } catch (error) {
    if (!(error instanceof ApiError && error.status === 404)) throw error;
  }
}

export async function detach(conversation, file) {
  if (conversation.collection && file.id) await gone(remove(at(conversation.collection, `/documents/${encodeURIComponent(file.id)}`)));
}

export async function discard(conversation) {
  if (conversation.collection) await gone(remove(at(conversation.collection)));
}

export const chunk = (collection, id) => get(at(collection, `/chunks/${encodeURIComponent(id)}`));
