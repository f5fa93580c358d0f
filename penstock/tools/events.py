"""The parsed parts of a model's message: text and function calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Text:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A function call begins."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the arguments' JSON, as the model wrote it."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A function call ends. Its arguments are complete unless the message was truncated or malformed."""

    index: int


Event = Text | CallBegin | CallArguments | CallEnd


@dataclass(slots=True)
class Call:
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Parsed:
    """A whole message."""

    text: str = ""
    calls: list[Call] = field(default_factory=list)


def gather(events: Iterable[Event]) -> Parsed:
    """The whole message from its events."""
    said: list[str] = []
    calls: list[tuple[str, list[str]]] = []
    for event in events:
        match event:
            case Text(text):
                said.append(text)
            case CallBegin(_, name):
                calls.append((name, []))
            case CallArguments(index, text):
                calls[index][1].append(text)
            case CallEnd():
                pass
    return Parsed("".join(said), [Call(name, "".join(arguments)) for name, arguments in calls])
