// A conversation as a tree of messages. An edited message or another answer becomes a sibling, so nothing is lost;
// `head` is the newest message of the branch that is shown.

// Not crypto.randomUUID: browsers offer it over https only.
export const newId = () => [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("");

export const newConversation = (model, settings) => ({ id: newId(), title: "", created: Date.now(), updated: Date.now(), model, settings, messages: {}, head: null, collection: null, files: [] });

// The messages of the branch that ends with `head`, oldest first.
export function branch(conversation, head = conversation.head) {
  const found = [];
  for (let at = conversation.messages[head]; at; at = conversation.messages[at.parent]) found.unshift(at);
  return found;
}

export function add(conversation, message, parent = conversation.head) {
  const made = { id: newId(), parent, created: Date.now(), content: "", ...message };
  conversation.messages[made.id] = made;
  conversation.head = made.id;
  conversation.updated = made.created;
  return conversation.messages[made.id];
}

// Removes a message that has no answers; the branch then ends with its parent, or with `head`.
export function drop(conversation, message, head = message.parent) {
  delete conversation.messages[message.id];
  conversation.head = head;
}

const children = (conversation, parent) =>
  Object.values(conversation.messages)
    .filter((one) => one.parent === parent)
    .sort((a, b) => a.created - b.created);

// The versions of a message, oldest first.
export const versions = (conversation, message) => children(conversation, message.parent);

// Shows the branch through a message: down to its newest end.
export function choose(conversation, message) {
  let at = message;
  for (let next; (next = children(conversation, at.id).pop()); ) at = next;
  conversation.head = at.id;
}

export const titleOf = (text) => {
  const line = text.trim().split("\n")[0];
  return line.length > 60 ? `${line.slice(0, 59).trimEnd()}…` : line;
};

// What the model is sent: without reasoning, and without answers that failed before they began.
export const asMessages = (messages) => messages.filter((one) => one.content.trim()).map(({ role, content }) => ({ role, content }));

export function asMarkdown(conversation) {
  const parts = branch(conversation).map((one) => `## ${one.role === "user" ? "You" : one.facts?.model || "Model"}\n\n${one.content}`);
  return `# ${conversation.title}\n\n${parts.join("\n\n")}\n`;
}
