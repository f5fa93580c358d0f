"""BM25 over postings (the chunks that contain a word, and how often). Pure array arithmetic.

The parameters are those of FTS5: k1 = 1.2, b = 0.75; words in more than half of all chunks have almost no weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.knowledge.chunks.base import Ranked

K1 = 1.2
B = 0.75
LEAST_IDF = 1e-6
Keys = NDArray[np.int64]
Numbers = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Postings:
    """One word: the chunks that hold it, in ascending order, and how often each does (an occurrence in a heading may
    count for more than one)."""

    keys: Keys
    often: Numbers

    @classmethod
    def of(cls, occurrences: Keys, weights: Numbers) -> Postings:
        """From one entry per occurrence, those of a chunk next to each other."""
        if not len(occurrences):
            return cls(occurrences, weights)
        firsts = np.flatnonzero(np.diff(occurrences, prepend=occurrences[0] - 1))
        return cls(occurrences[firsts], np.add.reduceat(weights, firsts))


def rank(
    words: Sequence[Postings], total: int, lengths: Numbers, mean: float, count: int, among: Keys | None = None
) -> Ranked:
    """The best `count` of `total` chunks; `lengths` are theirs, by key, and `mean` is that of all of them. `among`:
    only these chunks; statistics remain those of all."""
    words = [word for word in words if len(word.keys)]
    if not words or count <= 0:
        return []
    keys, places = np.unique(np.concatenate([word.keys for word in words]), return_inverse=True)
    scores = np.bincount(places, np.concatenate([_scores(word, total, lengths, mean) for word in words]))
    if among is not None:
        kept = np.isin(keys, among)
        keys, scores = keys[kept], scores[kept]
    # Of equal scores the older chunk comes first, also at the cut-off.
    least = np.partition(scores, -count)[-count] if len(scores) > count else -np.inf
    front = np.flatnonzero(scores >= least)
    best = front[np.argsort(-scores[front], kind="stable")[:count]]
    return [(int(keys[place]), float(scores[place])) for place in best]


def _scores(word: Postings, total: int, lengths: Numbers, mean: float) -> Numbers:
    holding = len(word.keys)
    idf = max(math.log((total - holding + 0.5) / (holding + 0.5)) if holding <= total else 0.0, LEAST_IDF)
    normal: Numbers = K1 * (1 - B + B * lengths[word.keys] / max(mean, 1.0))
    return np.asarray(word.often / (word.often + normal), np.float32) * np.float32(idf * (K1 + 1))
