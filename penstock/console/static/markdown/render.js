// Markdown to DOM, as a whole or as it arrives. While a text grows, only its last two blocks are made anew: a block is
// final when two others follow it (a paragraph can still become a heading or a table, a list can go on after a blank line).

import { parse } from "./blocks.js";
import { el } from "./dom.js";
import { highlight } from "./highlight.js";
import { inline } from "./inline.js";
import { maths } from "./maths.js";

const UNSETTLED = 2;

function code(block) {
  const bar = el("div", { class: "bar" }, el("span", {}, block.language || "text"), el("button", { type: "button", "data-copy": "", "aria-label": "Copy this block" }, "Copy"));
  return el("div", { class: "codeblock" }, bar, el("pre", { tabindex: "0" }, el("code", {}, highlight(block.text, block.language))));
}

function table(block, context) {
  const row = (cells, tag) => el("tr", {}, block.align.map((align, index) => el(tag, { style: align && `text-align: ${align}` }, inline(cells[index] ?? "", context))));
  return el("div", { class: "grid", tabindex: "0" }, el("table", {}, el("thead", {}, row(block.head, "th")), el("tbody", {}, block.rows.map((cells) => row(cells, "td")))));
}

function list(block, context) {
  const items = block.items.map((item) => {
    const content = item.blocks.flatMap((inner) => (!block.loose && inner.kind === "paragraph" ? inline(inner.text, context) : [render(inner, context)]));
    if (item.task === null) return el("li", {}, content);
    const box = el("input", { type: "checkbox", disabled: "", "aria-label": item.task ? "done" : "to do", ...(item.task ? { checked: "" } : {}) });
    return el("li", { class: "task" }, box, " ", content);
  });
  return block.ordered ? el("ol", { start: block.first === 1 ? null : block.first }, items) : el("ul", {}, items);
}

function render(block, context) {
  switch (block.kind) {
    case "code":
      return code(block);
    case "heading":
      return el(`h${Math.min(block.level + 2, 6)}`, {}, inline(block.text, context));
    case "rule":
      return el("hr");
    case "quote":
      return el("blockquote", {}, block.blocks.map((inner) => render(inner, context)));
    case "list":
      return list(block, context);
    case "table":
      return table(block, context);
    case "maths":
      return el("div", { class: "formula", tabindex: "0" }, maths(block.text, true), block.after ? el("p", {}, inline(block.after, context)) : []);
    default:
      return el("p", {}, inline(block.text, context));
  }
}

const linesOf = (source) => source.replaceAll("\r\n", "\n").replaceAll("\t", "    ").replaceAll("\u0000", "").split("\n");

// Keeps the children of one element equal to the rendering of a text that usually grows.
export class Rendered {
  constructor(element, context = {}) {
    this.element = element;
    this.context = context;
    this.reset();
  }

  reset() {
    this.element.replaceChildren();
    this.source = "";
    this.settled = 0; // characters of the source whose blocks are final
    this.kept = 0; // children that are final
  }

  // A change of the context (sources that were found) concerns every block.
  show(source, context = this.context) {
    if (!source.startsWith(this.source.slice(0, this.settled)) || context !== this.context) {
      this.context = context;
      this.reset();
    }
    this.source = source;
    const lines = linesOf(source.slice(this.settled));
    const blocks = parse(lines);
    while (this.element.childNodes.length > this.kept) this.element.lastChild.remove();
    for (const block of blocks) this.element.append(render(block, this.context));
    const final = blocks.length - UNSETTLED;
    if (final > 0) {
      this.kept += final;
      this.settled = offset(source, this.settled, blocks[final].start);
    }
  }
}

// Where `lines` lines after `from` begin.
function offset(source, from, lines) {
  for (let line = 0; line < lines; line++) from = source.indexOf("\n", from) + 1;
  return from;
}

// The whole text at once.
export function markdown(source, context = {}) {
  const element = el("div");
  new Rendered(element, context).show(source);
  return element;
}
