"""A prompt through a decoder that was just loaded, and what it shows of numbers that are about to be rounded.

Keys of an int8 cache are smoothed (`key_smoothing`). Weights kept in int8 by columns for matrix tiles are
rounded more finely at those inputs that are large: what their rounding adds to outputs is weighed by the inputs.
Both are properties of the weights: tokens drawn at random show them as well as a text.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Final

import torch
from torch import Tensor

from penstock.engine.backends.cpu.quant_linear import QuantLinear
from penstock.engine.backends.interface import AttentionBatch
from penstock.engine.kv.cache import KVCache
from penstock.engine.kv.kinds import PagedKVCache
from penstock.engine.models.decoder import Decoder, DecoderLayer
from penstock.engine.models.key_smoothing import key_smoothing
from penstock.engine.models.layers.attention import Attention

_TOKENS: Final = 128
_BLOCK_SIZE: Final = 16
_STRETCHING: Final = 0.25
"""Of the ratio between inputs, in logarithms: a larger one leaves too few steps for the rest of a column."""
_MOST: Final = 16.0


@torch.inference_mode()
def settle(decoder: Decoder, *, int8_cache: bool) -> Decoder:
    """The same decoder with what a trial shows put to use; itself where there is nothing to be rounded."""
    linears = (linear for part in (*(layer.linears for layer in decoder.layers), (decoder.head,)) for linear in part)
    watched = [_Watched(linear) for linear in linears if isinstance(linear, QuantLinear) and linear.columns is not None]
    if not watched and not int8_cache:
        return decoder
    keys = _keys_of_a_prompt(decoder)
    for linear in watched:
        linear.finish()
    if not int8_cache:
        return decoder
    layers = [_smoothed(layer, seen) for layer, seen in zip(decoder.layers, keys, strict=True)]
    return dataclasses.replace(decoder, layers=layers)


def _smoothed(layer: DecoderLayer, keys: Tensor | None) -> DecoderLayer:
    if keys is None or not isinstance(layer.mixer, Attention):
        return layer
    mixer = dataclasses.replace(layer.mixer, key_smoothing=key_smoothing(keys, layer.mixer))
    return dataclasses.replace(layer, mixer=mixer)


def _keys_of_a_prompt(decoder: Decoder) -> list[Tensor | None]:
    """By layer: float32 [tokens, kv_heads, head_dim], None where a layer has no keys."""
    config, device = decoder.config, decoder.embedding.device
    tokens = min(_TOKENS, decoder.max_positions)
    shape = decoder.cache_shape(_BLOCK_SIZE, decoder.embedding.dtype)
    kv = KVCache(shape, -(-tokens // _BLOCK_SIZE) + 1, device, num_rows=1)
    chance = random.Random(0)
    ids = torch.tensor([chance.randrange(config.vocab_size) for _ in range(tokens)], device=device)
    hidden = decoder.forward(ids, AttentionBatch.of_one(tokens, _BLOCK_SIZE, device), kv)
    if isinstance(decoder.head, QuantLinear) and decoder.head.watcher is not None:
        decoder.head.watcher(hidden)
    return [_keys_in(cache, tokens) if isinstance(cache, PagedKVCache) else None for cache in kv.layers]


def _keys_in(cache: PagedKVCache, tokens: int) -> Tensor:
    return cache.k[1:].transpose(1, 2).flatten(0, 1)[:tokens].float()


class _Watched:
    """A linear whose inputs are being looked at."""

    def __init__(self, linear: QuantLinear) -> None:
        self._linear = linear
        self._squares = torch.zeros(linear.in_features)
        linear.watcher = self._see

    def _see(self, x: Tensor) -> None:
        self._squares += x.float().square().sum(0)

    def finish(self) -> None:
        self._linear.watcher = None
        least = float(self._squares.max()) * 1e-12
        if not 0 < least < torch.inf:
            return  # an expert that no token chose
        sizes = self._squares.clamp_min(least).log() * (_STRETCHING / 2)
        self._linear.stretch_columns((sizes - sizes.mean()).exp().clamp(1 / _MOST, _MOST))
