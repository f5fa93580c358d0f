// Highlights code of the common languages: one regular expression per language finds comments, strings, keywords, numbers
// and names; everything else is plain. The classes are the names of the groups.

import { el } from "./dom.js";

const LONGEST = 200_000; // characters; longer code stays plain
const DOUBLE = String.raw`"(?:[^"\\\n]|\\.)*"?`;
const SINGLE = String.raw`'(?:[^'\\\n]|\\.)*'?`;
const NUMBER = String.raw`\b(?:0[xX][\da-fA-F_]+|0[bB][01_]+|0[oO][0-7_]+|\d[\d_]*(?:\.\d[\d_]*)?(?:[eE][+-]?\d+)?)[a-zA-Z]{0,4}\b`;
const CALL = String.raw`\b[A-Za-z_]\w*(?=\()`;
const SLASHES = String.raw`\/\/[^\n]*|\/\*[\s\S]*?(?:\*\/|$)`;
const HASH = String.raw`#[^\n]*`;
const LITERALS = "true false null nullptr None True False undefined NaN nil self this super";

const words = (text) => `\\b(?:${text.trim().split(/\s+/).join("|")})\\b`;

// Rules in the order in which they are tried at a position.
function grammar(rules, flags = "") {
  return new RegExp(rules.map(([name, pattern]) => `(?<${name}>${pattern})`).join("|"), `gm${flags}`);
}

function ordinary({ comment = SLASHES, strings = [DOUBLE, SINGLE], keywords, types = "", meta = null, more = [] }, flags) {
  return grammar(
    [["comment", comment], ["string", strings.join("|")], ...(meta ? [["meta", meta]] : []), ...more, ["literal", words(LITERALS)], ["keyword", words(keywords)], ...(types ? [["type", words(types)]] : []), ["number", NUMBER], ["call", CALL]],
    flags,
  );
}

const C_WORDS = "if else for while do switch case default break continue return goto struct enum union typedef static const volatile extern inline sizeof";
const CLASSES = "class public private protected new try catch finally throw throws extends implements interface abstract final import package instanceof void";
const C_TYPES = "int long short char float double bool boolean byte unsigned signed size_t string String auto u?int(?:8|16|32|64)_t";

