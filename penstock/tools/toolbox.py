"""The tools of one request: the offered functions, the tool choice, and the call format.

It provides the grammar that enforces the tool choice, and the parser for the model's calls.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.engine.grammar.unique_keys import JsonStart
from penstock.text import grammars
from penstock.text.grammars import Grammar, Part, literal
from penstock.tools.formats import ToolFormat
from penstock.tools.free_text import input_grammar
from penstock.tools.parser import ToolCallParser
from penstock.tools.tag_grammar import TaggedArguments, arguments_in_tags

Use = Literal["auto", "required"]
MAX_CALLS = 32
"""Maximum of calls in one message under a grammar."""
_HEAD = '{"name": '
"""How a call begins."""
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments object; None: no arguments."""
    strict: bool = False
    """Whether arguments must satisfy the schema even if the model is free to call or not."""
    input_syntax: Literal["lark", "regex"] | None = None
    """Of a tool that takes free text: how `input_grammar` is written."""
    input_grammar: str = ""

    def arguments_grammar(self) -> Grammar:
        if self.input_syntax is not None:
            return input_grammar(self.input_syntax, self.input_grammar)
        return grammars.json_schema(self.parameters or _NO_PARAMETERS)

    def described(self) -> dict[str, Any]:
        """The tool in the format of chat templates."""
        function: dict[str, Any] = {"name": self.name, "description": self.description or ""}
        function["parameters"] = self.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The functions offered in one request; a request without tools has no toolbox."""

    tools: tuple[Tool, ...]
    form: ToolFormat
    use: Use = "auto"
    only: tuple[str, ...] | None = None
    """The names of the functions that may be called; None: all."""
    parallel: bool = True
    first_only: bool = False
    """Of several calls in one message the first counts, so that none has to be prevented."""
    opener_id: int | None = None
    """The opener's token, if it is a control token."""
    control: tuple[tuple[str, int], ...] = ()
    """Further texts of the format that are control tokens, and their ids."""
    allowed: tuple[Tool, ...] = field(init=False)
    """The functions that may be called."""

    def __post_init__(self) -> None:
        allowed = tuple(tool for tool in self.tools if self.only is None or tool.name in self.only)
        object.__setattr__(self, "allowed", allowed)

    def parser(self) -> ToolCallParser:
        """What a grammar holds begins with the opener, or the message; nothing else is a call then."""
        schemas = {tool.name: tool.parameters or {} for tool in self.allowed}
        held = () if self.form.bare and self.opener_id is None else (self.form.opener,)
        return ToolCallParser(self.form, schemas.keys(), schemas, openers=held if self.constrained else None)

    @property
    def shown(self) -> frozenset[int]:
        """The control tokens that the parser must see."""
        return frozenset((*(() if self.opener_id is None else (self.opener_id,)), *(id for _, id in self.control)))

    @property
    def constrained(self) -> bool:
        """Whether the request needs a grammar."""
        return (
            self.use == "required"
            or not (self.parallel or self.first_only)
            or any(tool.strict or tool.input_syntax is not None for tool in self.allowed)
        )

    def grammar(self, answer: Grammar | None = None) -> Grammar:
        """The grammar of the message: calls, or, if the model is free to choose, text or an `answer`."""
        arguments = [tool.arguments_grammar() for tool in self.allowed]
        rules: list[str] = []
        parts: list[Part] = []
        tagged = self._in_tags(arguments)
        for index, (tool, schema, tags) in enumerate(zip(self.allowed, arguments, tagged, strict=True)):
            name = f"arguments_{index}"
            rules += [] if tags is None else tags.rules
            parts += schema.named(name).parts if tags is None else tags.parts
            rules.append(f"call_{index}: {self._call(tool, f'@{name}' if tags is None else name)}")
        rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(self.allowed))))
        json_start: JsonStart | None = None
        if any(tags is None and schema.json_start is not None for schema, tags in zip(arguments, tagged, strict=True)):
            json_start = "" if self.use == "required" else self._json_start
        if self.use == "required":
            rules.append(f"start: {self._opening} calls")
        elif answer is not None:
            rules.append(f"start: @answer | {self._opening} calls")
            parts += answer.named("answer").parts
            json_start = json_start if answer.json_start is None else answer.json_start
        else:
            rules += self._free()
        rules.append(f"calls: {self._calls()}")
        top: Part = {"name": "message", "lark_grammar": "\n".join(rules)}
        unenforced = {name for schema in (*arguments, *([answer] if answer else [])) for name in schema.unenforced}
        return Grammar((top, *parts), json_start, tuple(sorted(unenforced)))

    def _in_tags(self, arguments: Sequence[Grammar]) -> list[TaggedArguments | None]:
        """Of each function the arguments in tags, where they have that form. What looks for repeated keys cannot tell
        text in tags from JSON, so all are JSON where one of them needs that."""
        tags = self.form.tags
        if tags is None or not tags.stated:
            return [None] * len(arguments)
        found = [
            None
            if tool.input_syntax is not None
            else arguments_in_tags(tool.parameters or _NO_PARAMETERS, tags, f"arguments_{index}", self._spelled)
            for index, tool in enumerate(self.allowed)
        ]
        if any(one is None and schema.json_start is not None for one, schema in zip(found, arguments, strict=True)):
            return [None] * len(arguments)
        return found

    @property
    def _json_start(self) -> JsonStart:
        """What the calls begin with, where other text may come instead."""
        if self.form.bare:  # with or without an opener
            return "\n" if self.form.name_first else _HEAD
        if self.opener_id is None and (inside := self._inside_opener) is not None:
            return inside[1]
        return self.form.opener if self.opener_id is None else self.opener_id

    @property
    def _inside_opener(self) -> tuple[str, int, str] | None:
        """A control token inside the opener, between the texts on either side; None where there is none."""
        for mark, id in self.control:
            before, found, after = self.form.opener.partition(mark)
            if found:
                return before, id, after
        return None

    @property
    def _states_types(self) -> bool:
        """Whether arguments stand in tags that say which of them are text."""
        return self.form.tags is not None and self.form.tags.stated

    @property
    def _opener(self) -> str:
        return self._spelled(self.form.opener) if self.opener_id is None else f"<[{self.opener_id}]>"

    @property
    def _opening(self) -> str:
        """The text before the first call's JSON; omitted where that is allowed."""
        lead = f"{literal(self.form.lead)}? " if self.form.lead else ""
        return "" if self.form.bare else f"{lead}{self._opener} {_text(self.form.before)}"

    def _free(self) -> list[str]:
        """Any text, optionally followed by calls."""
        before = _text(self.form.before)
        if self.form.bare:
            tagged = "" if self.opener_id is None else f"({self._opener} calls)?"
            if self.form.name_first:
                names = "|".join(re.escape(tool.name) for tool in self.allowed)
                call = rf"\s*(\{{|({names})[ \t]*\n\s*\{{)(?s:.*)"
                text = f"/(?s:.*)/ & ~/{call}/{self._spelled_out if tagged else ''}"
                return [f"TEXT: {text}", "start: calls | TEXT"]
            lists = self.form.listed or self.form.syntax == "python"  # calls in Python would not be held
            first = r"{\[\s" if lists else r"{\s"
            text = f"/[^{first}](?s:.*)/{self._spelled_out if tagged else ''}"
            return [f"ANYTHING: {text}", f"start: calls | ANYTHING? {tagged}"]
        if self.opener_id is not None:
            return [f"ANYTHING: /(?s:.*)/{self._spelled_out}", f"start: ANYTHING ({self._opener} {before} calls)?"]
        if (inside := self._inside_opener) is not None:
            head, id, rest = inside
            return [
                f"ANYTHING: /(?s:.*)/{self._spelled_out}",
                f"UP_TO_MARK: ANYTHING {_text(head)}",
                f"start: ANYTHING | UP_TO_MARK <[{id}]> {_text(rest)} {before} calls",
            ]
        # A lazy lexeme ends with the first opener, so the opener cannot match as text.
        return [
            "ANYTHING: /(?s:.*)/",
            f"opened[lazy]: ANYTHING {self._opener}",
            f"start: ANYTHING | opened {before} calls",
        ]

    @property
    def _spelled_out(self) -> str:
        """Of a terminal: but not an opener that is spelled in other tokens than its control token, which would be read
        as a call all the same."""
        return f" & ~/(?s:.*){re.escape(self.form.opener)}(?s:.*)/"

    def _calls(self) -> str:
        form = self.form
        if form.marks is not None or self._states_types:
            after = f"{_text(form.after)} " if form.marks is None else ""
            return f"call {self._more(f'{_text(form.between)} call')} {after}{self._spelled(form.closer)}"
        end = f"{_text(form.after)} {self._spelled(form.closer)}"
        between = literal(form.between)
        if form.listed:
            return f'"[" call {self._more(f"{between} call")} "]" {"" if form.bare else end}'
        if form.bare:
            return f"call {self._more(f'{between} call')}"
        return f"call {end} {self._more(f'{between} {self._opener} {_text(form.before)} call {end}')}"

    def _spelled(self, text: str) -> str:
        """A text in which control tokens count as such."""
        for mark, id in self.control:
            before, found, after = text.partition(mark)
            if found:
                return f"{self._spelled(before)} <[{id}]> {self._spelled(after)}"
        return _text(text)

    def _more(self, call: str) -> str:
        """Further calls, if several are allowed."""
        return f"({call}){{0,{MAX_CALLS - 1}}}" if self.parallel else ""

    def _call(self, tool: Tool, arguments: str) -> str:
        """A call whose arguments are the rule or part `arguments`."""
        if (marks := self.form.marks) is not None:
            number = "/:[0-9]{1,3}/" if marks.numbered else ""
            before, after = self._spelled(marks.before_name), self._spelled(marks.after_name)
            if marks.id_end:
                before = f"{before} /[a-z0-9]{{10}}/ {self._spelled(marks.id_end)}"
            name = f"{before} {literal(tool.name)} {number} {after}"
            return f"{name} {arguments} {self._spelled(marks.after_arguments)}"
        if self._states_types and (tags := self.form.tags) is not None:
            begin = self._spelled(f'{tags.call}"{tool.name}">\n')
            end = "" if not arguments.startswith("@") else literal("\n")
            return f"{begin} {arguments} {end} {self._spelled(tags.call_end)}"
        if self.form.name_first:
            return f"{literal(tool.name + chr(10))} {arguments}"
        opening = f'{{"{self.form.name_key}": '
        head = f'{opening}{literal(tool.name)}, "{self.form.arguments}": '
        return f"{literal(head)} {arguments} {literal('}')}"


def _text(text: str) -> str:
    """A literal, or nothing for empty text."""
    return literal(text) if text else ""
