"""How n-grams of token ids are hashed to rows of a table; see `layers.ngrams`."""

from __future__ import annotations

import math

from penstock.engine.models.model_config import NgramConfig

_WORD = (1 << 64) - 1


def multipliers(config: NgramConfig, vocab: int, index: int) -> list[int]:
    """Odd factors of the ids of an n-gram's tokens, the last token's first; `index`: of the layer among those that have
    n-grams. They are drawn with SplitMix64."""
    bound, seed, step = max(1, ((1 << 63) - 1) // max(vocab, 1) // 2), config.seed + 10007 * index, 0x9E3779B97F4A7C15
    found = []
    for place in range(1, config.size + 1):
        word = (seed + step * (place + 1)) & _WORD
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
        found.append(2 * ((word ^ (word >> 31)) % bound) + 1)
    return found


def primes_from(start: int, count: int) -> list[int]:
    """The first primes that are not below `start`."""
    found: list[int] = []
    value = max(2, start)
    while len(found) < count:
        if value == 2 or (value % 2 and all(value % part for part in range(3, math.isqrt(value) + 1, 2))):
            found.append(value)
        value += 1
    return found


def head_sizes(config: NgramConfig, index: int) -> list[int]:
    """Rows of the table that each head hashes to: no two heads of a model have as many."""
    heads = (config.size - 1) * config.heads
    return primes_from(config.rows, (index + 1) * heads)[index * heads :]


def table_rows(config: NgramConfig, index: int) -> int:
    """Rows of a layer's table."""
    return math.ceil(sum(head_sizes(config, index)) / config.multiple) * config.multiple
