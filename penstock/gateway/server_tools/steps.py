"""One step of an answer with tools of the server: what the model says and calls, what the client sees of it, and what
all steps add up to."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any

from penstock.gateway.generation.base import Generation
from penstock.gateway.generation.choice import Piece
from penstock.gateway.generation.respond import Renderer


@dataclass(slots=True)
class Call:
    """A call the model made."""

    id: str
    name: str
    arguments: str = ""

    def message(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(slots=True)
class Step:
    """One answer of the model, as it comes."""

    parts: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    finish_reason: str | None = None

    def hear(self, piece: Piece) -> None:
        self.parts.append(piece.text)
        for call in piece.calls or ():
            if call.id is not None:
                self.calls.append(Call(call.id, call.name or ""))
            else:
                self.calls[call.index].arguments += call.arguments
        if piece.finish_reason is not None:
            self.finish_reason = piece.finish_reason

    @property
    def goes_on(self) -> bool:
        """Whether there are calls to run. A message that was cut ends the loop: its last call may be half a call."""
        return bool(self.calls) and self.finish_reason == "tool_calls"


class Totals:
    """What all steps of a request add up to."""

    def __init__(self) -> None:
        self.prompt_tokens = self.completion_tokens = self.cached_tokens = self.steps = 0
        self.events: list[dict[str, Any]] = []

    def add(self, generation: Generation) -> None:
        self.steps += 1
        self.prompt_tokens += generation.prompt_tokens
        self.completion_tokens += generation.completion_tokens
        self.cached_tokens += generation.cached_tokens

    def usage(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }


class StepsRenderer(Renderer):
    """One that can also tell of the calls between steps."""

    @abstractmethod
    def tool_event(self, event: dict[str, Any]) -> bytes:
        """Something that happened to a call, as an event of the stream."""


def shown(piece: Piece) -> Piece | None:
    """What of a piece is for the client: calls are told as events, and only the last step ends the answer."""
    ends = None if piece.finish_reason == "tool_calls" else piece.finish_reason
    if not (piece.text or piece.tokens or ends):
        return None
    return dataclasses.replace(piece, calls=None, finish_reason=ends, stop_reason=piece.stop_reason if ends else None)
