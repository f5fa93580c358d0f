"""Long prompts: which steps have their keys gathered (`kernels.gathered_prefix`), and the memory that takes.

Only the host knows how long contexts are. Captured steps have room for contexts of `CAPTURED_CONTEXT` tokens in all;
with longer ones a step is launched. Chunks that are short enough to be captured gather from quantized caches only: over
a 16-bit one they would not be faster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from penstock.engine.backends.interface import HeadLayout
from penstock.engine.batch import Chunk
from penstock.engine.config import LONG_CHUNK as LONG_CHUNK
from penstock.engine.kv.cache import KVCache
from penstock.engine.kv.kinds import PagedKVCache
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.layers.attention import Attention
from penstock.engine.models.model_config import ModelConfig
from penstock.errors import ConfigError

CAPTURED_CONTEXT = 32768
"""Tokens that the prompts of a captured step with gathered keys see at most, together."""
FP8_HEAD = 128
"""Size of the heads that attend in FP8 (`kernels.hopper_prefill`, which cannot be imported everywhere)."""


@runtime_checkable
class _GatheringOps(Protocol):
    def gathered_bytes(self, layout: HeadLayout, dtype: torch.dtype) -> int:
        """What keys and values gathered from a cache of `dtype` take at most; 0 where none are."""
        ...


def gathered_bytes(decoder: Decoder, kv: KVCache, context: int = 0) -> int:
    """What gathered keys and values take at most, beside what a step over a short context needs; 0 where none are.
    `context`: only of layers that see so many tokens. Those with a window have keys gathered where no context is longer
    than it."""
    return max((_bytes_of(mixer, cache, context) for mixer, cache in _attention(decoder, kv)), default=0)


def room_for_gathered(decoder: Decoder, kv: KVCache) -> int:
    """What is left free for them; captured steps have room of their own."""
    captured = max((_bytes_of(mixer, cache, CAPTURED_CONTEXT) for mixer, cache in _quantized(decoder, kv)), default=0)
    return gathered_bytes(decoder, kv) + captured


def check_fp8_attention(model: ModelConfig, dtype: torch.dtype, kv_dtype: torch.dtype, longest_chunk: int) -> None:
    """Refuse `fp8_attention` where no layer of a model would attend in FP8. `longest_chunk`: most tokens of a prompt in
    one step."""
    if kv_dtype != torch.float8_e4m3fn:
        raise ConfigError("fp8_attention: true multiplies keys and values as they are kept: set kv_dtype: fp8 too")
    if dtype.itemsize != 2:
        raise ConfigError("fp8_attention: true is for models in bfloat16 or float16: set dtype, or remove it")
    if longest_chunk < LONG_CHUNK:
        raise ConfigError(
            f"fp8_attention: true is for chunks of {LONG_CHUNK} prompt tokens and more, and no step has more than "
            f"{longest_chunk}: raise token_budget or max_model_len, or remove it"
        )
    if not attends_in_fp8(model):
        raise ConfigError(
            f"fp8_attention: true is for attention with heads of {FP8_HEAD}, without latents, choices of blocks, "
            "soft caps, sinks or windows below "
            f"{LONG_CHUNK} tokens, which no layer of this model has: remove it"
        )


def attends_in_fp8(model: ModelConfig) -> bool:
    """Whether some layer has attention that `hopper_prefill` computes."""
    if model.latent is not None or model.compression is not None or model.block_index is not None:
        return False
    return model.attention_softcap is None and any(_attends_in_fp8(model, layer) for layer in range(model.num_layers))


def _attends_in_fp8(model: ModelConfig, layer: int) -> bool:
    if model.only and model.only[layer] == "feed_forward":
        return False
    delta, mamba, short, sparse = model.delta, model.mamba, model.short_conv, model.sparse_blocks
    replaced = [part.layers for part in (delta, short, sparse) if part is not None]
    if mamba is not None and mamba.beside is None:
        replaced.append(mamba.layers)
    heads, window = model.heads_in(layer)[1], model.windows[layer]
    if window is not None and window < LONG_CHUNK:
        return False
    return heads == FP8_HEAD and not model.has_sinks(layer) and not any(layers[layer] for layers in replaced)


class Gathering:
    """Which prompt steps can be captured, of a decoder some of whose layers may gather keys."""

    def __init__(self, decoder: Decoder, kv: KVCache) -> None:
        self._gathers = any(_bytes_of(mixer, cache, CAPTURED_CONTEXT) > 0 for mixer, cache in _quantized(decoder, kv))

    def most_places(self, chunks: Sequence[Chunk]) -> float:
        """Of captured steps, those with so many places for prompt tokens, or fewer, can run these prompts."""
        if not self._gathers:
            return math.inf
        seen = sum(chunk.start + chunk.length for chunk in chunks)
        return math.inf if seen <= CAPTURED_CONTEXT else LONG_CHUNK - 1

    def total_context(self, places: int, prompts: int) -> int | None:
        """Tokens that the prompts of a step captured with `places` may see in all, padding and unused ones included;
        None: nobody knows."""
        return CAPTURED_CONTEXT + places + prompts if self._gathers and places >= LONG_CHUNK else None


def _attention(decoder: Decoder, kv: KVCache) -> list[tuple[Attention, PagedKVCache]]:
    return [
        (layer.mixer, cache)
        for layer, cache in zip(decoder.layers, kv.layers, strict=False)
        if isinstance(layer.mixer, Attention) and isinstance(cache, PagedKVCache)
    ]


def _quantized(decoder: Decoder, kv: KVCache) -> list[tuple[Attention, PagedKVCache]]:
    return [(mixer, cache) for mixer, cache in _attention(decoder, kv) if cache.k.dtype.itemsize == 1]


def _bytes_of(mixer: Attention, cache: PagedKVCache, context: int) -> int:
    ops, window = mixer.attention_ops, mixer.heads.window
    if mixer.sinks is not None or not isinstance(ops, _GatheringOps) or (window is not None and window < context):
        return 0
    return ops.gathered_bytes(mixer.heads, cache.k.dtype)