const GRAMMARS = {
  python: ordinary({
    comment: HASH,
    strings: [String.raw`\b[rbfuRBFU]{0,2}(?:"""[\s\S]*?(?:"""|$(?![\s\S]))|'''[\s\S]*?(?:'''|$(?![\s\S])))|"""[\s\S]*?(?:"""|$(?![\s\S]))|'''[\s\S]*?(?:'''|$(?![\s\S]))`, String.raw`\b[rbfuRBFU]{1,2}(?:${DOUBLE}|${SINGLE})`, DOUBLE, SINGLE],
    keywords: "and as assert async await break case class continue def del elif else except finally for from global if import in is lambda match nonlocal not or pass raise return try while with yield",
    types: "int float str bool bytes list dict set tuple object",
    meta: String.raw`^\s*@[\w.]+`,
  }),
  javascript: ordinary({
    strings: [DOUBLE, SINGLE, String.raw`\`(?:[^\`\\]|\\[\s\S])*\`?`],
    keywords: "async await break case catch class const continue debugger default delete do else export extends finally for from function get if import in instanceof let new of return set static switch throw try typeof var void while with yield interface type enum implements private public protected readonly declare namespace abstract as keyof satisfies",
    types: "string number boolean any unknown never object Array Promise Map Set Record",
    meta: String.raw`@\w+`,
  }),
  c: ordinary({ keywords: `${C_WORDS} ${CLASSES} namespace using template typename virtual override constexpr noexcept operator friend explicit delete`, types: C_TYPES, meta: String.raw`^\s*#\s*\w+[^\n]*` }),
  java: ordinary({ keywords: `${C_WORDS} ${CLASSES} namespace using record var get set async await yield override virtual internal readonly sealed is as in out ref fun val when object companion data`, types: `${C_TYPES} Int Long Double Boolean List Map`, meta: String.raw`@\w+` }),
  go: ordinary({ strings: [DOUBLE, SINGLE, "`[^`]*`?"], keywords: "break case chan const continue default defer else fallthrough for func go goto if import interface map package range return select struct switch type var", types: `${C_TYPES} error rune any u?int(?:8|16|32|64)? float(?:32|64)` }),
  rust: ordinary({ strings: [DOUBLE, String.raw`'(?:[^'\\\n]|\\.)'`], keywords: "as async await break const continue crate dyn else enum extern fn for if impl in let loop match mod move mut pub ref return static struct trait type unsafe use where while", types: "[ui](?:8|16|32|64|128|size) f32 f64 bool char str String Vec Option Result Box Self", meta: String.raw`#!?\[[^\]\n]*\]|\b\w+!(?=[([{])` }),
  swift: ordinary({ keywords: "as break case catch class continue default defer do else enum extension fallthrough for func guard if import in init inout is let mutating operator private protocol public repeat return static struct subscript switch throw throws try typealias var where while async await actor some any", types: "Int Double Float String Bool Array Dictionary Void Any", meta: String.raw`@\w+` }),
  php: ordinary({ comment: `${SLASHES}|${HASH}`, keywords: `${C_WORDS} ${CLASSES} function echo foreach as use namespace fn match trait yield elseif endif endforeach array isset unset`, more: [["attribute", String.raw`\$\w+`]] }),
  ruby: ordinary({ comment: HASH, keywords: "alias and begin break case class def defined do else elsif end ensure for if in module next not or redo rescue retry return then undef unless until when while yield require attr_accessor attr_reader puts", more: [["attribute", String.raw`[@$]\w+|:\w+`]] }),
  lua: ordinary({ comment: String.raw`--\[\[[\s\S]*?(?:\]\]|$(?![\s\S]))|--[^\n]*`, keywords: "and break do else elseif end for function goto if in local not or repeat return then until while" }),
  r: ordinary({ comment: HASH, keywords: "if else for while repeat function return in next break library require TRUE FALSE NULL NA" }),
  sql: ordinary({ comment: String.raw`--[^\n]*|\/\*[\s\S]*?(?:\*\/|$)`, strings: [String.raw`'(?:[^']|'')*'?`, DOUBLE], keywords: "select from where and or not in is as on join left right inner outer full cross group by order having limit offset insert into values update set delete create table view index drop alter add column primary key foreign references unique default check distinct union all exists between like case when then else end with over partition asc desc begin commit rollback explain returning if", types: "int integer bigint smallint text varchar char boolean date timestamp numeric decimal real float double precision json jsonb serial uuid blob" }, "i"),
  bash: grammar([["comment", String.raw`(?<![\w$\\{])#[^\n]*`], ["string", String.raw`"(?:[^"\\]|\\[\s\S])*"?|'[^']*'?`], ["attribute", String.raw`\$\{[^}\n]*\}?|\$[\w@#?*!$-]|\$\w+`], ["keyword", String.raw`(?<![\w.\/-])(?:if|then|else|elif|fi|for|while|until|do|done|case|esac|in|function|return|export|local|set|source|echo|exit|cd|sudo)(?![\w.\/-])`], ["meta", String.raw`^\s*(?:\$|>)(?= )`], ["call", String.raw`(?<=^\s*(?:\$ )?|[|;&]\s*)[\w.\/-]+(?=\s|$)`], ["literal", String.raw`(?<=\s)--?[A-Za-z][\w-]*`], ["number", String.raw`(?<![\w.-])\d+(?:\.\d+)?(?![\w.-])`]]),
  json: grammar([["attribute", String.raw`"(?:[^"\\\n]|\\.)*"(?=\s*:)`], ["string", DOUBLE], ["comment", SLASHES], ["literal", "\\b(?:true|false|null)\\b"], ["number", String.raw`-?\b\d+(?:\.\d+)?(?:[eE][+-]?\d+)?\b`]]),
  yaml: grammar([["comment", String.raw`(?:^|(?<=\s))#[^\n]*`], ["attribute", String.raw`(?<=^\s*(?:- +)*)(?:"[^"\n]*"|'[^'\n]*'|[\w./$-][\w ./$-]*)(?=\s*:(?:\s|$))`], ["string", `${DOUBLE}|${SINGLE}`], ["meta", String.raw`^(?:---|\.\.\.)\s*$|[&*][\w-]+(?=\s|$)|![\w!]+`], ["literal", "\\b(?:true|false|null|yes|no|on|off)\\b"], ["number", String.raw`(?<![\w.-])-?\d+(?:\.\d+)?(?![\w.-])`]]),
  toml: grammar([["comment", String.raw`[#;][^\n]*`], ["type", String.raw`^\s*\[[^\]\n]*\]+`], ["attribute", String.raw`^\s*[\w."' -]+(?=\s*=)`], ["string", String.raw`"""[\s\S]*?(?:"""|$(?![\s\S]))|${DOUBLE}|${SINGLE}`], ["literal", "\\b(?:true|false)\\b"], ["number", NUMBER]]),
  xml: grammar([["comment", String.raw`<!--[\s\S]*?(?:-->|$(?![\s\S]))`], ["meta", String.raw`<[!?][^>]*>?|&[#\w]+;`], ["type", String.raw`<\/?[A-Za-z][\w:.-]*|\/?>`], ["attribute", String.raw`[@:\w.-]+(?=\s*=\s*["'])`], ["string", String.raw`(?<==\s*)(?:"[^"]*"?|'[^']*'?)`]]),
  css: grammar([["comment", String.raw`\/\*[\s\S]*?(?:\*\/|$(?![\s\S]))`], ["string", `${DOUBLE}|${SINGLE}`], ["meta", String.raw`@[\w-]+|!important`], ["attribute", String.raw`[\w-]+(?=\s*:[^;{}]*[;}])`], ["number", String.raw`#[\da-fA-F]{3,8}\b|-?\b\d+(?:\.\d+)?(?:%|[a-z]+)?`], ["type", String.raw`[.#][A-Za-z_][\w-]*|::?[\w-]+`], ["call", String.raw`[\w-]+(?=\()`]]),
  diff: grammar([["meta", String.raw`^(?:diff|index|@@|---|\+\+\+)[^\n]*`], ["added", String.raw`^\+[^\n]*`], ["removed", String.raw`^-[^\n]*`]]),
  dockerfile: grammar([["comment", String.raw`^\s*#[^\n]*`], ["keyword", String.raw`^\s*(?:FROM|RUN|CMD|LABEL|EXPOSE|ENV|ADD|COPY|ENTRYPOINT|VOLUME|USER|WORKDIR|ARG|HEALTHCHECK|SHELL)\b`], ["string", `${DOUBLE}|${SINGLE}`], ["attribute", String.raw`\$\{?\w+\}?`]]),
  makefile: grammar([["comment", HASH], ["call", String.raw`^[\w./%-]+(?=\s*:)`], ["attribute", String.raw`\$[({][^)}\n]*[)}]|\$[@<^*?]|^\w+(?=\s*[:?+]?=)`], ["keyword", String.raw`^(?:include|ifeq|ifneq|ifdef|ifndef|else|endif|\.PHONY)\b`]]),
  latex: grammar([["comment", String.raw`(?<!\\)%[^\n]*`], ["keyword", String.raw`\\(?:begin|end|documentclass|usepackage|section|subsection)\b`], ["call", String.raw`\\[A-Za-z]+|\\.`], ["attribute", String.raw`\$+`]]),
};

