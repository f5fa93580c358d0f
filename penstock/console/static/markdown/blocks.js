// Splits Markdown into blocks: plain objects with the lines they cover. An unfinished block counts as finished at the end.

const FENCE = /^\s*(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:\s+(.*?))?(?:\s+#+)?\s*$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}\s*$/;
const UNDERLINE = /^ {0,3}(=+|-+)\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+|$)/;
const DELIMITERS = /^\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;
const DISPLAY = /^\s*(\$\$|\\\[)/;
const DEEPEST = 16; // nested quotes and lists; what is deeper is shown as text

const blank = (line) => !line.trim();
const indent = (line) => line.length - line.trimStart().length;

// The cells of a table's row: separated by | outside of code spans, where \| is a bar.
export function cells(line) {
  const found = [""];
  const body = line.trim().replace(/^\|/, "").replace(/(^|[^\\])\|$/, "$1");
  for (const [part] of body.matchAll(/\\\||`[^`]*`|\||[^|`\\]+|[\s\S]/g)) {
    if (part === "|") found.push("");
    else found[found.length - 1] += part === "\\|" ? "|" : part;
  }
  return found.map((cell) => cell.trim());
}

const isTable = (line, next) => line.includes("|") && next !== undefined && next.includes("-") && DELIMITERS.test(next) && cells(line).length === cells(next).length;

function startsBlock(line) {
  if (FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || DISPLAY.test(line)) return true;
  const item = ITEM.exec(line);
  return Boolean(item && item[1].length < 4 && item[3] && (!/^\d/.test(item[2]) || parseInt(item[2], 10) === 1));
}

export function parse(lines, depth = 0) {
  const blocks = [];
  let at = 0;
  const add = (kind, start, facts) => blocks.push({ kind, start, end: at, ...facts });

  function fence(opened) {
    const start = at++;
    const [, marks, info] = opened;
    const margin = indent(lines[start]);
    const body = [];
    const closes = new RegExp(`^\\s*${marks[0]}{${marks.length},}\\s*$`);
    let closed = false;
    while (at < lines.length && !(closed = closes.test(lines[at]))) {
      const line = lines[at++];
      body.push(line.slice(Math.min(margin, indent(line))));
    }
    if (closed) at++;
    add("code", start, { language: info.trim().split(/[\s,{]/)[0].toLowerCase(), text: body.join("\n") });
  }

  function display(opened) {
    const start = at;
    const close = opened[1] === "$$" ? "$$" : "\\]";
    const first = lines[at++].trimStart().slice(2);
    const body = [];
    let line = first;
    while (true) {
      const end = line.indexOf(close);
      if (end >= 0) {
        body.push(line.slice(0, end));
        const after = line.slice(end + 2).trim();
        return add("maths", start, { text: body.join("\n").trim(), after });
      }
      body.push(line);
      if (at >= lines.length || blank(lines[at])) break;
      line = lines[at++];
    }
    add("paragraph", start, { text: lines.slice(start, at).join("\n") });
  }

  function table() {
    const start = at;
    const head = cells(lines[at]);
    const align = cells(lines[at + 1]).map((cell) => (/^:-*:$/.test(cell) ? "center" : cell.endsWith(":") ? "right" : null));
    at += 2;
    const rows = [];
    while (at < lines.length && !blank(lines[at]) && !startsBlock(lines[at])) rows.push(cells(lines[at++]));
    add("table", start, { head, align, rows });
  }

  function quote() {
    const start = at;
    const inner = [];
    while (at < lines.length && !blank(lines[at])) {
      if (!QUOTE.test(lines[at]) && startsBlock(lines[at])) break;
      inner.push(lines[at++].replace(QUOTE, ""));
    }
    add("quote", start, { blocks: parse(inner, depth + 1) });
  }

  function list(first) {
    const start = at;
    const margin = first[1].length;
    const ordered = /^\d/.test(first[2]);
    const mark = first[2].slice(-1);
    const items = [];
    let loose = false;
    while (at < lines.length) {
      const item = ITEM.exec(lines[at]);
      if (!item || item[1].length >= margin + 2 || item[1].length < margin || item[2].slice(-1) !== mark || RULE.test(lines[at])) break;
      const offset = item[1].length + item[2].length + (item[3].length > 4 ? 1 : Math.max(item[3].length, 1));
      const inner = [lines[at++].slice(offset)];
      // What is indented belongs to the item, and so does text that goes on without indentation.
      while (at < lines.length) {
        const line = lines[at];
        if (blank(line)) {
          let next = at + 1;
          while (next < lines.length && blank(lines[next])) next++;
          if (next >= lines.length || indent(lines[next]) < margin + 2) break;
          inner.push("");
          at++;
        } else if (indent(line) >= margin + 2) {
          inner.push(line.slice(Math.min(indent(line), offset)));
          at++;
        } else if (!ITEM.test(line) && !startsBlock(line) && !blank(inner[inner.length - 1])) {
          inner.push(lines[at++].trimStart());
        } else break;
      }
      const task = /^\[([ xX])\]\s+/.exec(inner[0]);
      if (task) inner[0] = inner[0].slice(task[0].length);
      const parsed = parse(inner, depth + 1);
      loose ||= parsed.some((block, index) => block.kind === "paragraph" && parsed[index + 1]?.kind === "paragraph");
      items.push({ blocks: parsed, task: task ? task[1] !== " " : null });
      let next = at;
      while (next < lines.length && blank(lines[next])) next++;
      const following = next > at && next < lines.length && ITEM.exec(lines[next]);
      if (following && following[1].length < margin + 2 && following[1].length >= margin && following[2].slice(-1) === mark && !RULE.test(lines[next])) {
        loose = true;
        at = next;
      }
    }
    add("list", start, { ordered, first: ordered ? parseInt(first[2], 10) : null, loose, items });
  }

  function indented() {
    const start = at;
    let end = at;
    while (at < lines.length && (blank(lines[at]) || indent(lines[at]) >= 4)) if (!blank(lines[at++])) end = at;
    at = end;
    add("code", start, { language: "", text: lines.slice(start, end).map((line) => line.slice(4)).join("\n") });
  }

  function paragraph() {
    const start = at++;
    while (at < lines.length && !blank(lines[at])) {
      const under = UNDERLINE.exec(lines[at]);
      if (under) {
        at++;
        add("heading", start, { level: under[1][0] === "=" ? 1 : 2, text: lines.slice(start, at - 1).join("\n").trim() });
        return;
      }
      if (startsBlock(lines[at]) || isTable(lines[at], lines[at + 1])) break;
      at++;
    }
    add("paragraph", start, { text: lines.slice(start, at).map((line) => line.trimStart()).join("\n").trimEnd() });
  }

  while (at < lines.length) {
    const line = lines[at];
    let found;
    if (blank(line)) at++;
    else if ((found = FENCE.exec(line))) fence(found);
    else if ((found = HEADING.exec(line))) at++, add("heading", at - 1, { level: found[1].length, text: found[2] || "" });
    else if (RULE.test(line)) at++, add("rule", at - 1, {});
    else if (depth < DEEPEST && QUOTE.test(line)) quote();
    else if (depth < DEEPEST && (found = ITEM.exec(line)) && found[1].length < 4) list(found);
    else if (isTable(line, lines[at + 1])) table();
    else if ((found = DISPLAY.exec(line))) display(found);
    else if (indent(line) >= 4) indented();
    else paragraph();
  }
  return blocks;
}
