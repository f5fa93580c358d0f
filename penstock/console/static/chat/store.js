// Conversations in this browser's storage, separate for each key. The server keeps none of them: its own conversations are
// for programs, expire after an hour and hold no stopped answers. Without storage (private windows) they last until reload.

import { session } from "../api.js";

const NAME = "penstock";
const TABLE = "conversations";

function digest(text) {
  let hash = 2166136261;
  for (const letter of text) hash = Math.imul(hash ^ letter.codePointAt(0), 16777619);
  return (hash >>> 0).toString(16);
}

// The public part of a key, never its secret.
export const ownerOf = (key) => (key ? /^psk_[A-Za-z0-9]{8}/.exec(key)?.[0] ?? `key-${digest(key)}` : "open");

function opened() {
  return new Promise((resolve, reject) => {
    const asked = indexedDB.open(NAME, 1);
    asked.onupgradeneeded = () => asked.result.createObjectStore(TABLE, { keyPath: ["owner", "id"] });
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });
}

const done = (asked) =>
  new Promise((resolve, reject) => {
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });

const summary = ({ id, title, updated, created, model, files }) => ({ id, title, updated, created, model, files: files.length });
const contains = (conversation, wanted) => [conversation.title, ...Object.values(conversation.messages).map((one) => one.content)].some((text) => text.toLowerCase().includes(wanted));

export class Store {
  constructor(owner = ownerOf(session.key)) {
    this.owner = owner;
    this.memory = null;
    this.database = opened().catch(() => ((this.memory = new Map()), null));
  }

  async #table(mode) {
    const database = await this.database;
    return database?.transaction(TABLE, mode).objectStore(TABLE);
  }

  async get(id) {
    const table = await this.#table("readonly");
    return table ? done(table.get([this.owner, id])) : this.memory.get(id);
  }

  async put(conversation) {
    const plain = { ...JSON.parse(JSON.stringify(conversation)), owner: this.owner };
    const table = await this.#table("readwrite");
    if (table) await done(table.put(plain));
    else this.memory.set(plain.id, plain);
  }

  async remove(id) {
    const table = await this.#table("readwrite");
    if (table) await done(table.delete([this.owner, id]));
    else this.memory.delete(id);
  }

  // Summaries, the newest first; with `text`, only of conversations whose title or messages contain it.
  async list(text = "") {
    const wanted = text.trim().toLowerCase();
    const found = [];
    const see = (one) => (!wanted || contains(one, wanted)) && found.push(summary(one));
    const table = await this.#table("readonly");
    if (table)
      await new Promise((resolve, reject) => {
        const asked = table.openCursor(IDBKeyRange.bound([this.owner], [this.owner, []]));
        asked.onerror = () => reject(asked.error);
        asked.onsuccess = () => {
          if (!asked.result) return resolve();
          see(asked.result.value);
          asked.result.continue();
        };
      });
    else [...this.memory.values()].forEach(see);
    return found.sort((a, b) => b.updated - a.updated);
  }
}
