"""What answers one HTTP request, whoever produces it.

Two kinds: `EngineGeneration`, whose choices are token requests to an engine, and `Relay`, whose text another server
writes. Everything around an answer (charges, limits, guardrails, rendering) works with this.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.gateway.generation.choice import Piece
from penstock.gateway.moderation.guardrails import OutputGuard
from penstock.gateway.moderation.stream import Screen
from penstock.gateway.rag.retrieval import Retrieved
from penstock.routing.registry import AnsweringModel
from penstock.telemetry.timeline import Run
from penstock.text import TextModel


class Gate(Protocol):
    """What a generation may have to wait for before it runs."""

    async def wait(self, within: float | None = None) -> bool:
        """Whether it is open; False when `within` seconds have passed. Raises when it will never be."""

    def fail(self, error: Exception) -> None:
        """Whoever waits, now or later, gets `error`."""


class ChoiceState(Protocol):
    """How far a choice is."""

    index: int
    finished: bool
    outcome: str | None
    completion_tokens: int
    first_at: float | None
    last_at: float | None
    """When its first and its newest token arrived."""


class Generation(ABC):
    """All choices of one HTTP request."""

    id: str
    """Names it in the ledger, in the engine and to the client; never used before."""
    model: AnsweringModel
    replica: str
    """Which engine or server of the model began it."""
    choices: Sequence[ChoiceState]
    first_token_at: float | None = None
    text: TextModel | None = None
    """The model's tokenizer, where it is known here."""
    retrieved: Retrieved | None = None
    """What the answer was given to draw from."""

    asks_at: float | None = None
    """When it asked to be admitted, if it did."""
    question: str | None = None
    """What was asked, when the answer is to be judged."""
    on_submit: Callable[[str], None] | None = None
    """Called with the name of the engine or server that begins it."""

    _submitted_at: float | None = None

    screen: Screen | None = None
    """What holds its text back until a moderation model has seen it."""

    @abstractmethod
    def submit(self, gate: Gate | None = None) -> None:
        """Run; with a `gate`, as soon as it opens (`next` waits for that). Raises what stands against it."""

    @abstractmethod
    async def next(self, within: float | None = None) -> list[Piece]:
        """New pieces of text; empty when `within` seconds pass without any."""

    @abstractmethod
    def fail(self, error: Exception) -> None:
        """End now: nothing more is generated, and whoever waits in `next` gets `error`."""

    @abstractmethod
    def close(self) -> None:
        """Stop whatever still runs. Safe to call twice."""

    @abstractmethod
    async def quiet(self) -> None:
        """After `close`: returns when the last word about what was cut off has been said, or nobody will say it."""

    @abstractmethod
    def guard(self, make: Callable[[], OutputGuard]) -> None:
        """Pass the text of every choice through guardrails."""

    @abstractmethod
    def cut(self, index: int) -> None:
        """End a choice because of what it says; whoever asks for that shows nothing more of it."""

    async def shown(self, within: float | None = None) -> list[Piece]:
        """New pieces as the client may see them; empty when `within` seconds pass without any."""
        return await (self if self.screen is None else self.screen).next(within)

    @property
    def all_shown(self) -> bool:
        return self.done and (self.screen is None or self.screen.idle)

    @abstractmethod
    def keep_text(self) -> None:
        """Remember what is generated; for `texts`."""

    @abstractmethod
    def texts(self, most: int) -> list[tuple[str, str]] | None:
        """The prompt and the answer of each choice, at most `most` characters of each, if they were to be kept."""

    @abstractmethod
    def runs(self, purpose: str = "") -> list[Run]:
        """What each choice did, for the request's timeline."""

    def _run(
        self,
        choice: ChoiceState,
        purpose: str,
        prompt_tokens: int,
        cached_tokens: int,
        completion_tokens: int,
        engine_s: tuple[float | None, float | None, float | None] = (None, None, None),
    ) -> Run:
        """`engine_s`: how long the engine says that the queue, the prompt and decoding took."""
        queue_s, prefill_s, decode_s = engine_s
        return Run(
            engine=self.replica,
            model=self.model.name,
            choice=choice.index,
            asked_at=self.asks_at,
            submitted_at=self._submitted_at,
            ended_at=time.monotonic(),
            first_at=choice.first_at,
            last_at=choice.last_at,
            queue_s=queue_s,
            prefill_s=prefill_s,
            decode_s=decode_s,
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            completion_tokens=completion_tokens,
            outcome=choice.outcome or "abort",
            purpose=purpose,
        )

    @property
    @abstractmethod
    def done(self) -> bool: ...

    @property
    @abstractmethod
    def prompt_tokens(self) -> int: ...

    @property
    @abstractmethod
    def cached_tokens(self) -> int: ...

    @property
    @abstractmethod
    def completion_tokens(self) -> int: ...

    @property
    @abstractmethod
    def most_completion_tokens(self) -> int: ...

    @property
    def recalled(self) -> bool:
        """Whether the answer comes from a cache."""
        return False

    @property
    def complete(self) -> bool:
        return all(choice.finished for choice in self.choices)

    @property
    def billable(self) -> bool:
        """Whether there is anything to pay for: a request that broke off before its first token is free."""
        return self.completion_tokens > 0 or self.complete

    @property
    def outcome(self) -> str | None:
        outcomes = {choice.outcome for choice in self.choices}
        return outcomes.pop() if len(outcomes) == 1 else "mixed"

    def usage(self) -> dict[str, object]:
        prompt, completion = self.prompt_tokens, self.completion_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }
