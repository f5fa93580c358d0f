"""The watermark of sampled text: the Gumbel-max scheme (Aaronson 2022), also called exponential minimum sampling.

A token is always the argmax of scaled logits plus Gumbel noise. Without a watermark the noise is a hash of (seed,
position, token); with one it is a keyed hash of (the last `WIDTH` tokens, variant, token). Nobody without the key can
tell the difference, and the distribution of each token is the model's own; whoever has the key sees that the chosen
tokens have large noise. Two things keep text natural:

- the seed chooses one of `VARIANTS` keys, so that different seeds give different texts; a detector tries them all;
- where the same tokens occur again in a text, the noise there is the seed's: equal contexts do not force equal tokens.

Invariant: the noise of a position is a function of the key, the seed and the tokens before it. So it does not matter
which step, batch, draft or engine samples it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from penstock.engine.noise import row_keys

WIDTH = 4
"""Tokens of context that the noise depends on."""
VARIANTS = 256
KEY_BYTES = 32


def context_hash(key: bytes, context: Seq[int]) -> int:
    """64 bits of keyed BLAKE2b over the tokens of a context."""
    data = np.array(context, "<u4").tobytes()
    return int.from_bytes(blake2b(data, digest_size=8, key=key).digest(), "little")


def noise_keys(hashes: npt.NDArray[np.uint64], variants: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """int64 [variants, contexts]: the noise keys of contexts under variants of the key."""
    return row_keys(hashes[None, :], variants[:, None])


class WatermarkState:
    """The noise of one sequence."""

    __slots__ = ("_begin", "_counted", "_key", "_seen", "_variant", "drafted")

    def __init__(self, key: bytes, seed: int, begin: int) -> None:
        """`begin`: where the generated text begins in the sequence."""
        self._key = key
        self._variant = np.array([seed % VARIANTS])
        self._begin = begin
        self._counted = begin
        """Positions before this one are in `_seen`."""
        self._seen: set[int] = set()
        self.drafted: Seq[int] = ()
        """Tokens that a draft model has proposed behind the sequence, while it is asked for more."""

    def keys(
        self, tokens: Seq[int], ahead: Seq[int], first: int, plain: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Noise keys of the positions from `first` on, as many as `plain` has: the seed's own keys, which stay where a
        context occurs again. `ahead`: tokens assumed behind `tokens`."""
        known = len(tokens)
        for position in range(self._counted, known):
            self._seen.add(self._hash(tokens, (), position))
        self._counted = max(self._counted, known)
        found = plain.copy()
        assumed: set[int] = set()
        for place in range(len(plain)):
            position = first + place
            if position < known:
                continue  # sampled again only because something behind it is; not used
            named = self._hash(tokens, ahead, position)
            if named not in self._seen and named not in assumed:
                found[place] = noise_keys(np.array([named], np.uint64), self._variant)[0, 0]
                assumed.add(named)
        return found

    def _hash(self, tokens: Seq[int], ahead: Seq[int], position: int) -> int:
        start = max(position - WIDTH, 0)
        known = len(tokens)
        if position <= known:
            return context_hash(self._key, tokens[start:position])
        return context_hash(self._key, [*tokens[start:known], *ahead[max(start - known, 0) : position - known]])
