"""A generation: what answers one HTTP request, whichever kind of backend produces it.

There are two kinds. The choices of an `EngineGeneration` are token requests to an engine; the text of a
`RemoteGeneration` is written by another server. Everything around an answer (admission, charges, guardrails, rendering)
works with this base, which also observes latencies and counts what is paid for.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from penstock.gateway.accounting.admission import EngineDemand
from penstock.gateway.generation.choice import TIME_LIMIT, Piece, TextGuard
from penstock.gateway.generation.sources import Sources
from penstock.gateway.generation.spec import CacheFacts
from penstock.metering.prices import Usage
from penstock.routing.registry import AnsweringModel
from penstock.telemetry.context import sampled_trace
from penstock.telemetry.metrics import Metrics, RequestMetrics
from penstock.telemetry.timeline import EngineRun
from penstock.text import TextModel


class Gate(Protocol):
    """What a generation may have to wait for before it runs."""

    async def wait(self, within: float | None = None) -> bool:
        """Whether it is open; False when `within` seconds have passed. Raises when it will never open."""

    def fail(self, error: Exception) -> None:
        """Raise `error` in `wait`, now or later."""


class ChoiceState(Protocol):
    """How far a choice has got."""

    index: int
    finished: bool
    outcome: str | None
    completion_tokens: int
    first_at: float | None
    last_at: float | None
    """When its first and its newest token arrived."""


class PieceStream(Protocol):
    """Stands between a generation and its reader, and may hold pieces back."""

    @property
    def idle(self) -> bool:
        """Whether nothing is held back."""

    async def next(self, within: float | None = None) -> list[Piece]:
        """As `Generation.next`."""

    async def close(self) -> None: ...


class Generation(ABC):
    """All choices of one HTTP request."""

    choices: Sequence[ChoiceState]
    text: TextModel | None = None
    """The model's tokenizer, where it is known here."""
    sources: Sources | None = None
    """What the answer was given to draw from."""
    asked_at: float | None = None
    """When it asked to be admitted, if it did."""
    question: str | None = None
    """What the user asked, when the answer is to be graded."""
    on_submit: Callable[[str, Mapping[str, str]], None] | None = None
    """Called with the name of the engine or server that begins it, and where that is."""
    pools: Callable[[], Sequence[str]] | None = None
    """The pools that it may run in, once it is admitted; None: those of its placement."""
    moderated: PieceStream | None = None
    """Holds pieces back until a moderation model has seen them."""
    first_token_at: float | None = None
    resumable = False
    """Whether the client may come back for the rest of the stream, if its connection breaks."""
    length_limit = ""
    """The limit of this server that a choice which ended with `length` reached; empty: the request's own."""
    before: Usage | None = None
    """Of a resumed stream: what limits and metrics have counted already."""
    superseded = False
    """It failed before the client got any of it, and another model is asked: nobody pays for what it produced."""

    _observed: RequestMetrics
    """Metrics of the replica; set when the replica gets the request, which is before its first token."""
    _submitted_at: float | None = None
    _texts: list[list[str]] | None = None

    def __init__(self, id: str, model: AnsweringModel, replica: str, metrics: Metrics, started_at: float) -> None:
        """`replica`: which engine or server of the model is expected to begin it."""
        self.id = id
        self.model = model
        self.replica = replica
        self._metrics = metrics
        self._started_at = started_at
        self._trace = sampled_trace()

    @abstractmethod
    def submit(self, gate: Gate | None = None) -> None:
        """Run; with a `gate`, as soon as it opens (`next` waits for that). Raises what prevents it."""

    @abstractmethod
    async def next(self, within: float | None = None) -> list[Piece]:
        """New pieces of text; empty when `within` seconds pass without any."""

    def commit(self) -> None:
        """The answer's status line goes out: no other model can answer any more, so wait where that helps."""
        return

    @abstractmethod
    def fail(self, error: Exception) -> None:
        """End now: nothing more is generated, and `next` raises `error`."""

    @abstractmethod
    def close(self) -> None:
        """Stop whatever still runs. Safe to call twice."""

    @abstractmethod
    async def settled(self) -> None:
        """After `close`: returns when the engine has reported its last tokens, or will not report any more."""

    @abstractmethod
    def guard(self, make: Callable[[], TextGuard]) -> None:
        """Pass the text of every choice through a guard."""

    @abstractmethod
    def cite(self, sources: Sources, *, attribute: bool) -> None:
        """Resolve the citations of every choice. `attribute`: see `Sources.citer`."""

    @abstractmethod
    def cut(self, index: int) -> None:
        """End a choice because of its content. The caller shows nothing more of it."""

    @abstractmethod
    def texts(self, most: int) -> list[tuple[str, str]] | None:
        """Prompt and answer of each choice, at most `most` characters of each; None unless `keep_text` was called."""

    @abstractmethod
    def runs(self, purpose: str = "") -> list[EngineRun]:
        """What each choice did, for the request's timeline."""

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
    @abstractmethod
    def reasoning_tokens(self) -> int:
        """Completion tokens that are thoughts, as far as that is known."""

    @property
    @abstractmethod
    def from_cache(self) -> bool:
        """Whether the answer comes from the response cache."""

    @abstractmethod
    async def claim(self) -> None:
        """Take over the stream that the client resumes; `NotFound` if there is none."""

    @abstractmethod
    def cache_facts(self) -> CacheFacts:
        """What the response cache compares."""

    @abstractmethod
    def record(self) -> None:
        """Record what is generated, for `recorded`."""

    @property
    @abstractmethod
    def recorded(self) -> bytes | None:
        """The whole answer, if it was recorded and every choice ended by itself."""

    @abstractmethod
    def replay(self, recorded: bytes) -> None:
        """Answer with a recording instead of generating; `MsgspecError` if it is none."""

    @property
    @abstractmethod
    def left(self) -> bool:
        """Whether the client is gone but may come back for the rest, which belongs to the same charge."""

    def demand(self) -> EngineDemand | None:
        """What it asks of an engine's admission queue; None when it takes no engine of ours."""
        return None

    async def shown(self, within: float | None = None) -> list[Piece]:
        """New pieces as the client may see them; empty when `within` seconds pass without any."""
        return await (self if self.moderated is None else self.moderated).next(within)

    @property
    def all_shown(self) -> bool:
        return self.done and (self.moderated is None or self.moderated.idle)

    def keep_text(self) -> None:
        """Keep what is generated, for `texts`."""
        self._texts = [[] for _ in self.choices]

    @property
    def complete(self) -> bool:
        return all(choice.finished for choice in self.choices)

    @property
    def billable(self) -> bool:
        """Whether there is anything to pay for: a request that broke off before its first token is free."""
        return not self.superseded and (self.completion_tokens > 0 or self.complete)

    @property
    def outcome(self) -> str | None:
        if len(self.choices) == 1:
            return self.choices[0].outcome
        outcomes = {choice.outcome for choice in self.choices}
        return outcomes.pop() if len(outcomes) == 1 else "mixed"

    @property
    def limit(self) -> str:
        """The limit of this server that ended a choice (`x-penstock-limit`); empty: none did."""
        outcomes = {choice.outcome for choice in self.choices}
        return TIME_LIMIT if "timeout" in outcomes else self.length_limit if "length" in outcomes else ""

    def usage(self) -> dict[str, object]:
        return usage_body(self.prompt_tokens, self.completion_tokens, self.cached_tokens, self.reasoning_tokens)

    def _began(self, replica: str) -> None:
        """A replica has got the request."""
        self.replica = replica
        self._observed = self._metrics.request(self.model.base_name, replica)
        if self.on_submit is not None:
            self.on_submit(replica, self.where())

    def _observe_tokens(self, choice: ChoiceState, count: int, at: float) -> None:
        """`count` new tokens of a choice arrived."""
        if choice.last_at is None:
            if self.first_token_at is None:
                self.first_token_at = at
            self._observed.ttft.observe(at - self._started_at, trace=self._trace)
            choice.first_at = at
        else:
            self._observed.itl.observe((at - choice.last_at) / count, count)
        choice.last_at = at

    def _observe_end(self, at: float, prompt_tokens: int, completion_tokens: int) -> None:
        observed = self._observed
        observed.e2e.observe(at - self._started_at, trace=self._trace)
        observed.generation_tokens.observe(completion_tokens)
        observed.prompt_tokens.observe(prompt_tokens)

    def _count_outcome(self, choice: ChoiceState) -> None:
        self._metrics.finished(self.model.base_name, self.replica, choice.outcome or "unknown")

    def _run(
        self,
        choice: ChoiceState,
        purpose: str,
        prompt_tokens: int,
        cached_tokens: int,
        completion_tokens: int,
        engine_s: tuple[float | None, float | None, float | None] = (None, None, None),
    ) -> EngineRun:
        """`engine_s`: how long queue, prefill and decode took, as the engine reports it."""
        queue_s, prefill_s, decode_s = engine_s
        return EngineRun(
            engine=self.replica,
            model=self.model.name,
            choice=choice.index,
            asked_at=self.asked_at,
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
            place=self.where(),
        )

    def where(self) -> dict[str, str]:
        """The pool and region that it runs in, and why it may; empty where a model has neither."""
        return {}


def usage_body(
    prompt_tokens: int, completion_tokens: int, cached_tokens: int, reasoning_tokens: int = 0
) -> dict[str, object]:
    """The `usage` object of a reply."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }
