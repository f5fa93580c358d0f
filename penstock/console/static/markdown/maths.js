// LaTeX to MathML, for the constructs that models use. What is not known is shown as its source.

import { el, math } from "./dom.js";

const table = (text) => Object.fromEntries(text.trim().split(/\s+/).map((pair) => pair.split("=")));

const LETTERS = table(`
  alpha=α beta=β gamma=γ delta=δ epsilon=ϵ varepsilon=ε zeta=ζ eta=η theta=θ vartheta=ϑ iota=ι kappa=κ lambda=λ mu=μ nu=ν xi=ξ
  pi=π varpi=ϖ rho=ρ varrho=ϱ sigma=σ varsigma=ς tau=τ upsilon=υ phi=ϕ varphi=φ chi=χ psi=ψ omega=ω Gamma=Γ Delta=Δ Theta=Θ
  Lambda=Λ Xi=Ξ Pi=Π Sigma=Σ Upsilon=Υ Phi=Φ Psi=Ψ Omega=Ω infty=∞ hbar=ℏ ell=ℓ Re=ℜ Im=ℑ aleph=ℵ partial=∂ nabla=∇ emptyset=∅
  varnothing=∅ degree=° prime=′ angle=∠ triangle=△ top=⊤ bot=⊥ checkmark=✓ dagger=† S=§ imath=ı jmath=ȷ`);
const OPERATORS = table(`
  times=× div=÷ cdot=⋅ pm=± mp=∓ ast=∗ star=⋆ circ=∘ bullet=• oplus=⊕ ominus=⊖ otimes=⊗ odot=⊙ leq=≤ le=≤ geq=≥ ge=≥ neq=≠ ne=≠
  approx=≈ equiv=≡ sim=∼ simeq=≃ cong=≅ propto=∝ ll=≪ gg=≫ prec=≺ succ=≻ in=∈ notin=∉ ni=∋ subset=⊂ subseteq=⊆ supset=⊃ supseteq=⊇
  subsetneq=⊊ cup=∪ cap=∩ setminus=∖ wedge=∧ land=∧ vee=∨ lor=∨ neg=¬ lnot=¬ forall=∀ exists=∃ nexists=∄ to=→ rightarrow=→ leftarrow=←
  gets=← leftrightarrow=↔ Rightarrow=⇒ Leftarrow=⇐ Leftrightarrow=⇔ implies=⟹ impliedby=⟸ iff=⟺ longrightarrow=⟶ longleftarrow=⟵
  Longrightarrow=⟹ mapsto=↦ uparrow=↑ downarrow=↓ hookrightarrow=↪ rightharpoonup=⇀ rightleftharpoons=⇌ ldots=… dots=… cdots=⋯ vdots=⋮ ddots=⋱ mid=∣ parallel=∥ perp=⊥
  therefore=∴ because=∵ models=⊨ vdash=⊢ colon=: lt=< gt=> dotsc=… dotsb=⋯ lVert=‖ rVert=‖ Vert=‖ lvert=| rvert=| vert=| backslash=\\ square=□ blacksquare=■ Box=□ asymp=≍ doteq=≐ triangleq=≜ coloneqq=≔`);
