"""One step of an answer with server tools: what the model says and calls, what the client sees of it, and the totals of
all steps."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from typing import Any

from penstock.gateway.generation.assistant_message import AssistantMessage
from penstock.gateway.generation.base import Generation, usage_body
from penstock.gateway.generation.choice import Piece
from penstock.gateway.generation.renderer import Renderer


class StepMessage(AssistantMessage):
    """What the model says in one step."""

    __slots__ = ()

    @property
    def has_calls_to_run(self) -> bool:
        """A message that was cut off ends the loop: its last call may be half a call."""
        return bool(self.calls) and self.finish_reason == "tool_calls"


class StepTotals:
    """What all steps of a request add up to."""

    def __init__(self) -> None:
        self.prompt_tokens = self.completion_tokens = self.cached_tokens = self.reasoning_tokens = 0
        self.events: list[dict[str, Any]] = []

    def add(self, generation: Generation) -> None:
        self.prompt_tokens += generation.prompt_tokens
        self.completion_tokens += generation.completion_tokens
        self.cached_tokens += generation.cached_tokens
        self.reasoning_tokens += generation.reasoning_tokens

    def usage(self) -> dict[str, object]:
        return usage_body(self.prompt_tokens, self.completion_tokens, self.cached_tokens, self.reasoning_tokens)


class StepsRenderer(Renderer):
    """A renderer that also writes the calls between steps."""

    @abstractmethod
    def tool_event(self, event: dict[str, Any]) -> bytes:
        """The beginning or the result of a call, as an event of the stream."""

    def follow(self, generation: Generation) -> None:
        """The next step begins."""
        return

    async def keep(self) -> None:
        """Called when the last step has been rendered, before its end is sent."""
        return


def shown(piece: Piece) -> Piece | None:
    """What the client sees of a piece: calls are told as events, and only the last step ends the answer."""
    ends = None if piece.finish_reason == "tool_calls" else piece.finish_reason
    if not (piece.text or piece.tokens or piece.reasoning or ends):
        return None
    return dataclasses.replace(piece, calls=None, finish_reason=ends, stop_reason=piece.stop_reason if ends else None)
