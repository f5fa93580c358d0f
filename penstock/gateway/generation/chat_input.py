"""What a chat generation is made from, whether an engine or another server answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from penstock.gateway.generation.attempt import Attempt
from penstock.gateway.generation.chat_messages import Message
from penstock.gateway.generation.sampling import TokenLimit
from penstock.gateway.generation.schemas import ChatRequest
from penstock.gateway.generation.sources import PendingSources, SourceSearch
from penstock.gateway.generation.tokenization import messages_size, text_size, tools_size
from penstock.gateway.generation.turn import Turn

_DEFAULT_ANSWER = 512
"""Tokens that sources leave free for an answer that names no limit."""
_TEMPLATE_TOKENS = 16
"""What a chat template and the borders between texts may add."""


@dataclass(frozen=True, slots=True)
class ChatInput:
    """A request with its messages as templates take them."""

    attempt: Attempt
    request: ChatRequest
    limit: TokenLimit
    messages: list[Message]
    turn: Turn
    following: Sequence[Message]
    """What the assistant and tools have said since."""

    @property
    def size(self) -> int:
        """Characters of everything that becomes part of the prompt."""
        request = self.request
        size = messages_size(self.messages) + messages_size(self.following) + tools_size(request.tools)
        return size + text_size(request.documents or ()) + text_size(request.chat_template_kwargs or {})

    @asynccontextmanager
    async def sources(self, search: SourceSearch) -> AsyncIterator[PendingSources | None]:
        """The search for sources, begun, if the request asks for them."""
        if self.request.rag is None:
            yield None
            return
        exchange = self.attempt.exchange
        search.permit(exchange)
        pending = search.begin(exchange.caller, self.request.rag, [*self.turn.history, *self.messages])
        try:
            yield pending
        finally:
            await pending.close()


def room_for_sources(window: int, prompt_tokens: int, limit: TokenLimit) -> int:
    """Tokens of the window that neither the prompt nor the answer needs."""
    answer = limit.max_tokens or min(limit.default or _DEFAULT_ANSWER, window // 4)
    return window - prompt_tokens - answer - _TEMPLATE_TOKENS