const LARGE = table("sum=∑ prod=∏ coprod=∐ bigcup=⋃ bigcap=⋂ bigoplus=⨁ bigotimes=⨂ bigvee=⋁ bigwedge=⋀");
const INTEGRALS = table("int=∫ iint=∬ iiint=∭ oint=∮");
const FUNCTIONS = new Set("sin cos tan cot sec csc sinh cosh tanh coth arcsin arccos arctan ln log lg exp det dim ker deg gcd arg hom Pr".split(" "));
const LIMITS = new Set("lim max min sup inf limsup liminf argmax argmin".split(" "));
const BRACKETS = table("lfloor=⌊ rfloor=⌋ lceil=⌈ rceil=⌉ langle=⟨ rangle=⟩ lbrace={ rbrace=} lbrack=[ rbrack=] {={ }=} |=‖");
const SPACES = { ",": "0.17em", ":": "0.22em", ";": "0.28em", "!": "-0.17em", " ": "0.25em", quad: "1em", qquad: "2em", enspace: "0.5em", thinspace: "0.17em", "~": "0.25em" };
const ACCENTS = table("hat=^ widehat=^ bar=¯ overline=¯ vec=→ dot=˙ ddot=¨ tilde=~ widetilde=~ acute=´ grave=` check=ˇ breve=˘ overrightarrow=→ mathring=˚");
const UNDER = table("underline=_ underbrace=⏟");
const STYLES = { mathbf: "bold", boldsymbol: "bold-italic", bm: "bold-italic", mathrm: "normal", mathit: "italic", mathsf: "sans", mathtt: "mono", mathbb: "double", mathcal: "script", mathscr: "script", mathfrak: "fraktur" };
const TEXTS = new Set(["text", "textrm", "textit", "textbf", "textsf", "texttt", "mbox", "mathop"]);
const IGNORED = new Set("displaystyle textstyle scriptstyle limits nolimits nonumber notag left. right. big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr allowbreak".split(" "));
const FENCES = { pmatrix: "()", bmatrix: "[]", vmatrix: "||", Vmatrix: "‖‖", Bmatrix: "{}", cases: "{" };
const GRIDS = new Set(["matrix", "smallmatrix", "pmatrix", "bmatrix", "vmatrix", "Vmatrix", "Bmatrix", "cases", "aligned", "align", "align*", "array", "gather", "gather*", "gathered", "equation", "equation*", "split", "alignat", "eqnarray", "eqnarray*"]);
const DEEPEST = 40;

class Unknown extends Error {}

// Without a mathematical font a browser cannot stretch brackets. Then they are written larger, by the height of what
// they enclose (`--lines`). Found out once, with the first formula.
let stretches = null;

function testFont() {
  if (stretches !== null || !document.body) return;
  const bracket = math("mo", { stretchy: "true" }, "(");
  const tall = math("math", { style: "position: absolute; visibility: hidden" }, math("mrow", {}, bracket, math("mspace", { height: "4em", depth: "4em" })));
  document.body.append(tall);
  stretches = bracket.getBoundingClientRect().height > 60;
  tall.remove();
  document.documentElement.classList.toggle("no-math-font", !stretches);
}

function linesOf(node) {
  const rows = node.querySelectorAll("mtr").length;
  return rows > 1 ? rows : node.localName === "mfrac" || node.querySelector("mfrac, munderover, munder") ? 2 : 1;
}

const fence = (text, inner) => math("mo", { stretchy: "true", fence: "true", style: `--lines: ${linesOf(inner)}` }, text);

// Where each style of letter begins in Unicode's block of mathematical letters: capital A, small a, digit 0.
const STARTS = { bold: [0x1d400, 0x1d41a, 0x1d7ce], "bold-italic": [0x1d468, 0x1d482, 0x1d7ce], sans: [0x1d5a0, 0x1d5ba, 0x1d7e2], mono: [0x1d670, 0x1d68a, 0x1d7f6], double: [0x1d538, 0x1d552, 0x1d7d8], script: [0x1d49c, 0x1d4b6, null], fraktur: [0x1d504, 0x1d51e, null] };
const MOVED = { double: table("C=ℂ H=ℍ N=ℕ P=ℙ Q=ℚ R=ℝ Z=ℤ"), script: table("B=ℬ E=ℰ F=ℱ H=ℋ I=ℐ L=ℒ M=ℳ R=ℛ e=ℯ g=ℊ o=ℴ"), fraktur: table("C=ℭ H=ℌ I=ℑ R=ℜ Z=ℨ") };

