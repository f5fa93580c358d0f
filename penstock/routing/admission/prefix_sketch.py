"""An estimate of how much of a prompt is cached, from whether prompts with the same beginning were seen recently.

Keeps four digests per prompt, of its first 64, 256, 1024 and 4096 tokens: coarse, but cheap enough for every request,
and only used to prefer cached requests and to expect less work and memory of them.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

LENGTHS = (64, 256, 1024, 4096)
MOST = 65_536
"""Digests kept; the least recently seen are dropped first."""


class PrefixSketch:
    """Digests of recently seen prompt prefixes."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def cached(self, tokens: list[int], salt: str) -> int:
        """The longest known prefix of this prompt, in tokens; remembers the prompt."""
        if len(tokens) < LENGTHS[0]:
            return 0
        digest = blake2b(salt.encode(), digest_size=8)
        start = 0
        names: list[bytes] = []
        for length in LENGTHS:
            if len(tokens) < length:
                break
            digest.update(array("I", tokens[start:length]))
            start = length
            names.append(digest.digest())
        return self.known(names)

    def known(self, names: Sequence[bytes]) -> int:
        """The same for a prompt whose first prefixes, one for each of `LENGTHS`, have these names."""
        known = 0
        for name, length in zip(names, LENGTHS, strict=False):
            if name in self._seen:
                known = length
                self._seen.move_to_end(name)
            else:
                self._seen[name] = None
        while len(self._seen) > self._most:
            self._seen.popitem(last=False)
        return known
