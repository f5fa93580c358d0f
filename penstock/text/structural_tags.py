"""Structural tags: free text in which a tag, once begun, has a prescribed content and end.

Two notations that clients send are read: triggers with a list of structures (begin, schema, end), and the nested
`format` of xgrammar. Triggers and tags are text; a control token of a model cannot be one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.engine.grammar.interface import GrammarError
from penstock.text import grammars
from penstock.text.grammars import Grammar, Part, literal

_MOST_DEPTH = 32
_MOST_TAGS = 256


def structural_tag(described: Mapping[str, Any]) -> Grammar:
    """The grammar of a structural tag in either notation."""
    builder = _Builder()
    if described.get("format") is not None:
        start = builder.format(described["format"], 0)
    else:
        structures, triggers = _list(described, "structures"), _list(described, "triggers")
        tags = []
        for at, entry in enumerate(structures):
            where = f"structures[{at}]"
            content = {"type": "json_schema", "json_schema": _mapping(entry, where).get("schema") or {}}
            tags.append({"begin": entry.get("begin"), "content": content, "end": entry.get("end")})
        start = builder.format({"type": "triggered_tags", "triggers": triggers, "tags": tags}, 0)
    return builder.grammar(start)


class _Builder:
    """Collects the rules and parts of one grammar."""

    def __init__(self) -> None:
        self._rules: list[str] = []
        self._parts: list[Part] = []
        self._unenforced: set[str] = set()
        self._count = 0
        self._kinds: dict[str, Callable[[Mapping[str, Any], int], str]] = {
            "const_string": lambda node, depth: _quoted(_text(node, "value")),
            "json_schema": lambda node, depth: self._part(
                grammars.json_schema(_mapping(node["json_schema"], "schema"))
            ),
            "regex": lambda node, depth: self._part(grammars.regex(_text(node, "pattern"))),
            "grammar": lambda node, depth: self._part(grammars.lark(_text(node, "grammar"))),
            "any_text": lambda node, depth: self._anything(),
            "sequence": self._sequence,
            "or": self._either,
            "tag": self._tag,
            "triggered_tags": self._triggered,
            "tags_with_separator": self._separated,
        }

    def grammar(self, start: str) -> Grammar:
        top: Part = {"name": "structural_tag", "lark_grammar": "\n".join([f"start: {start}", *self._rules])}
        return Grammar((top, *self._parts), unenforced=tuple(sorted(self._unenforced)))

    def format(self, described: object, depth: int) -> str:
        """A format as a Lark expression."""
        node = _mapping(described, "format")
        if depth > _MOST_DEPTH:
            raise GrammarError(f"its formats are nested more than {_MOST_DEPTH} deep")
        kind = node.get("type")
        make = self._kinds.get(kind) if isinstance(kind, str) else None
        if make is None:
            raise GrammarError(f"a structural tag has no format {kind!r:.60}; there are {', '.join(self._kinds)}")
        try:
            return make(node, depth)
        except KeyError as missing:
            raise GrammarError(f"the format {kind!r} of a structural tag needs {missing}") from None

    def _sequence(self, node: Mapping[str, Any], depth: int) -> str:
        elements = _list(node, "elements")
        for element in elements[:-1]:
            if _mapping(element, "elements").get("type") in ("any_text", "triggered_tags"):
                raise GrammarError("free text in a sequence must come last, as it has no other end")
        return f"({' '.join(self.format(element, depth + 1) for element in elements)})" if elements else '""'

    def _either(self, node: Mapping[str, Any], depth: int) -> str:
        elements = _list(node, "elements")
        if not elements:
            raise GrammarError("`or` needs elements")
        return f"({' | '.join(self.format(element, depth + 1) for element in elements)})"

    def _tag(self, node: Mapping[str, Any], depth: int) -> str:
        return f"({self._rest_of(node, '', depth)})"

    def _rest_of(self, tag: Mapping[str, Any], trigger: str, depth: int) -> str:
        """A tag without its beginning that is the trigger."""
        begin, content = _text(tag, "begin"), _mapping(tag["content"], "content")
        opening = _quoted(begin[len(trigger) :])
        ends = tag["end"]
        ends = ends if isinstance(ends, list) else [ends]
        if not ends or not all(isinstance(end, str) for end in ends):
            raise GrammarError("the `end` of a tag must be a text or a list of texts")
        if content.get("type") == "any_text":
            if "" in ends:
                return f"{opening} {self._anything()}"
            # A lazy token ends with the first end, so that the end cannot be part of the text.
            names = []
            for end in ends:
                name = self._name("until")
                self._rules.append(f"{name}[lazy]: {self._anything()} {_quoted(end)}")
                names.append(name)
            return f"{opening} ({' | '.join(names)})"
        closing = " | ".join(map(_quoted, ends))
        return f"{opening} {self.format(content, depth + 1)} ({closing})"

    def _triggered(self, node: Mapping[str, Any], depth: int) -> str:
        triggers, tags = _list(node, "triggers"), _list(node, "tags")
        if not triggers or not tags or len(tags) > _MOST_TAGS or len(triggers) > _MOST_TAGS:
            raise GrammarError(f"a structural tag needs triggers and tags, at most {_MOST_TAGS} of each")
        if not all(isinstance(trigger, str) and trigger for trigger in triggers):
            raise GrammarError("a trigger must be a text")
        groups: dict[str, list[Mapping[str, Any]]] = {trigger: [] for trigger in triggers}
        for entry in tags:
            tag = _mapping(entry, "tags")
            begin = _text(tag, "begin")
            matching = [trigger for trigger in groups if begin.startswith(trigger)]
            if not matching:
                raise GrammarError(f"the tag {begin[:60]!r} begins with none of the triggers")
            groups[max(matching, key=len)].append(tag)
        names = []
        for trigger, members in groups.items():
            if not members:
                raise GrammarError(f"no tag begins with the trigger {trigger[:60]!r}")
            opened, name = self._name("opened"), self._name("tag")
            self._rules.append(f"{opened}[lazy]: {self._anything()} {literal(trigger)}")
            rest = " | ".join(self._rest_of(member, trigger, depth) for member in members)
            self._rules.append(f"{name}: {opened} ({rest})")
            names.append(name)
        one = f"({' | '.join(names)})"
        if node.get("stop_after_first"):
            return one if node.get("at_least_one") else f"({one} | {self._anything()})"
        return f"{one}{'+' if node.get('at_least_one') else '*'} {self._anything()}"

    def _separated(self, node: Mapping[str, Any], depth: int) -> str:
        tags = _list(node, "tags")
        if not tags:
            raise GrammarError("`tags_with_separator` needs tags")
        one = f"({' | '.join(self._tag(_mapping(tag, 'tags'), depth) for tag in tags)})"
        more = "" if node.get("stop_after_first") else f"({_quoted(_text(node, 'separator'))} {one})*"
        return f"({one} {more})" if node.get("at_least_one") else f"({one} {more})?"

    def _anything(self) -> str:
        if not any(rule.startswith("ANYTHING:") for rule in self._rules):
            self._rules.append("ANYTHING: /(?s:.*)/")
        return "ANYTHING"

    def _part(self, grammar: Grammar) -> str:
        name = self._name("part")
        self._parts += grammar.named(name).parts
        self._unenforced |= set(grammar.unenforced)
        return f"@{name}"

    def _name(self, kind: str) -> str:
        self._count += 1
        return f"{kind}_{self._count}"


def _quoted(text: str) -> str:
    return literal(text) if text else '""'


def _text(node: Mapping[str, Any], name: str) -> str:
    value = node[name]
    if not isinstance(value, str):
        raise GrammarError(f"`{name}` of a structural tag must be a text")
    return value


def _list(node: Mapping[str, Any], name: str) -> Sequence[Any]:
    value = node.get(name)
    if not isinstance(value, list):
        raise GrammarError(f"`{name}` of a structural tag must be a list")
    return value


def _mapping(value: object, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise GrammarError(f"`{name}` of a structural tag must be an object")
    return value
