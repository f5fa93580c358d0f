"""Names of KV blocks for prompts made of segments.

The engine names a block by a digest of every token up to its end (`engine.kv.block_hash`); the pool and the router only
compare names. Here the name is made of the segments up to the block's end and of its index, which is the same in the
only respect that counts: two blocks have equal names if and only if their texts, and all text before them, are equal,
as far as segments tell. A name is an integer, and a segment of a thousand tokens costs one hash.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from penstock.simulation.arrival import Segment

_INDEX_BITS = 24
_MASK = (1 << 61) - 1


def segment_names(segments: Iterable[Segment], block_size: int, root: int = 0) -> list[bytes]:
    """Names of every full block of a text; `root`: blocks of different roots are never equal (the cache salt)."""
    names: list[int] = []
    prefix, position = root, 0
    for id, tokens in segments:
        if tokens <= 0:
            continue
        # Where the segment begins tells how long the one before it was, of which only a part may have been used.
        prefix = hash((prefix, position, id)) & _MASK
        base = prefix << _INDEX_BITS
        end = position + tokens
        names.extend(range(base + position // block_size, base + end // block_size))
        position = end
    return cast("list[bytes]", names)