function styled(letter, style) {
  const moved = MOVED[style]?.[letter];
  if (moved) return moved;
  const starts = STARTS[style];
  const code = letter.codePointAt(0);
  for (const [index, [low, high]] of [[65, 90], [97, 122], [48, 57]].entries())
    if (starts?.[index] && code >= low && code <= high) return String.fromCodePoint(starts[index] + code - low);
  return letter;
}

function tokens(source) {
  return source.replace(/(?<!\\)%[^\n]*/g, "").match(/\\(?:[A-Za-z]+\*?|[\s\S])|\s+|[\s\S]/gu) || [];
}

class Parser {
  constructor(source) {
    this.tokens = tokens(source);
    this.at = 0;
    this.depth = 0;
    this.style = null;
  }

  peek() {
    while (/^\s+$/.test(this.tokens[this.at] ?? "")) this.at++;
    return this.tokens[this.at];
  }

  next() {
    this.peek();
    return this.tokens[this.at++];
  }

  accept(token) {
    if (this.peek() !== token) return false;
    this.at++;
    return true;
  }

  // Everything up to one of `ends`, which is left to be read.
  row(ends = []) {
    if (++this.depth > DEEPEST) throw new Unknown("nested too deeply");
    const nodes = [];
    let token;
    while ((token = this.peek()) !== undefined && !ends.includes(token)) {
      if (token === "}" || token === "\\right" || token === "\\end" || token === "&" || token === "\\\\") throw new Unknown(token);
      const node = this.scripted();
      if (node) nodes.push(node);
    }
    if (token === undefined && ends.length) throw new Unknown("unfinished");
    this.depth--;
    return nodes.length === 1 ? nodes[0] : math("mrow", {}, nodes);
  }

  group() {
    if (this.accept("{")) {
      const inner = this.row(["}"]);
      this.next();
      return inner;
    }
    const token = this.peek();
    if (token === undefined || token === "}") throw new Unknown("missing argument");
    return this.atom();
  }

  // The source of a group, for names and text.
  raw() {
    if (!this.accept("{")) return this.next() ?? "";
    let depth = 1;
    let text = "";
    while (this.at < this.tokens.length) {
      const token = this.tokens[this.at++];
      if (token === "{") depth++;
      if (token === "}" && --depth === 0) return text;
      text += token;
    }
    throw new Unknown("unfinished");
  }

  scripted() {
    const base = this.atom();
    let under = null;
    let over = null;
    while (true) {
      if (this.accept("_")) under = this.group();
      else if (this.accept("^")) over = this.group();
      else if (this.peek() === "'") {
        let primes = "";
        while (this.accept("'")) primes += "′";
        const mark = math("mo", { lspace: "0" }, primes);
        over = over ? math("mrow", {}, mark, over) : mark;
      } else if (this.peek() === "\\limits" || this.peek() === "\\nolimits") this.next();
      else break;
    }
    if (!under && !over) return base;
    const inner = base ?? math("mrow");
    const stacked = inner.getAttribute("data-limits") !== null;
    const [both, low, high] = stacked ? ["munderover", "munder", "mover"] : ["msubsup", "msub", "msup"];
    if (under && over) return math(both, {}, inner, under, over);
    return under ? math(low, {}, inner, under) : math(high, {}, inner, over);
  }

  atom() {
    const token = this.next();
    if (token === undefined) throw new Unknown("unfinished");
    if (token === "{") {
      const inner = this.row(["}"]);
      this.next();
      return inner;
    }
    if (token === "_" || token === "^") {
      this.at--;
      return math("mrow");
    }
    if (token === "~") return math("mspace", { width: SPACES["~"] });
    if (token[0] === "\\") return this.command(token.slice(1));
    if (/\d/.test(token)) {
      let digits = token;
      while (/^[\d.]$/.test(this.tokens[this.at] ?? "") && !(this.tokens[this.at] === "." && !/\d/.test(this.tokens[this.at + 1] ?? ""))) digits += this.tokens[this.at++];
      return math("mn", {}, [...digits].map((digit) => styled(digit, this.style)).join(""));
    }
    if (/\p{L}/u.test(token)) return math("mi", this.style === "normal" ? { mathvariant: "normal" } : {}, styled(token, this.style));
    if (token === "-") return math("mo", {}, "−");
    if (token === "*") return math("mo", {}, "∗");
    if ("()[]|".includes(token)) return math("mo", { stretchy: "false" }, token);
    if ("$#".includes(token)) throw new Unknown(token);
    return math("mo", {}, token);
  }

