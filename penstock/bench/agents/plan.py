"""The plan of a load by conversations: how many tokens each turn adds, and how long its tools take.

Everything is drawn before the run and from a seed, so that two servers get the same conversations. All conversations
grow to the same length, by steps of different sizes, as results of tools have different sizes.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

from penstock.errors import PenstockError

_SPREAD = (0.5, 1.5)
"""Of a turn's input, as a multiple of the mean."""


@dataclass(frozen=True, slots=True)
class Turn:
    pause_s: float
    """Before it is sent: the tools run."""
    prompt_len: int
    """The whole conversation until then."""
    input_len: int
    """What the turn adds to it before the answer."""
    output_len: int


@dataclass(frozen=True, slots=True)
class Conversation:
    key: str
    """Keeps its turns together on one replica."""
    seed: int
    """Of its texts."""
    turns: tuple[Turn, ...]

    @property
    def length(self) -> int:
        """At its end, the last answer included."""
        return self.turns[-1].prompt_len + self.turns[-1].output_len


@dataclass(frozen=True, slots=True)
class Growth:
    """The form that all conversations of a load have."""

    turns: int = 20
    tokens: int = 40_000
    """At the end of a conversation."""
    output_len: int = 200
    """Of every turn."""
    first_len: int | None = None
    """Tokens of the first prompt; a share like every other turn's when not set."""
    pause: tuple[float, float] = (2.0, 20.0)
    """Seconds that tools take, from and to."""
    speed: float = 1.0
    """Pauses are this many times as short."""

    def check(self) -> None:
        low, high = self.pause
        if not 0 <= low <= high:
            raise PenstockError(f"tools take from {low:g} to {high:g} s: the first must not be above the second")
        least = self.turns * self.output_len + (self.first_len or 1) + self.turns - 1
        if self.tokens < least:
            first = "" if self.first_len is None else f" and a first prompt of {self.first_len:,}"
            raise PenstockError(
                f"{self.turns} turns with {self.output_len:,} output tokens each{first} come to {least:,} tokens or "
                f"more: --tokens {self.tokens} is too few"
            )
        if self.first_len is not None and self.turns == 1 and self.tokens != self.first_len + self.output_len:
            raise PenstockError("with one turn, --first-len and --output-len must come to --tokens")


def plan(growth: Growth, count: int, seed: int = 0) -> list[Conversation]:
    """`count` conversations. Each begins after a wait of up to the longest pause, so that they are not in step."""
    growth.check()
    return [_conversation(growth, index, seed) for index in range(count)]


def _conversation(growth: Growth, index: int, seed: int) -> Conversation:
    rng = random.Random(f"{seed} {index}")
    low, high = growth.pause
    waits = [rng.uniform(0, high), *(rng.uniform(low, high) for _ in range(growth.turns - 1))]
    inputs = _inputs(growth, rng)
    turns, length = [], 0
    for wait, added in zip(waits, inputs, strict=True):
        turns.append(Turn(wait / growth.speed, length + added, added, growth.output_len))
        length += added + growth.output_len
    return Conversation(f"bench-agents-{seed}-{index}", rng.getrandbits(32), tuple(turns))


def _inputs(growth: Growth, rng: random.Random) -> list[int]:
    """Tokens that each turn adds, at least one each; they add up exactly."""
    total = growth.tokens - growth.turns * growth.output_len
    first = [] if growth.first_len is None else [growth.first_len]
    parts = growth.turns - len(first)
    free = total - sum(first) - parts
    shares = list(itertools.accumulate(rng.uniform(*_SPREAD) for _ in range(parts)))
    ends = [0, *(round(free * share / shares[-1]) for share in shares)]
    return first + [1 + after - before for before, after in itertools.pairwise(ends)]
