"""Sources of requests for tests of the simulation core."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from penstock.routing.admission.queue import BATCH, PREMIUM, STANDARD
from penstock.simulation.arrival import Arrival, Segment


@dataclass
class Listed:
    """Given requests; nothing follows them."""

    requests: list[Arrival]
    answered: list[Arrival] = field(default_factory=list)
    turned_away: list[tuple[Arrival, float | None]] = field(default_factory=list)

    def arrivals(self) -> Iterator[Arrival]:
        return iter(self.requests)

    def after(self, arrival: Arrival, finished_at: float) -> Arrival | None:
        self.answered.append(arrival)
        return None

    def refused(self, arrival: Arrival, at: float, retry_after_s: float | None) -> Arrival | None:
        self.turned_away.append((arrival, retry_after_s))
        return None


@dataclass
class Chats:
    """Conversations that begin at random, with a system prompt per tenant and a few turns."""

    seed: int = 1
    rate: float = 5.0
    tenants: int = 4
    system: int = 100
    question: int = 40
    answer: int = 30
    turns: int = 3
    think_s: float = 1.0
    stop: bool = False
    """Whether clients allow more tokens than the model generates."""
    retries: int = 0
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._ids = 1000

    def _id(self) -> int:
        self._ids += 1
        return self._ids

    def _around(self, mean: int) -> int:
        return max(1, round(mean * self._rng.uniform(0.3, 1.7)))

    def arrivals(self) -> Iterator[Arrival]:
        at = 0.0
        while True:
            at += self._rng.expovariate(self.rate)
            tenant = self._rng.randrange(self.tenants)
            output = self._around(self.answer)
            yield Arrival(
                at,
                (Segment(tenant + 1, self.system), Segment(self._id(), self._around(self.question))),
                output,
                answer=self._id(),
                tenant=f"t{tenant}",
                rank=(PREMIUM, STANDARD, BATCH)[tenant % 3],
                session=f"s{self._ids}",
                max_output_tokens=output + 50 if self.stop else None,
                timeout_s=self.timeout_s,
                label="1",
            )

    def after(self, arrival: Arrival, finished_at: float) -> Arrival | None:
        turn = int(arrival.label)
        if turn >= self.turns:
            return None
        output = self._around(self.answer)
        question = Segment(self._id(), self._around(self.question))
        return replace(
            arrival,
            at=finished_at + self._rng.expovariate(1 / self.think_s),
            prompt=(*arrival.prompt, Segment(arrival.answer, arrival.output_tokens), question),
            output_tokens=output,
            answer=self._id(),
            max_output_tokens=output + 50 if self.stop else None,
            label=str(turn + 1),
            attempt=0,
            first_at=None,
        )

    def refused(self, arrival: Arrival, at: float, retry_after_s: float | None) -> Arrival | None:
        if arrival.attempt >= self.retries:
            return None
        first = arrival.at if arrival.first_at is None else arrival.first_at
        return replace(arrival, at=at + (retry_after_s or 1.0), attempt=arrival.attempt + 1, first_at=first)
