"""Rewrites grammars of free text so that they describe the same text inside a JSON string.

A model writes the free-text input of a tool as a string of its call's JSON, so every literal, character class and
regular expression has to match the quoted form: a line break is `\\n`, a quote `\\"`. What cannot be rewritten is an
error; nothing is ever allowed that the grammar itself does not allow.

A lexer decides where a lexeme ends by looking one byte ahead, and quoted characters begin alike. So a grammar whose
rules do not refer to themselves becomes a single lexeme, within which nothing has to be decided.
"""

from __future__ import annotations

import ast
import json
import re

from penstock.engine.grammar.interface import GrammarError
from penstock.text import grammar_limits as limits

Ranges = list[tuple[int, int]]
"""Sorted code points, without overlaps."""
_LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
_ESCAPED = {0x22: r"\"", 0x5C: r"\\", 0x08: r"\b", 0x09: r"\t", 0x0A: r"\n", 0x0C: r"\f", 0x0D: r"\r"}
"""How JSON writes what it must not contain as it is; other control characters are `\\u00xx`."""
_MOST_CONTROLS = 4
"""Control characters of a class that are allowed: those that are meant, not those that a large class has anyway."""
_DIGITS: Ranges = [(0x30, 0x39)]
_LETTERS: Ranges = [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
_SPACES: Ranges = [(0x09, 0x0D), (0x20, 0x20)]
_CLASSES = {"d": _DIGITS, "w": _LETTERS, "s": _SPACES}
_LETTER_ESCAPES = {"n": 0x0A, "r": 0x0D, "t": 0x09, "f": 0x0C, "v": 0x0B, "a": 0x07, "0": 0x00}
_HEX = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|[xu]\{([0-9a-fA-F]{1,6})\}")
_GROUP = re.compile(r"\(\?(?:P?<\w+>|(?P<flags>s?):)")
_COUNT = re.compile(r"\{\d+(?:,\d*)?\}|\{,\d+\}")
_TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|\#[^\n]*)
    | (?P<low>"(?:[^"\\\n]|\\.)")\s*\.\.\s*(?P<high>"(?:[^"\\\n]|\\.)")
    | (?P<text>"(?:[^"\\\n]|\\[^\n])*")(?P<fold>i)?
    | /(?P<pattern>(?:[^/\\\n]|\\[^\n])+)/(?P<flags>[imslux]*)
    | (?P<imported>%import\s+common\s*\.\s*(?P<name>\w+)(?:\s*->\s*(?P<alias>\w+))?)
    | (?P<directive>%(?!ignore\b)\w+)
    | (?P<alias_of>->\s*\w+)
    | (?P<mark>^[?!](?=\w))
    | (?P<rule>\b[a-z_][a-z0-9_]*\b)""",
    re.VERBOSE | re.MULTILINE,
)
_DEFINITION = re.compile(r"^[?!]?(\w+)(?:\.\d+)?(?:\[[^\]]*\])?\s*:", re.MULTILINE)
_COMMON = {"LF": r"\n", "CR": r"\r", "NEWLINE": r"(?:\r?\n)+", "WS": r"[ \t\f\r\n]+", "WS_INLINE": r"[ \t]+"}
_PLAIN = frozenset(
    ("DIGIT", "HEXDIGIT", "INT", "SIGNED_INT", "DECIMAL", "FLOAT", "SIGNED_FLOAT", "NUMBER", "SIGNED_NUMBER")
    + ("LCASE_LETTER", "UCASE_LETTER", "LETTER", "WORD", "CNAME")
)
"""Imported terminals whose text is the same inside a string."""


def quoted_lark(source: str, start: str) -> str:
    """A Lark grammar, rewritten, with its rule `start` called `start` here."""
    limits.check_source(source)
    limits.check_lark(source)
    single = _is_regular(source)

    def rewritten(token: re.Match[str]) -> str:
        if token["comment"]:
            return ""
        if token["low"]:
            low, high = (ord(_text(token[name])) for name in ("low", "high"))
            return f"/{_class([(low, high)])}/"
        if token["text"]:
            text = quoted_text(_text(token["text"]))
            if token["fold"] and "\\" in text:
                raise GrammarError("a literal that ignores case must not contain quotes or control characters")
            return json.dumps(text) + (token["fold"] or "")
        if token["pattern"]:
            if set(token["flags"]) - {"s", "u"}:
                raise GrammarError(f"the flags `{token['flags']}` are not supported in the input of a tool")
            return f"/{quoted_regex(token['pattern'], dot_all='s' in token['flags'])}/"
        if token["imported"]:
            return _imported(token["name"], token["alias"])
        if token["directive"]:
            raise GrammarError(f"`{token['directive']}` is not supported in the input of a tool")
        if token["alias_of"] or token["mark"]:
            return ""
        if single:
            return f"RULE_{token['rule'].upper()}"
        return start if token["rule"] == "start" else token["rule"]

    rules = _TOKEN.sub(rewritten, source)
    return f"{start}: RULE_START\n{rules}" if single else rules


def _is_regular(source: str) -> bool:
    """Whether no rule refers to itself, and nothing is skipped between lexemes."""
    bare = re.sub(r"->\s*\w+", " ", _TOKEN.sub(lambda token: token["rule"] or token["mark"] or " ", source))
    if "%ignore" in source:
        return False
    starts = list(_DEFINITION.finditer(bare))
    ends = [*(definition.start() for definition in starts[1:]), len(bare)]
    uses = {
        definition[1]: set(re.findall(r"\w+", bare[definition.end() : end]))
        for definition, end in zip(starts, ends, strict=True)
    }
    while settled := [name for name, used in uses.items() if not used & uses.keys()]:
        for name in settled:
            del uses[name]
    return not uses


def _imported(name: str, alias: str | None) -> str:
    if name in _COMMON:
        return f"{alias or name}: /{quoted_regex(_COMMON[name])}/"
    if name not in _PLAIN:
        raise GrammarError(f"`common.{name}` is not supported in the input of a tool")
    return f"%import common.{name}" + (f" -> {alias}" if alias else "")


def _text(literal: str) -> str:
    try:
        value = json.loads(literal, strict=False)
    except ValueError:
        try:
            value = ast.literal_eval(literal)
        except (ValueError, SyntaxError):
            raise GrammarError(f"the literal {literal[:64]} cannot be read") from None
    return str(value)


def quoted_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def quoted_regex(pattern: str, *, dot_all: bool = False) -> str:
    """A regular expression, rewritten. Not supported: look-around, back-references, `\\b`, ignored case."""
    limits.check_pattern(pattern)
    out: list[str] = []
    dots = [dot_all]
    at, end = 0, len(pattern)
    while at < end:
        char = pattern[at]
        if char == "\\":
            ranges, at = _escape(pattern, at + 1)
            out.append(_class(ranges))
        elif char == "[":
            ranges, at = _set(pattern, at + 1)
            out.append(_class(ranges))
        elif char == ".":
            out.append(_class([(0, _LAST)] if dots[-1] else _inverted([(0x0A, 0x0A)])))
            at += 1
        elif char == "(":
            if pattern.startswith("(?", at):
                group = _GROUP.match(pattern, at)
                if group is None:
                    raise GrammarError(f"`{pattern[at : at + 3]}` is not supported in the input of a tool")
                dots.append(dots[-1] or group["flags"] == "s")
                at = group.end()
            else:
                dots.append(dots[-1])
                at += 1
            out.append("(?:")
        elif char == ")":
            if len(dots) == 1:
                raise GrammarError("a regular expression has a `)` too many")
            dots.pop()
            out.append(char)
            at += 1
        elif char == "{" and (count := _COUNT.match(pattern, at)):
            out.append(count[0])
            at = count.end()
        elif char in "|*+?":
            out.append(char)
            at += 1
        elif (char == "^" and at == 0) or (char == "$" and at == end - 1):
            at += 1  # the whole input has to match anyway
        elif char in "^$":
            raise GrammarError(f"`{char}` is not supported inside the input of a tool")
        else:
            out.append(_class([(ord(char), ord(char))]))
            at += 1
    return "".join(out)


def _escape(pattern: str, at: int) -> tuple[Ranges, int]:
    """What the escape sequence after a backslash stands for, and where it ends."""
    char = pattern[at : at + 1]
    if char.lower() in _CLASSES and char:
        ranges = _CLASSES[char.lower()]
        return (ranges if char.islower() else _inverted(ranges)), at + 1
    if code := _HEX.match(pattern, at):
        value = int(code[1] or code[2] or code[3], 16)
        return [(value, value)], code.end()
    if char in _LETTER_ESCAPES and char:
        return [(_LETTER_ESCAPES[char], _LETTER_ESCAPES[char])], at + 1
    if not char or char.isalnum():
        raise GrammarError(f"`\\{char}` is not supported in the input of a tool")
    return [(ord(char), ord(char))], at + 1


def _set(pattern: str, at: int) -> tuple[Ranges, int]:
    """A character class, and where it ends; `at` is after its bracket."""
    negated = pattern.startswith("^", at)
    at += negated
    found: Ranges = []
    first = True
    while at < len(pattern) and (pattern[at] != "]" or first):
        first = False
        if pattern.startswith(("[:", "&&", "--", "~~"), at):
            raise GrammarError(f"`{pattern[at : at + 2]}` is not supported in the input of a tool")
        ranges, at = _member(pattern, at)
        low = ranges[0][0]
        if pattern.startswith("-", at) and pattern[at + 1 : at + 2] not in ("]", ""):
            upper, at = _member(pattern, at + 1)
            if ranges != [(low, low)] or len(upper) != 1 or upper[0][0] < low:
                raise GrammarError("a character class has a range that is none")
            ranges = [(low, upper[0][1])]
        found += ranges
    if at >= len(pattern):
        raise GrammarError("a character class is not closed")
    merged = _merged(found)
    return (_inverted(merged) if negated else merged), at + 1


def _member(pattern: str, at: int) -> tuple[Ranges, int]:
    if pattern[at] == "\\":
        return _escape(pattern, at + 1)
    return [(ord(pattern[at]), ord(pattern[at]))], at + 1


def _merged(ranges: Ranges) -> Ranges:
    merged: Ranges = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return merged


def _inverted(ranges: Ranges) -> Ranges:
    rest: Ranges = []
    at = 0
    for low, high in ranges:
        if low > at:
            rest.append((at, low - 1))
        at = high + 1
    if at <= _LAST:
        rest.append((at, _LAST))
    return rest


def _class(ranges: Ranges) -> str:
    """A regular expression for the quoted form of one character of `ranges`."""
    specials = _merged([(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C), _SURROGATES])
    plain: Ranges = []
    codes: list[int] = []
    for low, high in ranges:
        at = low
        for first, last in specials:
            if last < at or first > high:
                continue
            if first > at:
                plain.append((at, first - 1))
            codes += range(max(first, at), min(last, high, _SURROGATES[0] - 1) + 1)
            at = last + 1
        if at <= high:
            plain.append((at, high))
    forms = [f"\\\\{re.escape(_ESCAPED[code][1])}" for code in codes if code in _ESCAPED]
    controls = [code for code in codes if code not in _ESCAPED]
    if len(controls) <= _MOST_CONTROLS:
        forms += [f"\\\\u{code:04x}" for code in controls]
    if plain:
        forms.insert(0, f"[{''.join(_range(low, high) for low, high in plain)}]")
    if not forms:
        raise GrammarError("a character class is empty")
    return forms[0] if len(forms) == 1 and plain else f"(?:{'|'.join(forms)})"


def _range(low: int, high: int) -> str:
    return f"\\x{{{low:x}}}" if low == high else f"\\x{{{low:x}}}-\\x{{{high:x}}}"
