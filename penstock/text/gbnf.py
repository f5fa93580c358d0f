"""GBNF, the grammar notation of llama.cpp (and the EBNF of xgrammar), as a Lark grammar.

GBNF has no tokens; Lark has. A rule that refers to no rule around itself is a regular expression and becomes one token,
and so do neighbours in a sequence: a grammar without recursion becomes a single token and means exactly the same. In
one with recursion, tokens take as much text as they can. White space is no part of tokens there, as often the same may
follow it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from penstock.engine.grammar.interface import GrammarError

MOST_CHARACTERS = 64 * 1024
_MOST_DEPTH = 64
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_RULE = re.compile(r"([A-Za-z0-9_-]+)[ \t]*::=")
_COUNT = re.compile(r"\{\s*(\d{1,6})?\s*(,)?\s*(\d{1,6})?\s*\}")
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_PLAIN = {"n": "\n", "r": "\r", "t": "\t", "0": "\0"}
_BLANK = re.compile(r"\\x\{(?:20|9|A|B|C|D)\}")


def is_gbnf(source: str) -> bool:
    """Whether a grammar is in this notation rather than Lark's."""
    return "::=" in source


@dataclass(frozen=True, slots=True)
class _Characters:
    pattern: str


@dataclass(frozen=True, slots=True)
class _Text:
    text: str


@dataclass(frozen=True, slots=True)
class _Ref:
    name: str


@dataclass(frozen=True, slots=True)
class _Sequence:
    items: tuple[_Node, ...]


@dataclass(frozen=True, slots=True)
class _Either:
    branches: tuple[_Node, ...]


@dataclass(frozen=True, slots=True)
class _Repeat:
    item: _Node
    least: int
    most: int | None


_Node = _Characters | _Text | _Ref | _Sequence | _Either | _Repeat
_NOTHING = _Sequence(())


def gbnf_to_lark(source: str) -> str:
    """The same language as a Lark grammar; raises `GrammarError`."""
    if len(source) > MOST_CHARACTERS:
        raise GrammarError(f"it has {len(source)} characters; at most {MOST_CHARACTERS} of GBNF are accepted")
    rules = _Reader(source).rules()
    if "root" not in rules:
        raise GrammarError("it has no rule `root`")
    return _Writer(rules).grammar()


