"""Detection of the engine's watermark (`engine.watermark`) in the tokens of a text.

Each token that has `WIDTH` tokens before it gives -log(1 - u), where u is its uniform number under the key. In text
that was not made with the key these are independent and exponential, so the sum of n of them has the distribution
Gamma(n, 1), whatever the text is: the p-value is exact, not an estimate. A context that occurs again is counted once.
The seed of the text is not known: every variant of the key is tried, and so are passages of several lengths, because
the watermarked part may be a piece of the text. The p-value is corrected for the number of trials (Bonferroni), half of
it spent on the whole text and half on passages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from penstock.engine.noise import uniforms
from penstock.engine.watermark import VARIANTS, WIDTH, context_hash, noise_keys

THRESHOLD = 0.001
"""The p-value from which on a text counts as watermarked: one in a thousand texts of others does."""
LEAST_SCORED = 16
"""With fewer tokens there is no verdict."""
SHORTEST_PASSAGE = 64
_AT_ONCE = 2**17
"""Numbers that are computed together; bounds the memory of a detection."""
Verdict = Literal["watermarked", "not_detected", "too_short"]


@dataclass(frozen=True, slots=True)
class Detection:
    tokens: int
    scored: int
    """Tokens that say something: those behind a context that has not occurred before."""
    p_value: float
    """The chance that a text without this watermark looks at least as much like one with it."""
    passage: tuple[int, int] | None = None
    """First and last token of the passage that decided; None: the whole text did, or nothing was found."""

    def verdict(self, threshold: float = THRESHOLD) -> Verdict:
        if self.scored < LEAST_SCORED:
            return "too_short"
        return "watermarked" if self.p_value <= threshold else "not_detected"


def detect(tokens: Sequence[int], keys: Sequence[bytes]) -> Detection:
    """Look for the watermark of any of `keys`."""
    places = _scored_places(tokens)
    count = len(places)
    if count == 0:
        return Detection(len(tokens), 0, 1.0)
    chosen = np.array([tokens[place] for place in places], np.int64)
    sizes = _passage_sizes(count)
    windows = {size: np.arange(0, count - size + 1, max(size // 2, 1)) for size in sizes}
    whole, best = 0.0, dict.fromkeys(sizes, (0.0, 0))
    for key in keys:
        hashes = np.array([context_hash(key, tokens[place - WIDTH : place]) for place in places], np.uint64)
        for variants in np.array_split(np.arange(VARIANTS), max(VARIANTS * count // _AT_ONCE, 1)):
            scores = -np.log1p(-uniforms(noise_keys(hashes, variants), chosen))
            totals = np.zeros((len(variants), count + 1))
            np.cumsum(scores, axis=1, out=totals[:, 1:])
            whole = max(whole, float(totals[:, -1].max()))
            for size, begins in windows.items():
                sums = (totals[:, begins + size] - totals[:, begins]).max(axis=0)
                at = int(sums.argmax())
                if sums[at] > best[size][0]:
                    best[size] = (float(sums[at]), int(begins[at]))
    trials = VARIANTS * len(keys) * (2 if sizes else 1)
    passages = sum(map(len, windows.values()))
    found = Detection(len(tokens), count, _corrected(gamma_tail(count, whole), trials))
    for size, (score_of, begin) in best.items():
        p_value = _corrected(gamma_tail(size, score_of), trials * passages)
        if p_value < found.p_value:
            passage = places[begin] - WIDTH, places[begin + size - 1]
            found = Detection(len(tokens), count, p_value, passage)
    return found


def _scored_places(tokens: Sequence[int]) -> list[int]:
    seen: set[tuple[int, ...]] = set()
    places = []
    for place in range(WIDTH, len(tokens)):
        context = tuple(tokens[place - WIDTH : place])
        if context not in seen:
            seen.add(context)
            places.append(place)
    return places


def _passage_sizes(count: int) -> list[int]:
    """Of the passages that are tried: powers of two, shorter than the text."""
    sizes, size = [], SHORTEST_PASSAGE
    while size < count:
        sizes.append(size)
        size *= 2
    return sizes


def _corrected(p_value: float, trials: int) -> float:
    return min(p_value * trials, 1.0)


def gamma_tail(n: int, x: float) -> float:
    """The chance that the sum of `n` independent exponential numbers is `x` or more."""
    if x <= 0.0:
        return 1.0
    k = np.arange(n, dtype=np.float64)
    terms: npt.NDArray[np.float64] = k * math.log(x) - _log_factorials(n) - x
    top = float(terms.max())
    return min(math.exp(top) * float(np.exp(terms - top).sum()), 1.0)


def _log_factorials(n: int) -> npt.NDArray[np.float64]:
    logs = np.log(np.maximum(np.arange(n, dtype=np.float64), 1.0))
    return np.cumsum(logs)