const NAMES = {
  py: "python", python3: "python", py3: "python", ipython: "python", starlark: "python", gdscript: "python",
  js: "javascript", jsx: "javascript", ts: "javascript", tsx: "javascript", typescript: "javascript", mjs: "javascript", node: "javascript", dart: "javascript",
  "c++": "c", cpp: "c", cc: "c", h: "c", hpp: "c", cuda: "c", objc: "c", glsl: "c", arduino: "c",
  "c#": "java", cs: "java", csharp: "java", kotlin: "java", kt: "java", scala: "java", groovy: "java",
  golang: "go", rs: "rust", rb: "ruby", sh: "bash", shell: "bash", zsh: "bash", console: "bash", terminal: "bash", "shell-session": "bash",
  jsonc: "json", json5: "json", jsonl: "json", yml: "yaml", ini: "toml", cfg: "toml", conf: "toml", properties: "toml",
  html: "xml", svg: "xml", vue: "xml", xhtml: "xml", scss: "css", less: "css", postgresql: "sql", mysql: "sql", sqlite: "sql", psql: "sql",
  patch: "diff", docker: "dockerfile", make: "makefile", tex: "latex",
};

// The text as nodes: strings, and spans with a class.
export function highlight(text, language) {
  const pattern = GRAMMARS[NAMES[language] ?? language];
  if (!pattern || text.length > LONGEST) return [text];
  const nodes = [];
  let done = 0;
  for (const found of text.matchAll(pattern)) {
    if (!found[0]) continue;
    const kind = Object.keys(found.groups).find((name) => found.groups[name] !== undefined);
    if (found.index > done) nodes.push(text.slice(done, found.index));
    nodes.push(el("span", { class: `hl-${kind}` }, found[0]));
    done = found.index + found[0].length;
  }
  nodes.push(text.slice(done));
  return nodes;
}