class _Reader:
    """Reads the rules of a grammar."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._at = 0

    def rules(self) -> dict[str, _Node]:
        found: dict[str, _Node] = {}
        self._space(lines=True)
        while self._at < len(self._source):
            head = _RULE.match(self._source, self._at)
            if head is None:
                raise self._error("a rule must begin with its name and `::=`")
            if head[1] in found:
                raise self._error(f"there are two rules `{head[1]}`")
            self._at = head.end()
            self._space(lines=True)
            found[head[1]] = self._either(0)
            self._space(lines=True)
        return found

    def _either(self, depth: int) -> _Node:
        if depth > _MOST_DEPTH:
            raise GrammarError(f"its groups are nested more than {_MOST_DEPTH} deep")
        branches = [self._sequence(depth)]
        while self._peek("|"):
            self._at += 1
            self._space(lines=True)
            branches.append(self._sequence(depth))
        return branches[0] if len(branches) == 1 else _Either(tuple(branches))

    def _sequence(self, depth: int) -> _Node:
        items: list[_Node] = []
        while (item := self._item(depth)) is not None:
            self._space(lines=depth > 0)
            items.append(self._repeated(item))
            self._space(lines=depth > 0)
            if depth == 0 and self._continues():
                self._space(lines=True)
        return items[0] if len(items) == 1 else _Sequence(tuple(items))

    def _continues(self) -> bool:
        """Whether the next line goes on with `|`, as xgrammar's EBNF may."""
        line = re.compile(r"\s*\|").match(self._source, self._at)
        return line is not None

    def _item(self, depth: int) -> _Node | None:
        source, at = self._source, self._at
        letter = source[at : at + 1]
        if letter == '"':
            return self._literal()
        if letter == "[":
            return self._class()
        if letter == ".":
            self._at += 1
            return _Characters("(?s:.)")
        if letter == "(":
            self._at += 1
            self._space(lines=True)
            inner = self._either(depth + 1)
            if not self._peek(")"):
                raise self._error("a group is not closed")
            self._at += 1
            return inner
        if letter in ("<", "!"):
            raise self._error("tokens in a grammar (`<...>`) are not supported")
        name = _NAME.match(source, at)
        if name is None or _RULE.match(source, at):
            return None
        self._at = name.end()
        return _Ref(name[0])

    def _repeated(self, item: _Node) -> _Node:
        while True:
            letter = self._source[self._at : self._at + 1]
            if letter in ("*", "+", "?") and letter:
                self._at += 1
                item = _Repeat(item, int(letter == "+"), 1 if letter == "?" else None)
            elif letter == "{":
                count = _COUNT.match(self._source, self._at)
                if count is None or not (count[1] or count[3]):
                    raise self._error("a count must look like {2}, {2,} or {2,5}")
                self._at = count.end()
                least = int(count[1] or 0)
                most = least if not count[2] else None if count[3] is None else int(count[3])
                if most is not None and most < least:
                    raise self._error("a count has its limits the wrong way round")
                item = _Repeat(item, least, most)
            else:
                return item

    def _literal(self) -> _Node:
        self._at += 1
        letters = []
        while not self._peek('"'):
            letters.append(self._letter("a text is not closed"))
        self._at += 1
        return _Text("".join(letters)) if letters else _NOTHING

    def _class(self) -> _Node:
        self._at += 1
        inverted = self._peek("^")
        self._at += inverted
        parts: list[str] = []
        while not self._peek("]"):
            low = self._letter("a character class is not closed")
            if self._source.startswith("-", self._at) and self._source[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                high = self._letter("a character class is not closed")
                if high < low:
                    raise self._error("a range of characters is the wrong way round")
                parts.append(f"{_hex(low)}-{_hex(high)}")
            else:
                parts.append(_hex(low))
        self._at += 1
        if not parts:
            if inverted:
                return _Characters("(?s:.)")
            raise self._error("a character class is empty")
        return _Characters(f"[{'^' if inverted else ''}{''.join(parts)}]")

    def _letter(self, unclosed: str) -> str:
        letter = self._source[self._at : self._at + 1]
        if letter in ("", "\n", "\r"):
            raise self._error(unclosed)
        if letter != "\\":
            self._at += 1
            return letter
        escape = _ESCAPE.match(self._source, self._at)
        if escape is None:
            raise self._error("an escape is not complete")
        self._at = escape.end()
        code = escape[1] or escape[2] or escape[3]
        if code is None:
            return _PLAIN.get(escape[4], escape[4])
        value = int(code, 16)
        if value > 0x10FFFF or 0xD800 <= value <= 0xDFFF:
            raise self._error("an escape is no character")
        return chr(value)

    def _peek(self, letter: str) -> bool:
        return self._source.startswith(letter, self._at)

    def _space(self, *, lines: bool) -> None:
        skip = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*" if lines else r"[ \t]*(?:#[^\n]*)?")
        found = skip.match(self._source, self._at)
        assert found is not None
        self._at = found.end()

    def _error(self, what: str) -> GrammarError:
        line = self._source.count("\n", 0, self._at) + 1
        return GrammarError(f"{what} (line {line})")


class _Writer:
    """Writes rules as Lark."""

    def __init__(self, rules: dict[str, _Node]) -> None:
        self._rules = rules
        self._loose = False
        """Whether white space stays outside tokens."""
        self._regular = self._without_recursion()
        if "root" not in self._regular:
            self._loose = True
            self._regular = self._without_recursion()
        self._numbers = {name: number for number, name in enumerate(rules)}
        self._empty = self._nullable_rules()
        self._tokens: list[str] = []

    def grammar(self) -> str:
        lines = []
        for name, node in self._rules.items():
            if name in self._regular:
                lines.append(f"T{self._numbers[name]}: {self._token(node)}")
            else:
                lines.append(f"r{self._numbers[name]}: {self._rule(node)}")
        return "\n".join([f"start: {self._rule(_Ref('root'))}", *lines, *self._tokens])

    def _without_recursion(self) -> set[str]:
        """Rules from which no rule is reached that leads back to itself."""
        refs = {name: _refs(node) for name, node in self._rules.items()}
        for name, found in refs.items():
            for ref in found:
                if ref not in refs:
                    raise GrammarError(f"the rule `{name}` refers to `{ref}`, which does not exist")
        regular: set[str] = set()
        changed = True
        while changed:
            more = {
                name
                for name, found in refs.items()
                if name not in regular and found <= regular and not (self._loose and _has_blanks(self._rules[name]))
            }
            regular |= more
            changed = bool(more)
        return regular

    def _nullable_rules(self) -> set[str]:
        empty: set[str] = set()
        changed = True
        while changed:
            more = {name for name, node in self._rules.items() if name not in empty and _nullable(node, empty)}
            empty |= more
            changed = bool(more)
        return empty

    def _is_regular(self, node: _Node) -> bool:
        return _refs(node) <= self._regular and not (self._loose and _has_blanks(node))

    def _token(self, node: _Node) -> str:
        """A node inside a token."""
        match node:
            case _Characters(pattern):
                return f"/{pattern}/"
            case _Text(text):
                return f"/{''.join(map(_hex, text))}/"
            case _Ref(name):
                return f"T{self._numbers[name]}"
            case _Sequence(items):
                return f"({' '.join(map(self._token, items))})" if items else '""'
            case _Either(branches):
                return f"({' | '.join(map(self._token, branches))})"
            case _Repeat(item, least, most):
                return f"({self._token(item)}){_count(least, most)}"

    def _rule(self, node: _Node) -> str:
        """A node inside a rule. What is regular becomes a token of its own."""
        if node != _NOTHING and self._is_regular(node):
            return self._own_token(node)
        match node:
            case _Ref(name):
                return f"r{self._numbers[name]}"
            case _Sequence(items):
                return " ".join(self._rule(part) for part in self._joined(items)) or '""'
            case _Either(branches):
                return f"({' | '.join(map(self._rule, branches))})"
            case _Repeat(item, least, most):
                inner = self._token(item) if isinstance(item, _Characters) else self._rule(item)
                return f"({inner}){_count(least, most)}"
        raise AssertionError("characters are regular")

    def _joined(self, items: tuple[_Node, ...]) -> list[_Node]:
        """Neighbours that are regular, as one."""
        joined: list[_Node] = []
        run: list[_Node] = []
        for item in items:
            if self._is_regular(item):
                run.append(item)
                continue
            if run:
                joined.append(_Sequence(tuple(run)))
            run = []
            joined.append(item)
        return [*joined, _Sequence(tuple(run))] if run else joined

    def _own_token(self, node: _Node) -> str:
        name = f"N{len(self._tokens)}"
        self._tokens.append(f"{name}: {self._token(node)}")
        return f"{name}?" if _nullable(node, self._empty) else name


def _refs(node: _Node) -> set[str]:
    match node:
        case _Ref(name):
            return {name}
        case _Sequence(parts) | _Either(parts):
            return set().union(*map(_refs, parts)) if parts else set()
        case _Repeat(item):
            return _refs(item)
    return set()


def _has_blanks(node: _Node) -> bool:
    """Whether white space may repeat in it."""
    match node:
        case _Sequence(parts) | _Either(parts):
            return any(map(_has_blanks, parts))
        case _Repeat(_Characters(pattern)):
            return pattern.startswith("[") and not _BLANK.sub("", pattern[1:-1])
        case _Repeat(item):
            return _has_blanks(item)
    return False


def _nullable(node: _Node, empty: set[str]) -> bool:
    match node:
        case _Ref(name):
            return name in empty
        case _Sequence(items):
            return all(_nullable(item, empty) for item in items)
        case _Either(branches):
            return any(_nullable(branch, empty) for branch in branches)
        case _Repeat(item, least, _):
            return least == 0 or _nullable(item, empty)
    return False


def _count(least: int, most: int | None) -> str:
    if most is None and least < 2:
        return "+" if least else "*"
    if (least, most) == (0, 1):
        return "?"
    return f"{{{least},{'' if most is None else most}}}"


def _hex(text: str) -> str:
    """A character in a regular expression."""
    return text if text.isascii() and text.isalnum() else f"\\x{{{ord(text):X}}}"
