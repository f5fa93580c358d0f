"""How many prompt tokens a step may compute beside streams, so that these keep a target for the gap between tokens.

A step that decodes and computes prompts takes about

    base(decodes) + per_token * prompt tokens + per_key * (prompt tokens x keys they attend to)

All three are measured while the engine runs: `base` in steps that only decode, per power of two of sequences; the
other two by least squares over what steps with prompts took beyond their base, the last few hundred counting most. A
target that is only a default may yield where many prompts wait: then throughput matters more, and gaps are as long as
the token budget makes them. Until a step with prompts has been measured nothing is bounded. Prompts always get
`LEAST` tokens of a step, so that a target that cannot be kept slows them down and does not stop them. Against a
default, and against a target that only a request asks for, they get at least as long as the decodes: a default that a
model is too slow for must not stop its prompts, and no caller can slow down the prompts of others by more than that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

TILE = 128
"""Where prompts are cut short, they are cut to a multiple of this, unless a device has another: matrices are computed
in tiles of so many rows, and captured steps have so many places, so that one token more may cost as much as all."""
LEAST = 32
"""Prompt tokens of a step that every target leaves."""
MARGIN = 0.9
"""Part of a target that is planned for; the rest is for what the estimate misses."""
_FORGET = 0.98
_SMOOTH = 0.1
_STALLED = 8.0
"""A step that took so many times its estimate was held up by something else; it is not learnt from."""
_LIKE = 4.0
"""How far the size of a step may be above the measured ones for its time to be known."""


class Pace:
    """Measures steps and bounds the prompt tokens of the next. Seconds throughout."""

    def __init__(
        self, target_s: float | None = None, *, default: bool = False, yields_s: float | None = None, tile: int = TILE
    ) -> None:
        """`default`: nobody has asked for the target: prompts get at least as long as the decodes. `yields_s`: it
        gives way where prompts wait that take so long together. `tile`: see `TILE`."""
        self.target_s = target_s
        """For every stream; None: only for those that ask for one."""
        self.default = default
        self.yields_s = yields_s
        self.tile = tile
        self.forget()

    def forget(self) -> None:
        """What was measured so far (the warm-up, which compiles) says nothing about steps to come."""
        self._bases: dict[int, float] = {}
        self._per_token = self._per_key = 0.0
        # Sums over measured steps, of tokens, keys and seconds multiplied with each other.
        self._tt = self._tk = self._kk = self._ts = self._ks = 0.0
        self._t = 0.0

    def observe(self, decodes: int, prompts: Sequence[tuple[int, int]], seconds: float) -> None:
        """A step took so long. `prompts`: first position and number of tokens of each prompt in it."""
        tokens, keys = _size(prompts)
        if not tokens:
            bucket = decodes.bit_length()
            known = self._bases.get(bucket)
            if known is None:
                self._bases[bucket] = seconds
            elif seconds < known * _STALLED:
                self._bases[bucket] = known + _SMOOTH * (seconds - known)
            return
        if not decodes and not self._bases:
            return  # how much of it was reading the weights is not known yet
        expected = self.seconds(decodes, tokens, keys)
        if self._tt and seconds > expected * _STALLED:
            return
        beyond = max(seconds - self._base(decodes), 0.0)
        keys /= 1e3  # of the size of tokens, for the sums
        self._t = self._t * _FORGET + tokens
        self._tt = self._tt * _FORGET + tokens * tokens
        self._tk = self._tk * _FORGET + tokens * keys
        self._kk = self._kk * _FORGET + keys * keys
        self._ts = self._ts * _FORGET + tokens * beyond
        self._ks = self._ks * _FORGET + keys * beyond
        self._solve()

    def seconds(self, decodes: int, tokens: float, keys: float) -> float:
        """The estimate for a step."""
        return self._base(decodes) + self._per_token * tokens + self._per_key * keys

    def expected(self, decodes: int, prompts: Sequence[tuple[int, int]]) -> float:
        """The estimate for a step with these prompts, as `observe` has them; 0 while there is none."""
        if not self._bases or (prompts and not self._tt):
            return 0.0
        return self.seconds(decodes, *_size(prompts))

    def decode_s(self, decodes: int) -> float:
        """Seconds of a step without prompts; 0 while none was measured."""
        return self._base(decodes)

    def knows(self, tokens: int) -> bool:
        """Whether prompts were measured in steps with so many tokens: from much smaller ones too long a time would
        follow."""
        return bool(self._bases and self._tt) and tokens * self._t <= _LIKE * self._tt

    def budget(self, decodes: int, own_target_s: float | None, backlog: int = 0) -> float:
        """Seconds that prompts may take of a step with so many decodes; infinite where nothing bounds them. `backlog`:
        tokens of all prompts that wait."""
        if not decodes or not self._tt:
            return math.inf
        base = self._base(decodes)
        left = math.inf
        if self.target_s is not None and not self._yields(backlog):
            left = max(self.target_s * MARGIN - base, base if self.default else 0.0)
        if own_target_s is not None:
            left = min(left, max(own_target_s * MARGIN - base, base))
        return left

    def _yields(self, backlog: int) -> bool:
        return self.yields_s is not None and backlog * self._per_token > self.yields_s

    def tokens(self, seconds: float, start: int, most: int) -> int:
        """How many tokens of a prompt, from position `start` on, fit into a budget; at most `most`."""
        if seconds == math.inf:
            return most
        linear, square = self._per_token + self._per_key * start, self._per_key / 2
        if linear <= 0.0 and square <= 0.0:
            return most
        if square * most < 1e-6 * linear:
            fits = seconds / linear
        else:
            fits = (math.sqrt(linear * linear + 4 * square * seconds) - linear) / (2 * square)
        return min(most, int(fits))

    def cost(self, start: int, length: int) -> float:
        """Seconds of a budget that a chunk of a prompt takes."""
        return self._per_token * length + self._per_key * length * (start + length / 2)

    def _base(self, decodes: int) -> float:
        """What a step takes without prompts. One without decodes has to read the weights too, as with a single one."""
        if not self._bases:
            return 0.0
        bucket = max(decodes, 1).bit_length()
        nearest = min(self._bases, key=lambda known: abs(known - bucket))
        return self._bases[nearest]

    def _solve(self) -> None:
        """Least squares; a factor that would be negative is 0."""
        determinant = self._tt * self._kk - self._tk * self._tk
        per_token = self._ts / self._tt
        per_key = 0.0
        if determinant > 1e-3 * self._tt * self._kk:
            per_key = (self._ks * self._tt - self._ts * self._tk) / determinant
            per_token = (self._ts * self._kk - self._ks * self._tk) / determinant
            if per_key < 0.0:
                per_token, per_key = self._ts / self._tt, 0.0
            elif per_token < 0.0:
                per_token, per_key = 0.0, self._ks / self._kk
        self._per_token, self._per_key = per_token, per_key / 1e3


class PromptBudget:
    """What the prompts of one step may still take."""

    def __init__(self, pace: Pace, seconds: float = math.inf, decodes: int = 0) -> None:
        self._pace = pace
        self._decodes = decodes
        self._whole = seconds
        self._seconds = seconds
        self._least = LEAST
        """Tokens that are computed in any case."""
        self._tokens = 0
        """Those that are planned."""

    @property
    def spent(self) -> bool:
        return self._seconds <= 0.0 and not self._least

    def until_computed(self, start: int, length: int, most: int, ahead: Sequence[tuple[int, int]]) -> float:
        """Seconds until the next `length` tokens of a prompt are computed, from position `start` on, when all steps are
        like this one. `most`: tokens of a step; `ahead`: what is computed before, first positions and numbers of
        tokens. While no such prompt was measured, what the steps take without prompts; 0 while nothing is known."""
        pace = self._pace
        fits = min(max(pace.tokens(self._whole, start, most), LEAST), most)
        prompts = [(0, self._tokens), *ahead, (start, length)]
        steps = math.ceil(sum(tokens for _, tokens in prompts) / fits)
        least = steps * pace.decode_s(self._decodes)
        return least + sum(pace.cost(*prompt) for prompt in prompts) if pace.knows(min(length, fits)) else least

    def fit(self, start: int, length: int) -> int:
        """How many of the next `length` tokens of a prompt, from position `start` on, the streams leave time for."""
        fits = self._pace.tokens(self._seconds, start, length)
        if fits < length:
            tile = self._pace.tile
            fits = max((self._tokens + fits) // tile * tile - self._tokens, 0)
        return max(fits, min(length, self._least))

    def spend(self, start: int, length: int) -> None:
        """They are part of the step."""
        self._least = max(self._least - length, 0)
        self._tokens += length
        if self._seconds != math.inf:
            left = self._seconds - self._pace.cost(start, length)
            self._seconds = left if left > self._pace.cost(0, LEAST) else 0.0  # a sliver is nothing


def _size(prompts: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Tokens, and tokens times the keys that they attend to."""
    tokens = keys = 0.0
    for start, length in prompts:
        tokens += length
        keys += length * (start + length / 2)
    return tokens, keys
