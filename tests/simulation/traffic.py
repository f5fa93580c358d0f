"""Sources of requests for tests of the simulation core."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import NamedTuple

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


class _Turn(NamedTuple):
    question: Segment
    answer: int
    output: int
    think_s: float


def _around(rng: random.Random, mean: int) -> int:
    return max(1, round(mean * rng.uniform(0.3, 1.7)))


@dataclass
class Chats:
    """Conversations that begin at random, with a system prompt per tenant and a few turns. The same seed gives the same
    conversations to every fleet and policy, so that what these yield can be compared."""

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

    def arrivals(self) -> Iterator[Arrival]:
        rng = random.Random(self.seed)
        at = 0.0
        for number in count():
            at += rng.expovariate(self.rate)
            tenant = rng.randrange(self.tenants)
            turn = self._turn(f"s{number}", 1)
            yield Arrival(
                at,
                (Segment(tenant + 1, self.system), turn.question),
                turn.output,
                answer=turn.answer,
                tenant=f"t{tenant}",
                rank=(PREMIUM, STANDARD, BATCH)[tenant % 3],
                session=f"s{number}",
                max_output_tokens=turn.output + 50 if self.stop else None,
                timeout_s=self.timeout_s,
                label="1",
            )

    def after(self, arrival: Arrival, finished_at: float) -> Arrival | None:
        number = int(arrival.label) + 1
        if number > self.turns:
            return None
        turn = self._turn(arrival.session, number)
        return replace(
            arrival,
            at=finished_at + turn.think_s,
            prompt=(*arrival.prompt, Segment(arrival.answer, arrival.output_tokens), turn.question),
            output_tokens=turn.output,
            answer=turn.answer,
            max_output_tokens=turn.output + 50 if self.stop else None,
            label=str(number),
            attempt=0,
            first_at=None,
        )

    def _turn(self, session: str, number: int) -> _Turn:
        """Drawn from the turn's own seed: when the fleet answers decides nothing but when the turn comes."""
        rng = random.Random(f"{self.seed} {session} {number}")
        first = 1000 + 2 * (int(session[1:]) * self.turns + number)
        question = Segment(first, _around(rng, self.question))
        return _Turn(question, first + 1, _around(rng, self.answer), rng.expovariate(1 / self.think_s))

    def refused(self, arrival: Arrival, at: float, retry_after_s: float | None) -> Arrival | None:
        if arrival.attempt >= self.retries:
            return None
        first = arrival.at if arrival.first_at is None else arrival.first_at
        return replace(arrival, at=at + (retry_after_s or 1.0), attempt=arrival.attempt + 1, first_at=first)
