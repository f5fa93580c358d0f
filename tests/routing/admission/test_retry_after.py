"""`Retry-After` against the truth: the time that what waits really takes to drain, in simulated time."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

import pytest

from penstock.config.routing import AdmissionConfig
from penstock.routing.admission.decision import DecisionInput, decide
from penstock.routing.admission.fair_queue import FairQueue
from penstock.routing.admission.queue import BATCH, PREMIUM, STANDARD, Capacity, QueueEntry, cost_of

RULES = AdmissionConfig(wait_s=10.0)
ABOVE = 4.5
"""Requests per second in the class above."""


@dataclass
class Fleet:
    """Engines with so many slots that generate at a fixed speed, behind one line."""

    slots: int
    rng: random.Random
    queue: FairQueue = field(default_factory=FairQueue)
    now: float = 0.0
    ends: list[tuple[float, str, float]] = field(default_factory=list)
    waiting: dict[str, tuple[QueueEntry, int]] = field(default_factory=dict)
    serial: int = 0
    waits: list[tuple[float, float]] = field(default_factory=list)
    """When entries came, and how long they waited."""
    granted_at: dict[str, float] = field(default_factory=dict)
    given_up: list[tuple[float, str]] = field(default_factory=list)
    """When who will have waited too long, if anybody minds."""

    @property
    def capacity(self) -> Capacity:
        return Capacity(slots=self.slots)

    def arrive(self, rank: int, tenant: str, weight: float = 1.0, *, gives_up: bool = False) -> float | None:
        """A request; when it is refused, the seconds that it is told."""
        self.serial += 1
        prompt, output = self.rng.randint(20, 400), self.rng.randint(20, 300)
        entry = QueueEntry(f"{self.serial:06}", tenant, rank, weight, cost_of(prompt, 160), arrived=self.now)
        state = self.queue.state(tenant, rank, self.now)
        verdict = decide(DecisionInput(entry, max_wait_s=10.0), state, self.capacity, RULES, self.rng.random())
        if verdict.action == "refuse":
            return verdict.wait_s
        self.waiting[entry.id] = (entry, output)
        if gives_up:
            self.given_up.append((self.now + RULES.wait_s, entry.id))
        self._start(self.queue.enter(entry, self.capacity, 10_000, self.now).granted)
        return None

    def advance(self, until: float) -> None:
        while self.given_up and self.given_up[0][0] <= until:
            at, id = self.given_up.pop(0)
            self._end_until(at)
            if self.waiting.pop(id, None) is not None:
                self._start(self.queue.leave(id, self.capacity, at).granted)
        self._end_until(until)
        self.now = until

    def _end_until(self, until: float) -> None:
        while self.ends and self.ends[0][0] <= until:
            self.now, id, used = heapq.heappop(self.ends)
            self._start(self.queue.release(id, used, self.capacity, self.now).granted)

    def drained(self, rank: int) -> float:
        """Seconds until everything that waits now up to this class has started, if no more of it comes; the traffic
        above it goes on."""
        begin, before = self.now, {id for id, (entry, _) in self.waiting.items() if entry.rank <= rank}
        while before & self.waiting.keys():
            self.advance(self.now + self.rng.expovariate(ABOVE))
            if rank > PREMIUM:
                self.arrive(rank - 1, "above")
        return self.now - begin

    def _start(self, granted: list[str]) -> None:
        for id in granted:
            entry, output = self.waiting.pop(id)
            self.waits.append((entry.arrived, self.now - entry.arrived))
            self.granted_at[id] = self.now
            seconds = 0.2 + output * 0.02
            heapq.heappush(self.ends, (self.now + seconds, id, cost_of(100, output)))


@pytest.mark.parametrize("rank", [PREMIUM, STANDARD, BATCH])
def test_the_refused_are_told_the_time_within_30_percent(rank: int) -> None:
    """Four times what the slots can do for 40 s, and a steady third of what they can do in the class above."""
    ratios: list[float] = []
    for seed in range(2):
        fleet = Fleet(slots=48, rng=random.Random(seed))
        told: float | None = None
        while fleet.now < 40.0 or told is None:
            fleet.advance(fleet.now + fleet.rng.expovariate(50.0 + ABOVE))
            if rank > PREMIUM and fleet.rng.random() < ABOVE / (50.0 + ABOVE):
                fleet.arrive(rank - 1, "above")
            else:
                told = fleet.arrive(rank, "only")
        assert told >= 5.0
        ratios.append(told / fleet.drained(rank))
    assert all(0.7 <= ratio <= 1.3 for ratio in ratios), ratios


def test_in_a_burst_of_several_tenants_nearly_everybody_refused_is_told_the_truth() -> None:
    """From one moment on three tenants of different weight flood the queue, a class above takes a fifth of the room.
    The truth: when the last began of what its tenant had waiting, those that gave up left out."""
    tenants = {"above": (1.0, 3.0), "flood": (2.0, 30.0), "fair": (2.0, 12.0), "free": (1.0, 6.0)}
    often = [rate for _, rate in tenants.values()]
    judged = right = 0
    for seed in range(2):
        fleet = Fleet(slots=48, rng=random.Random(seed))
        told: list[tuple[float, int, list[str]]] = []
        while fleet.now < 60.0:
            fleet.advance(fleet.now + fleet.rng.expovariate(sum(often) if fleet.now > 10.0 else 0.1 * sum(often)))
            tenant = fleet.rng.choices(list(tenants), often)[0]
            rank = PREMIUM if tenant == "above" else STANDARD
            wait_s = fleet.arrive(rank, tenant, tenants[tenant][0], gives_up=True)
            if wait_s is not None and fleet.now < 50.0:
                before = [id for id, (entry, _) in fleet.waiting.items() if entry.tenant == tenant]
                told.append((fleet.now, max(1, round(min(wait_s, RULES.wait_s))), before))
        for now, said, before in told:
            truth = max((fleet.granted_at[id] for id in before if id in fleet.granted_at), default=now) - now
            judged += 1
            right += 0.7 * truth <= said <= 1.3 * truth + 1.0
    assert judged > 2000 and right > 0.9 * judged, (judged, right)


def test_who_is_let_into_the_queue_gets_its_turn_in_time() -> None:
    fleet = Fleet(slots=16, rng=random.Random(9))
    while fleet.now < 120.0:
        fleet.advance(fleet.now + fleet.rng.expovariate(40.0))
        fleet.arrive(STANDARD, fleet.rng.choice("abc"))
    waits = [waited for arrived, waited in fleet.waits if arrived > 60.0]  # by then the speed is known
    assert len(waits) > 100
    assert sum(waited > 10.0 for waited in waits) < 0.1 * len(waits)
    assert sum(waits) / len(waits) > 5.0, "and the queue is used"
