// Markdown inside a block: emphasis, code, links, maths, citations. Returns DOM nodes; every search is bounded, so that
// hostile text costs no more than its length.

import { el } from "./dom.js";
import { maths } from "./maths.js";

const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', nbsp: "\u00a0", apos: "'", "#39": "'", mdash: "—", ndash: "–", hellip: "…", times: "×", rarr: "→" };
const SPECIAL = /[\\`*_~[\]!<$&\nhH]/g;
const DESTINATION = /\(\s*<?((?:[^\s()<>]|\([^\s()<>]*\))*)>?(?:\s+(?:"[^"]*"|'[^']*'))?\s*\)/y;
const ADDRESS = /https?:\/\/[^\s<>"'`]+/iy;
const CITED = /\[(\d{1,3}(?:\s*,\s*\d{1,3})*)\](?!\()/y;
const FOOTNOTE = /\[\^([\w-]{1,32})\]/y;
const ENTITY = /&(#\d{1,7}|#x[\da-f]{1,6}|\w{2,6});/iy;
const TAG = /<(br\s*\/?|https?:\/\/[^\s<>]+)>/iy;
const SPACE = /\s/;
const PUNCTUATION = /[\p{P}\p{S}]/u;

// Only addresses that a browser fetches without running anything.
export function safe(address) {
  try {
    const url = new URL(address);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

const link = (address, children) => el("a", { href: address, target: "_blank", rel: "noreferrer noopener" }, children);

function match(pattern, text, at) {
  pattern.lastIndex = at;
  return pattern.exec(text);
}

// Whether a run of marks can open or close emphasis. Models write **Note:**text, so * only looks at spaces; _ is more
// often part of a name.
function sides(text, at, count, mark) {
  const before = at ? text[at - 1] : " ";
  const after = text[at + count] ?? " ";
  const open = !SPACE.test(after);
  const close = !SPACE.test(before);
  if (mark !== "_") return { open, close };
  return { open: open && (!close || PUNCTUATION.test(before)), close: close && (!open || PUNCTUATION.test(after)) };
}

// Pairs the runs of * _ ~~ among `parts` and returns nodes. A run without a partner stays text.
function emphasise(parts) {
  const root = { children: [] };
  const stack = [root]; // runs that wait for a partner, each with what follows it
  const waiting = { "*": 0, _: 0, "~": 0 };
  const flatten = (from) => {
    for (const frame of stack.splice(from)) {
      waiting[frame.mark]--;
      stack[from - 1].children.push(frame.mark.repeat(frame.count));
      for (const child of frame.children) stack[from - 1].children.push(child);
    }
  };
  for (const part of parts) {
    if (!part.mark) {
      stack[stack.length - 1].children.push(part.node ?? part.text);
      continue;
    }
    let { count } = part;
    while (part.close && count && waiting[part.mark]) {
      let at = stack.length - 1;
      while (stack[at].mark !== part.mark) at--;
      flatten(at + 1);
      const opener = stack[at];
      const width = part.mark === "~" ? 2 : Math.min(opener.count, count, 2);
      const made = el(part.mark === "~" ? "del" : width === 2 ? "strong" : "em", {}, opener.children);
      count -= width;
      opener.count -= width;
      opener.children = [made];
      if (!opener.count) {
        stack.pop();
        waiting[part.mark]--;
        stack[at - 1].children.push(made);
      }
    }
    if (count && part.open) {
      stack.push({ mark: part.mark, count, children: [] });
      waiting[part.mark]++;
    } else if (count) stack[stack.length - 1].children.push(part.mark.repeat(count));
  }
  flatten(1);
  return root.children;
}

export function inline(text, context = {}) {
  const parts = [];
  const open = []; // positions in `parts` of [ that may become a link
  const missing = new Set(); // closing marks that the rest of the text does not have
  let at = 0;
  let plain = 0;
  const flush = (to) => to > plain && parts.push({ text: text.slice(plain, to) });
  const take = (node, end) => {
    flush(at);
    if (node) parts.push({ node });
    at = plain = end;
    return true;
  };
  const find = (close, from) => {
    if (missing.has(close)) return -1;
    const end = text.indexOf(close, from);
    if (end < 0) missing.add(close);
    return end;
  };

  function code() {
    const marks = match(/`+/y, text, at)[0];
    let end = at + marks.length;
    while ((end = find(marks, end)) >= 0) {
      const width = match(/`+/y, text, end)[0].length;
      if (width === marks.length) {
        const body = text.slice(at + marks.length, end).replaceAll("\n", " ");
        return take(el("code", {}, /^ .*[^ ].* $/.test(body) ? body.slice(1, -1) : body), end + width);
      }
      end += width;
    }
    at += marks.length;
    return true;
  }

  function formula() {
    for (const [begin, close, display] of [["$$", "$$", true], ["$", "$", false], ["\\(", "\\)", false], ["\\[", "\\]", true]]) {
      if (!text.startsWith(begin, at)) continue;
      const from = at + begin.length;
      let end = find(close, from);
      if (begin === "$") {
        // A dollar sign that is money: followed by a space, or closed before a digit or after a space.
        if (SPACE.test(text[from] ?? " ")) return false;
        while (end >= 0 && text[end - 1] === "\\") end = find(close, end + 1);
        if (end >= 0 && (SPACE.test(text[end - 1]) || /[\d\w]/.test(text[end + 1] ?? " "))) return false;
      }
      if (end <= from) return false;
      const source = text.slice(from, end);
      if (source.length > 4000 || (begin === "$" && source.includes("\n\n"))) return false;
      return take(maths(source, display), end + close.length);
    }
    return false;
  }

  function closeBracket() {
    const from = open.pop();
    if (from === undefined) return false;
    const found = match(DESTINATION, text, at + 1);
    const address = found && safe(found[1]);
    if (!address) return false;
    flush(at);
    const image = parts[from].image;
    const inner = emphasise(parts.splice(from).slice(1));
    const shown = image ? ["🖼 ", ...(inner.length ? inner : [address])] : inner.length ? inner : [address];
    parts.push({ node: link(address, shown) });
    open.length = 0; // a link has no links inside
    at = plain = DESTINATION.lastIndex;
    return true;
  }

  function address() {
    if (at && /[\w/]/.test(text[at - 1])) return false;
    const found = match(ADDRESS, text, at);
    if (!found) return false;
    let shown = found[0].replace(/[.,;:!?*_~\]]+$/, "");
    while (shown.endsWith(")") && shown.split(")").length > shown.split("(").length) shown = shown.slice(0, -1).replace(/[.,;:!?*_~\]]+$/, "");
    const url = safe(shown);
    return url ? take(link(url, [shown]), at + shown.length) : false;
  }

  const handlers = {
    "\\"() {
      if (text[at + 1] === "(" || text[at + 1] === "[") if (formula()) return true;
      if (text[at + 1] === "\n") return take(el("br"), at + 2);
      if (!/[!-/:-@[-`{-~]/.test(text[at + 1] ?? "")) return false;
      take(null, at + 1);
      at += 1;
      return true;
    },
    "`": code,
    $: formula,
    "\n"() {
      parts.push({ text: text.slice(plain, at).trimEnd() });
      plain = at;
      return take(el("br"), at + 1);
    },
    "["() {
      const cited = context.cite && match(CITED, text, at);
      const numbers = cited ? cited[1].split(",").map(Number) : [];
      if (numbers.length && numbers.every(context.cite)) {
        flush(at);
        for (const n of numbers) parts.push({ node: el("button", { type: "button", class: "cite", "data-cite": n, "aria-label": `Source ${n}` }, String(n)) });
        at = plain = at + cited[0].length;
        return true;
      }
      const note = match(FOOTNOTE, text, at);
      if (note) return take(el("sup", {}, note[1]), at + note[0].length);
      flush(at);
      open.push(parts.push({ text: "[" }) - 1);
      at = plain = at + 1;
      return true;
    },
    "]": closeBracket,
    "!"() {
      if (text[at + 1] !== "[") return false;
      flush(at);
      open.push(parts.push({ text: "![", image: true }) - 1);
      at = plain = at + 2;
      return true;
    },
    "<"() {
      const found = match(TAG, text, at);
      if (!found) return false;
      const url = safe(found[1]);
      return take(/^br/i.test(found[1]) ? el("br") : url ? link(url, [found[1]]) : null, at + found[0].length);
    },
    "&"() {
      const found = match(ENTITY, text, at);
      const name = found?.[1].toLowerCase();
      const value = name && (ENTITIES[name] ?? (name[0] === "#" ? String.fromCodePoint(Math.min(name[1] === "x" ? parseInt(name.slice(2), 16) : Number(name.slice(1)), 0x10ffff) || 0xfffd) : null));
      return value ? take(document.createTextNode(value), at + found[0].length) : false;
    },
    h: address,
    H: address,
  };
  for (const mark of "*_~")
    handlers[mark] = () => {
      let count = 1;
      while (text[at + count] === mark) count++;
      const can = sides(text, at, count, mark);
      if ((mark === "~" && count !== 2) || (!can.open && !can.close)) {
        at += count;
        return true;
      }
      flush(at);
      parts.push({ mark, count, ...can });
      at = plain = at + count;
      return true;
    };

  while (at < text.length) {
    const next = match(SPECIAL, text, at);
    if (!next) break;
    at = next.index;
    if (!handlers[next[0]]()) at++;
  }
  flush(text.length);
  return emphasise(parts);
}
