"""The pieces of one choice, gathered into the message that a conversation holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from penstock.gateway.generation.choice import CallPiece, Piece

THOUGHTS = "reasoning_content"
"""The field of a message that holds what was thought before it."""


@dataclass(slots=True)
class AssembledCall:
    """A function call of the model."""

    id: str
    name: str
    arguments: str = ""

    def body(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(slots=True)
class AssistantMessage:
    """A message of the assistant, as it is generated."""

    parts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[AssembledCall] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, piece: Piece) -> None:
        self.parts.append(piece.text)
        if piece.reasoning:
            self.thoughts.append(piece.reasoning)
        if piece.calls:
            merge_calls(self.calls, piece.calls)
        if piece.finish_reason is not None:
            self.finish_reason = piece.finish_reason

    def body(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self.parts)}
        if self.calls:
            message["tool_calls"] = [call.body() for call in self.calls]
            if self.thoughts:  # what a call was made for, until the turn is over
                message[THOUGHTS] = "".join(self.thoughts)
        return message


def merge_calls(calls: list[AssembledCall], pieces: Iterable[CallPiece]) -> list[AssembledCall]:
    """Extend `calls` by what `pieces` begin or add."""
    for piece in pieces:
        if piece.id is not None:
            calls.append(AssembledCall(piece.id, piece.name or ""))
        else:
            calls[piece.index].arguments += piece.arguments
    return calls