  delimiter() {
    const token = this.next();
    if (token === undefined) throw new Unknown("unfinished");
    if (token === ".") return "";
    if (token[0] !== "\\") return token === "<" ? "⟨" : token === ">" ? "⟩" : token;
    const name = token.slice(1);
    const found = BRACKETS[name] ?? OPERATORS[name];
    if (!found) throw new Unknown(token);
    return found;
  }

  command(name) {
    if (name in LETTERS) return math("mi", /^[A-Z]/.test(name) ? { mathvariant: "normal" } : {}, LETTERS[name]);
    if (name in OPERATORS) return math("mo", {}, OPERATORS[name]);
    if (name in LARGE) return math("mo", { "data-limits": "", movablelimits: "true", largeop: "true" }, LARGE[name]);
    if (name in INTEGRALS) return math("mo", { largeop: "true" }, INTEGRALS[name]);
    if (name in BRACKETS) return math("mo", { stretchy: "false" }, BRACKETS[name]);
    if (name in SPACES) return math("mspace", { width: SPACES[name] });
    if (FUNCTIONS.has(name)) return math("mi", {}, name);
    if (LIMITS.has(name)) return math("mo", { "data-limits": "", movablelimits: "true", rspace: "0.17em" }, name.replace(/^(lim|arg)(?=.)/, "$1 "));
    if (name in ACCENTS) return math("mover", { accent: "true" }, this.group(), math("mo", { stretchy: /wide|over/.test(name) ? "true" : "false" }, ACCENTS[name]));
    if (name in UNDER) {
      const made = math("munder", {}, this.group(), math("mo", { stretchy: "true" }, UNDER[name]));
      if (name === "underbrace") made.setAttribute("data-limits", "");
      return made;
    }
    if (name in STYLES) {
      const before = this.style;
      this.style = STYLES[name];
      const inner = this.style === "normal" && this.peek() === "{" ? math("mi", { mathvariant: "normal" }, this.plain()) : this.group();
      this.style = before;
      return inner;
    }
    if (TEXTS.has(name)) return math("mtext", name === "textbf" ? { style: "font-weight: bold" } : {}, this.plain());
    if (IGNORED.has(name)) return null;
    switch (name) {
      case "frac":
      case "dfrac":
      case "tfrac":
      case "cfrac":
        return math("mfrac", {}, this.group(), this.group());
      case "binom":
      case "dbinom":
        return math("mrow", {}, math("mo", {}, "("), math("mfrac", { linethickness: "0" }, this.group(), this.group()), math("mo", {}, ")"));
      case "sqrt": {
        if (!this.accept("[")) return math("msqrt", {}, this.group());
        const index = this.row(["]"]);
        this.next();
        return math("mroot", {}, this.group(), index);
      }
      case "left": {
        const marks = [this.delimiter()];
        const parts = [this.row(["\\right", "\\middle"])];
        while (this.accept("\\middle")) marks.push(this.delimiter()), parts.push(this.row(["\\right", "\\middle"]));
        this.next();
        const all = math("mrow", {}, parts);
        const last = fence(this.delimiter(), all);
        marks.forEach((mark, index) => parts[index].before(fence(mark, all)));
        all.append(last);
        return all;
      }
      case "begin":
        return this.environment(this.raw());
      case "operatorname":
      case "operatorname*":
        return math("mo", { "data-limits": name.endsWith("*") ? "" : null, rspace: "0.17em", lspace: "0.17em" }, this.plain());
      case "overset":
      case "stackrel": {
        const over = this.group();
        return math("mover", {}, this.group(), over);
      }
      case "underset": {
        const under = this.group();
        return math("munder", {}, this.group(), under);
      }
      case "overbrace":
        return math("mover", { "data-limits": "" }, this.group(), math("mo", { stretchy: "true" }, "⏞"));
      case "xrightarrow":
        return math("mover", {}, math("mo", { stretchy: "true" }, "→"), this.group());
      case "boxed":
      case "fbox":
        return math("mrow", { class: "boxed" }, this.group());
      case "not": {
        const node = this.atom();
        if (node) node.append("\u0338");
        return node;
      }
      case "pmod":
        return math("mrow", {}, math("mspace", { width: "0.5em" }), math("mo", {}, "("), math("mi", {}, "mod"), math("mspace", { width: "0.3em" }), this.group(), math("mo", {}, ")"));
      case "bmod":
      case "mod":
        return math("mo", { lspace: "0.22em", rspace: "0.22em" }, "mod");
      case "tag":
        return math("mtext", {}, `  (${this.raw()})`);
      case "label":
      case "color":
        this.raw();
        return null;
      case "phantom":
        return math("mphantom", {}, this.group());
      case "cancel":
        return math("mrow", { class: "cancelled" }, this.group());
      case "#":
      case "%":
      case "$":
      case "&":
      case "_":
        return math("mi", {}, name);
      default:
        throw new Unknown(`\\${name}`);
    }
  }

