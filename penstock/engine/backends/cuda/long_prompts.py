"""Long prompts over a quantized cache: which steps have their keys gathered (`kernels.gathered_prefix`), and the memory
that takes.

Only the host knows how long contexts are, so that such steps are launched, not captured.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from penstock.engine.backends.interface import HeadLayout
from penstock.engine.batch import Chunk
from penstock.engine.kv.cache import KVCache
from penstock.engine.kv.kinds import PagedKVCache
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.layers.attention import Attention

LONG_CONTEXT = 16384
"""Tokens that a prompt of at least `LONG_CHUNK` new ones sees: its attention takes longer than launching the step."""
LONG_CHUNK = 512


@runtime_checkable
class _GatheringOps(Protocol):
    def gathered_bytes(self, layout: HeadLayout, dtype: torch.dtype) -> int:
        """What keys and values gathered from a cache of `dtype` take at most; 0 where none are."""
        ...


def gathered_bytes(decoder: Decoder, kv: KVCache, context: int = 0) -> int:
    """What gathered keys and values take at most, beside what a step over a short context needs; 0 where none are.
    `context`: only of layers that see so many tokens. Those with a window have keys gathered where no context is longer
    than it."""
    return max(
        (
            _bytes_of(layer.mixer, cache, context)
            for layer, cache in zip(decoder.layers, kv.layers, strict=False)
            if isinstance(layer.mixer, Attention) and isinstance(cache, PagedKVCache)
        ),
        default=0,
    )


def is_long(chunk: Chunk) -> bool:
    return chunk.length >= LONG_CHUNK and chunk.start + chunk.length >= LONG_CONTEXT


def _bytes_of(mixer: Attention, cache: PagedKVCache, context: int) -> int:
    ops, window = mixer.attention_ops, mixer.heads.window
    if mixer.sinks is not None or not isinstance(ops, _GatheringOps) or (window is not None and window < context):
        return 0
    return ops.gathered_bytes(mixer.heads, cache.k.dtype)
