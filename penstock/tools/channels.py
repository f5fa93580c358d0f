"""Reads answers in the format of gpt-oss (harmony): messages with headers that name a channel and, for calls, a
recipient.

    <|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>commentary to=functions.f
    <|constrain|>json<|message|>{"a": 1}<|call|>

`analysis` is the thought; `final`, and `commentary` that is addressed to nobody, are the answer; what is addressed to
an offered function calls it. Control tokens count by their ids alone: text that spells them is text. Messages to
anybody else, such as tools that only the model's makers have, are part of the thought.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from penstock.text.grammars import Grammar, literal
from penstock.text.text_model import TextModel
from penstock.tools.events import CallArguments, CallBegin, CallEnd, Event
from penstock.tools.toolbox import Toolbox

_CONTROL = ("start", "channel", "message", "end", "call", "return", "constrain")
FUNCTIONS = "functions."
"""The namespace of the functions of a request."""
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_TAIL = 64
"""Tokens at the end of a prompt that may hold the header of the message to continue."""


class ChannelTokens:
    """The control tokens of a vocabulary."""

    __slots__ = ("ids", "names")

    def __init__(self, text: TextModel) -> None:
        found = {name: text.token_id(f"<|{name}|>") for name in _CONTROL}
        self.ids = {name: id for name, id in found.items() if id is not None}
        self.names = {id: name for name, id in self.ids.items()}

    @property
    def complete(self) -> bool:
        """Whether the vocabulary has what the format needs."""
        return all(name in self.ids for name in ("start", "channel", "message", "end"))

    def stops(self, ends: Collection[int]) -> tuple[int, ...]:
        """The tokens that end an answer, given the ends of the model: the end of one message is none of them."""
        more = (self.ids[name] for name in ("return", "call") if name in self.ids)
        return tuple(id for id in dict.fromkeys((*ends, *more)) if id != self.ids.get("end"))


class ChannelSplitter:
    """For one answer; used like `ThoughtSplitter`, and reports calls besides."""

    __slots__ = (
        *("_begun", "_header", "_heading", "_kind", "_names", "_prompted", "_spoken"),
        *("calls", "events", "marks", "reasoning_tokens"),
    )

    def __init__(self, tokens: ChannelTokens, names: Collection[str] = ()) -> None:
        """`names`: the offered functions."""
        self.marks = tokens.names
        self._names = names
        self._header: list[str] | None = []
        """Parts of the header being read; None: inside a message."""
        self._prompted = 0
        """How many parts of it are in the prompt."""
        self._heading = 0
        """Tokens of that header."""
        self._kind = "answer"
        """What the message is: a thought, the answer, or a call."""
        self._begun = False
        """Whether the message has text yet."""
        self._spoken = {"thought": False, "answer": False}
        """Whether there was such a message before, so that a new one begins a paragraph."""
        self.calls = 0
        self.events: list[Event] = []
        """Of calls, to be taken by the reader."""
        self.reasoning_tokens = 0

    def prepare(self, text: TextModel, prompt: list[int]) -> None:
        """Read the header, and perhaps the beginning of a message, that a prompt ends with."""
        tail = prompt[-_TAIL:]
        start = next((at for at in range(len(tail) - 1, -1, -1) if self.marks.get(tail[at]) == "start"), None)
        if start is None:
            return
        for id in tail[start:]:
            if id in self.marks:
                self.mark(id, "")
            elif self._header is not None:
                self.push(text.token_text(id))
        self.calls = self.reasoning_tokens = self._heading = 0
        self.events.clear()
        self._prompted = len(self._header or ())

    @property
    def thinking(self) -> bool:
        return self._header is None and self._kind == "thought"

    @property
    def answering(self) -> bool:
        return self._header is None and self._kind == "answer"

    @property
    def may_answer(self) -> bool:
        return self.answering

    @property
    def dropped(self) -> bool:
        return False

    @property
    def pending(self) -> int:
        return 0

    def expects(self, id: int) -> bool:
        return id in self.marks

    @property
    def done(self) -> bool:
        return False

    def mark(self, id: int, raw: str) -> tuple[str, str]:
        """A control token, behind `raw`, which completes what came before."""
        shown = self._text(raw) if raw else ("", "")
        name, inside = self.marks[id], self._header is None
        if name == "message":
            self._open()
            if self.thinking:
                self.reasoning_tokens += self._heading + 1
            self._heading = 0
            return shown
        if inside:
            if name == "constrain":
                return shown
            self._close()
            if name in ("start", "channel"):
                self._heading = 1
            else:
                self.reasoning_tokens += self._kind == "thought"
        else:
            self._heading += 1
        if name in ("channel", "constrain") and self._header is not None:
            self._header.append(f" <|{name}|>")
        return shown

    def push(self, raw: str) -> tuple[str, str]:
        if self._header is not None:
            self._heading += 1
        elif self._kind == "thought":
            self.reasoning_tokens += 1
        return self._text(raw) if raw else ("", "")

    def flush(self, raw: str = "") -> tuple[str, str]:
        """At the end; `raw` completes what came before. Text in a header that never ended is the answer of a model that
        writes none."""
        shown = self._text(raw) if raw else ("", "")
        header, self._header = self._header, None
        if self._kind == "call" and header is None:
            self.events.append(CallEnd(self.calls - 1))
        if header and " <|channel|>" not in header and not any(self._spoken.values()) and not self.calls:
            return "", "".join(header[self._prompted :]).strip()
        return shown

    def _text(self, raw: str) -> tuple[str, str]:
        if self._header is not None:
            self._header.append(raw)
            return "", ""
        if self._kind == "call":
            self.events.append(CallArguments(self.calls - 1, raw))
            return "", ""
        if not self._begun:
            self._begun = True
            if self._spoken[self._kind]:
                raw = f"\n\n{raw}"
            self._spoken[self._kind] = True
        return (raw, "") if self._kind == "thought" else ("", raw)

    def _open(self) -> None:
        """A header has ended: which kind of message is it?"""
        header, self._header = "".join(self._header or ()), None
        self._begun = False
        channel = header.partition("<|channel|>")[2].strip()
        recipient = _RECIPIENT.search(header)
        to = "" if recipient is None else recipient[1]
        name = to.removeprefix(FUNCTIONS)
        if to and name in self._names:
            self._kind = "call"
            self.events.append(CallBegin(self.calls, name))
            self.calls += 1
        elif to or channel.startswith("analysis"):
            self._kind = "thought"
        else:
            self._kind = "answer"

    def _close(self) -> None:
        if self._kind == "call":
            self.events.append(CallEnd(self.calls - 1))
        self._header = []


def channel_grammar(tokens: ChannelTokens, toolbox: Toolbox | None, answer: Grammar | None) -> Grammar:
    """The grammar of the message behind the thought, from its channel on: calls, an `answer`, or where neither is
    prescribed any text."""
    ids = tokens.ids
    channel, message = f"<[{ids['channel']}]>", f"<[{ids['message']}]>"
    constrain = f'" " <[{ids["constrain"]}]> "json"' if "constrain" in ids else ""
    allowed = () if toolbox is None else toolbox.allowed
    arguments = [tool.arguments_grammar() for tool in allowed]
    rules, kinds = [], []
    for index, tool in enumerate(allowed):
        rules.append(f"call_{index}: {literal(tool.name)} {constrain} {message} @arguments_{index}")
    if allowed:
        calls = " | ".join(f"call_{index}" for index in range(len(allowed)))
        rules.append(f"call: {calls}")
        kinds.append(f"{literal(f'commentary to={FUNCTIONS}')} call")
    free = answer is None and (toolbox is None or toolbox.use != "required")
    if free:
        rules.append("ANYTHING: /(?s:.*)/")
        kinds.append(f'"final" {message} ANYTHING')
    elif answer is not None:
        kinds.append(f'"final" {message} @answer')
    rules.append(f"start: {channel} ({' | '.join(kinds)})")
    parts = [part for index, schema in enumerate(arguments) for part in schema.named(f"arguments_{index}").parts]
    inner = [*arguments, *([] if answer is None else [answer])]
    if answer is not None:
        parts += answer.named("answer").parts
    unique = not free and any(grammar.json_start is not None for grammar in inner)
    top = {"name": "message", "lark_grammar": "\n".join(rules)}
    unenforced = sorted({name for grammar in inner for name in grammar.unenforced})
    return Grammar((top, *parts), ids["message"] if unique else None, tuple(unenforced))