  plain() {
    return this.raw().replace(/\\([ ,;:])/g, " ").replace(/\\([%$#&_{}])/g, "$1").replaceAll("~", " ").replaceAll(" ", "\u00a0");
  }

  environment(name) {
    if (!GRIDS.has(name)) throw new Unknown(name);
    const columns = ["array", "alignat"].includes(name) ? this.raw() : "";
    const align = name === "cases" ? "left" : /align|split|eqnarray/.test(name) ? "right left" : columns.replace(/[^lcr]/g, "").split("").map((one) => ({ l: "left", c: "center", r: "right" })[one]).join(" ");
    const rows = [[]];
    while (true) {
      while (this.peek() === "\\hline") this.next();
      rows[rows.length - 1].push(this.row(["&", "\\\\", "\\end"]));
      const token = this.next();
      if (token === "&") continue;
      if (token === "\\end") {
        if (this.raw() !== name) throw new Unknown("\\end");
        break;
      }
      if (this.accept("[")) while (this.next() !== "]") if (this.at >= this.tokens.length) throw new Unknown("unfinished");
      rows.push([]);
    }
    const sides = align.split(" ");
    const grid = math(
      "mtable",
      { class: /align|split|gather|equation|eqnarray|cases/.test(name) ? "spread" : null, displaystyle: /align|split|gather|equation/.test(name) ? "true" : null },
      rows
        .filter((cells) => cells.some((cell) => cell.childNodes.length))
        .map((cells) => math("mtr", {}, cells.map((cell, index) => math("mtd", sides[0] ? { style: `text-align: ${sides[index % sides.length]}` } : {}, cell)))),
    );
    const [open, close] = FENCES[name] ?? [];
    return open ? math("mrow", {}, fence(open, grid), grid, close ? fence(close, grid) : []) : grid;
  }
}

// A formula as MathML; its source where something in it is not known.
export function maths(source, display = false) {
  testFont();
  try {
    const parser = new Parser(source.trim());
    const row = parser.row();
    return math("math", { display: display ? "block" : "inline", "aria-label": source.trim() }, row);
  } catch (error) {
    if (!(error instanceof Unknown)) throw error;
    return el("code", { class: display ? "latex display" : "latex" }, source.trim());
  }
}
