"""Stages of the generation pipeline that other packages implement, and the composition root hands in.

Generation knows features only through these interfaces. A feature that is switched off is a stage that does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.attempt import Attempt
from penstock.gateway.generation.base import Generation
from penstock.gateway.generation.chat_messages import Message
from penstock.gateway.generation.schemas import ChatRequest
from penstock.gateway.generation.spec import CacheQuestion


class ContentFilter(Protocol):
    """Checks what goes into a model and what comes out of it."""

    @property
    def checks_input(self) -> bool:
        """Whether any input is checked at all."""

    async def mark(self, exchange: Exchange, texts: Callable[[], Sequence[str]]) -> None:
        """Narrow the demand of a request by its content, before it is decided who gets it. `texts`: all that a model
        will read, as far as it is known."""

    async def messages(self, exchange: Exchange, messages: list[Message]) -> list[Message]:
        """The conversation as a model may see it; raises when it is refused."""

    async def prompt(self, exchange: Exchange, text: str) -> str:
        """The same for text."""

    def guards(self, exchange: Exchange) -> bool:
        """Whether text is held back from this caller, so that neither tokens nor probabilities may be shown."""

    def watch(self, exchange: Exchange, generation: Generation) -> None:
        """Filter what the generation says from now on."""


class CacheLookup(Protocol):
    """One request's use of the response cache."""

    async def store(self, response_id: str) -> None:
        """After the answer: cache it, if it is new."""


class AnswerCache(Protocol):
    """Answers that may be given again."""

    def question(self, request: ChatRequest, messages: list[Message]) -> CacheQuestion | None:
        """What similar requests are found by; None when this one is not compared."""

    def check(self, exchange: Exchange) -> None:
        """Raise when the request asks for a cache that there is not; for answers that are never cached."""

    async def look_up(self, exchange: Exchange, generation: Generation) -> CacheLookup | None:
        """Have `generation` replay a cached answer if there is one; otherwise have it record what it says. None when
        the request does not use the cache."""


class AnswerGrader(Protocol):
    """Grades a sample of answers after the client has got them."""

    def sample(self, attempt: Attempt, generation: Generation, messages: Sequence[Mapping[str, Any]]) -> None:
        """Perhaps mark an answer that is about to be generated."""

    def submit(self, attempt: Attempt, generation: Generation) -> None:
        """Take an answer, if it was marked and is complete. Never waits."""
