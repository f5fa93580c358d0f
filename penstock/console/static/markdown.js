// Renders Markdown as models write it to HTML. Everything is escaped first, so text can never become markup.

const escape = (text) => text.replace(/[&<>"']/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" })[c]);

function inline(text) {
  const kept = [];
  const keep = (html) => `\u0000${kept.push(html) - 1}\u0000`;
  return escape(text.replaceAll("\u0000", ""))
    .replace(/`([^`]+)`/g, (_, code) => keep(`<code>${code}</code>`))
    .replace(/\[([^\]]+)\]\((https?:\/\/[^\s)]+)\)/g, (_, name, url) => keep(`<a href="${url}" rel="noreferrer noopener" target="_blank">${name}</a>`))
    .replace(/\*\*([^*]+)\*\*/g, "<strong>$1</strong>")
    .replace(/(^|[^*\w])\*([^*\s][^*]*)\*/g, "$1<em>$2</em>")
    .replace(/\u0000(\d+)\u0000/g, (_, index) => kept[index]);
}

const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => inline(cell.trim()));

function table(lines) {
  const row = (line, tag) => `<tr>${cells(line).map((cell) => `<${tag}>${cell}</${tag}>`).join("")}</tr>`;
  return `<table>${row(lines[0], "th")}${lines.slice(2).map((line) => row(line, "td")).join("")}</table>`;
}

// An unfinished block is rendered as far as it goes: an open code fence counts as closed at the end.
export function markdown(source) {
  const lines = source.split("\n");
  const html = [];
  let at = 0;
  const take = (matches) => {
    const taken = [];
    while (at < lines.length && matches(lines[at])) taken.push(lines[at++]);
    return taken;
  };
  while (at < lines.length) {
    const line = lines[at];
    const heading = /^(#{1,6})\s+(.*)/.exec(line);
    if (/^\s*```/.test(line)) {
      at++;
      const code = take((next) => !/^\s*```\s*$/.test(next));
      at++;
      html.push(`<pre tabindex="0"><code>${escape(code.join("\n"))}</code></pre>`);
    } else if (heading) {
      at++;
      const level = Math.min(heading[1].length + 2, 5);
      html.push(`<h${level}>${inline(heading[2])}</h${level}>`);
    } else if (/^\s*\|.*\|\s*$/.test(line) && /^[\s|:-]+$/.test(lines[at + 1] || "")) {
      html.push(table(take((next) => /^\s*\|.*\|\s*$/.test(next))));
    } else if (/^\s*[-*+]\s+/.test(line)) {
      const items = take((next) => /^\s*[-*+]\s+/.test(next) || /^\s{2,}\S/.test(next));
      html.push(`<ul>${items.map((item) => `<li>${inline(item.replace(/^\s*[-*+]?\s+/, ""))}</li>`).join("")}</ul>`);
    } else if (/^\s*\d+[.)]\s+/.test(line)) {
      const start = parseInt(line, 10);
      const items = take((next) => /^\s*\d+[.)]\s+/.test(next) || /^\s{2,}\S/.test(next));
      html.push(`<ol start="${start}">${items.map((item) => `<li>${inline(item.replace(/^\s*(\d+[.)])?\s+/, ""))}</li>`).join("")}</ol>`);
    } else if (/^\s*>/.test(line)) {
      html.push(`<blockquote>${take((next) => /^\s*>/.test(next)).map((next) => inline(next.replace(/^\s*>\s?/, ""))).join("<br>")}</blockquote>`);
    } else if (!line.trim()) {
      at++;
    } else {
      const first = lines[at++];
      const rest = take((next) => next.trim() && !/^(\s*```|#{1,6}\s|\s*[-*+]\s|\s*\d+[.)]\s|\s*>|\s*\|)/.test(next));
      html.push(`<p>${[first, ...rest].map(inline).join("<br>")}</p>`);
    }
  }
  return html.join("");
}
