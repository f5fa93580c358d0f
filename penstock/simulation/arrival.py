"""What reaches the simulated fleet: requests with prompts made of segments, and where they come from.

A prompt is a sequence of segments instead of tokens. Equal segment ids stand for equal text, so two prompts share
cached prefixes exactly as far as their segments agree from the beginning, and no token has to be made up or hashed. An
answer is a segment too: a conversation's next prompt contains `arrival.answer` and finds the blocks that the answer
left in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from penstock.routing.admission.queue import STANDARD


class Segment(NamedTuple):
    """Consecutive tokens with an identity."""

    id: int
    """Equal ids: equal text. A shorter segment of the same id is a prefix of the longer one."""
    tokens: int


@dataclass(slots=True)
class Arrival:
    """A request, and when its client sends it."""

    at: float
    """Seconds since the beginning of the simulation."""
    prompt: tuple[Segment, ...]
    output_tokens: int
    """Tokens that the model will generate; the fleet does not know them beforehand."""
    answer: int = 0
    """Segment id of the generated text, to be used by the next turn of a conversation; 0: nobody uses it again."""
    tenant: str = ""
    rank: int = STANDARD
    """Class: `PREMIUM`, `STANDARD` or `BATCH` of `routing.admission.queue`."""
    weight: float = 1.0
    """The tenant's share relative to other tenants of its class."""
    session: str = ""
    """Requests that belong together (`x-session-id`), for replica policies."""
    max_output_tokens: int | None = None
    """The client's `max_tokens`, which admission knows; None: `output_tokens`."""
    priority: int = 0
    """Priority in the engine; smaller goes first."""
    timeout_s: float | None = None
    """The engine ends the request after this long."""
    max_wait_s: float | None = None
    """Longest wait for admission that the client accepts; its class's limit otherwise."""
    attempt: int = 0
    """How often its client has sent it before."""
    first_at: float | None = None
    """When its client sent it first; None: this is the first time. The user's wait counts from here."""
    label: str = ""
    """Any word of its source: the phase of a workload, the kind of request. Reports can group by it."""

    @property
    def prompt_tokens(self) -> int:
        return sum(segment.tokens for segment in self.prompt)

    @property
    def limit(self) -> int:
        """Most tokens that it may generate, as far as the fleet knows."""
        return self.output_tokens if self.max_output_tokens is None else self.max_output_tokens


class Source(Protocol):
    """Where requests come from."""

    def arrivals(self) -> Iterator[Arrival]:
        """In order of time; read as the simulation goes on, so it may be endless."""
        ...

    def after(self, arrival: Arrival, finished_at: float) -> Arrival | None:
        """The request that follows the answer to `arrival`, if any, at `finished_at` or later."""
        ...

    def refused(self, arrival: Arrival, at: float, retry_after_s: float | None) -> Arrival | None:
        """The request that follows one without an answer, if any: refused, with the time after which to try again, or
        lost with its replica (None)."""
        ...
