"""How many draft tokens to verify: as many as pay.

A step that verifies draft tokens takes longer than one that does not, and yields more. Both sides are measured while
the engine runs: seconds per step by its number of tokens, and the acceptance rate. Of all possible draft tokens, the
likeliest are taken as long as tokens per second grow; none, when nothing beats plain decoding.

That is a prediction. `Balance` compares it with what was measured: whatever the prediction missed, a loss ends
speculation for a while.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)
_WEIGHT_UP, _WEIGHT_DOWN = 0.2, 0.7
_OUTLIER = 3.0
_UNKNOWN_SLOPE = 0.03
"""Beyond what is measured: what one token more adds at least, as a share of the step."""
MARGIN = 1.03
"""The predicted speedup over plain decoding that speculation needs."""


class StepCosts:
    """Seconds of a step by its number of tokens, from recent steps."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._known: list[int] = []

    def observe(self, tokens: int, seconds: float) -> None:
        if seconds <= 0.0 or tokens < 1:
            return
        size = _bucket(tokens)
        old = self._seconds.get(size)
        if old is None:
            bisect.insort(self._known, size)
            self._seconds[size] = seconds
        else:
            # A slow step may only mean that something else used the machine for a moment; a fast one is reliable.
            weight = _WEIGHT_UP if seconds > old else _WEIGHT_DOWN
            self._seconds[size] = old + weight * (min(seconds, old * _OUTLIER) - old)

    @property
    def largest(self) -> int:
        """Tokens of the largest step measured; 0 before any."""
        return self._known[-1] if self._known else 0

    def knows(self, tokens: int) -> bool:
        """Whether an estimate rests on steps of about that size: measured itself, between sizes not far apart, or
        somewhat smaller than any measured."""
        known, size = self._known, _bucket(tokens)
        at = bisect.bisect_left(known, size)
        if at == len(known):
            return False
        return known[at] == size or known[at] <= (4 * known[at - 1] if at else 2 * size)

    def estimate(self, tokens: int) -> float | None:
        """Seconds of a step of `tokens`; between and beyond measured sizes a straight line. None: nothing measured."""
        known = self._known
        if not known:
            return None
        size = _bucket(tokens)
        at = bisect.bisect_left(known, size)
        if at < len(known) and known[at] == size:
            return self._seconds[size]
        if 0 < at < len(known):
            low, high = known[at - 1], known[at]
            share = (size - low) / (high - low)
            return self._seconds[low] + share * (self._seconds[high] - self._seconds[low])
        if at == 0:
            return self._seconds[known[0]] * max(1.0 - _UNKNOWN_SLOPE * (known[0] - size), 0.5)
        last = self._seconds[known[-1]]
        slope = _UNKNOWN_SLOPE * last
        if len(known) > 1:
            slope = max(slope, (last - self._seconds[known[-2]]) / (known[-1] - known[-2]))
        return last + slope * (size - known[-1])


def _bucket(tokens: int) -> int:
    return _SIZES[min(bisect.bisect_left(_SIZES, tokens), len(_SIZES) - 1)]


def choose_depths(
    outlooks: Sequence[tuple[float, int]],
    decodes: int,
    limit: int,
    plain_s: float,
    step_s: Callable[[int, int], float],
) -> tuple[list[int], float]:
    """How many draft tokens to verify of each sequence, and the speedup over plain decoding (at most 1: none).

    `outlooks`: for each sequence the chance that a draft token is accepted, and how many there could be. `decodes`:
    sequences in the step, those without draft tokens included. `step_s(tokens, depth)`: seconds of a step of that many
    tokens whose longest draft is `depth`. The j-th draft token is accepted with the j-th power of the chance, which
    falls with j, so taking the likeliest first never takes a draft token without those before it.
    """
    ranked = sorted(
        ((chance**j, j, index) for index, (chance, most) in enumerate(outlooks) for j in range(1, most + 1)),
        key=lambda entry: (-entry[0], entry[1]),
    )
    best, taken = 1.0, 0
    expected, deepest = float(decodes), 0
    plain_rate = decodes / plain_s
    for count, (chance, j, _) in enumerate(ranked[: max(limit - decodes, 0)], start=1):
        expected += chance
        deepest = max(deepest, j)
        factor = expected / step_s(decodes + count, deepest) / plain_rate
        if factor > best:
            best, taken = factor, count
    depths = [0] * len(outlooks)
    for _, _, index in ranked[:taken]:
        depths[index] += 1
    return depths, best


class Balance:
    """What verifying draft tokens gained or lost, as measured. Lost time adds up to a debt; won time pays the debt off
    but is not saved: a loss, whatever its reason, ends speculation once it amounts to a few plain steps."""

    __slots__ = ("_debt", "_steps")
    _MOST_DEBT = 3.0
    _ENOUGH = 16

    def __init__(self) -> None:
        self._debt = 0.0
        self._steps = 0

    def add(self, yielded: float, cost: float) -> None:
        """A step gave as many tokens as `yielded` plain steps and took as long as `cost` of them."""
        self._debt = max(self._debt + cost - yielded, 0.0)
        self._steps += 1

    @property
    def losing(self) -> bool:
        return self._debt > self._MOST_DEBT

    @property
    def winning(self) -> bool:
        """Whether it has run for a while without a loss."""
        return self._steps >= self._ENOUGH and not self._debt


class Acceptance:
    """The recent share of draft tokens that were accepted, starting from a prior."""

    __slots__ = ("_accepted", "_decay", "_prior", "_tried", "_weight")

    def __init__(self, prior: float | Acceptance, decay: float, weight: float = 3.0) -> None:
        self._prior = prior
        self._decay = decay
        self._weight = weight
        self._accepted = 0.0
        self._tried = 0.0

    def observe(self, accepted: int, tried: int) -> None:
        self._accepted = self._accepted * self._decay + accepted
        self._tried = self._tried * self._decay + tried

    @property
    def chance(self) -> float:
        prior = self._prior.chance if isinstance(self._prior, Acceptance) else self._prior
        return min((self._accepted + prior * self._weight) / (self._tried + self._weight), 0.98)
