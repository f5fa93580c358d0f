"""Calibration after loading: a prompt through the decoder shows the numbers that are about to be rounded.

Keys of an int8 cache are smoothed (`key_smoothing`); a backend may adapt the linears it keeps in int8 to their inputs.
Both depend on the weights alone: random tokens show them as well as a text. Each of several ranks adapts its own part
to its part of the same prompt, which all run together; it may keep what it found in a file, for a process that takes
its place later, when the others are past it.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.engine.backends.backend import Backend, InputObserver
from penstock.engine.backends.interface import FP8, AttentionBatch, KeySmoothing
from penstock.engine.backends.one_thread import one_thread
from penstock.engine.kv.cache import KVCache
from penstock.engine.kv.kinds import PagedKVCache
from penstock.engine.models.decoder import Decoder, DecoderLayer
from penstock.engine.models.key_smoothing import key_smoothing, mean_rotation
from penstock.engine.models.layers.attention import Attention

_TOKENS: Final = 128
_BLOCK_SIZE: Final = 16

Forward = Callable[[Tensor, AttentionBatch, KVCache], Tensor]
"""See `Decoder.forward`."""


@torch.inference_mode()
def calibrate(
    decoder: Decoder,
    backend: Backend,
    *,
    int8_cache: bool,
    together: Forward | None = None,
    kept: Path | None = None,
) -> Decoder:
    """The decoder with what calibration found; the same one where nothing is to be rounded.

    `together`: runs the prompt through the parts that all ranks have, of which `decoder` is one. Then it runs in any
    case, since another rank may have something to round. `kept`: a file for what was found; where there is one, nothing
    runs.
    """
    linears = (linear for part in (*(layer.linears for layer in decoder.layers), (decoder.head,)) for linear in part)
    observers = backend.input_observers(linears)
    if not observers and not int8_cache and together is None:
        return decoder
    if kept is not None and kept.exists():
        smoothing = _restore(kept, observers, decoder)
    else:
        keys = _keys_of_a_prompt(decoder, observers, together or decoder.forward)
        smoothing = _smoothings(decoder.layers, keys) if int8_cache else [None] * len(keys)
        if kept is not None:
            _keep(kept, observers, smoothing)
    with one_thread():
        for observer in observers:
            observer.finish()
    if not int8_cache:
        return decoder
    layers = [_smoothed(layer, found) for layer, found in zip(decoder.layers, smoothing, strict=True)]
    return dataclasses.replace(decoder, layers=layers)


def _smoothings(layers: Iterable[DecoderLayer], keys: Iterable[Tensor | None]) -> list[KeySmoothing | None]:
    found: list[KeySmoothing | None] = []
    rotations: dict[int, Tensor] = {}  # layers share tables
    with one_thread():
        for layer, seen in zip(layers, keys, strict=True):
            if seen is None or not isinstance(layer.mixer, Attention):
                found.append(None)
                continue
            table = layer.mixer.cos_sin
            if id(table) not in rotations:
                rotations[id(table)] = mean_rotation(table)
            found.append(key_smoothing(seen, layer.mixer, rotations[id(table)]))
    return found


def _smoothed(layer: DecoderLayer, smoothing: KeySmoothing | None) -> DecoderLayer:
    if smoothing is None:
        return layer
    assert isinstance(layer.mixer, Attention)
    return dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, key_smoothing=smoothing))


def _keep(file: Path, observers: list[InputObserver], smoothing: list[KeySmoothing | None]) -> None:
    tensors = {f"squares.{index}": observer.squares for index, observer in enumerate(observers)}
    for index, found in enumerate(smoothing):
        if found is not None:
            tensors |= {f"centre.{index}": found.centre, f"scale.{index}": found.scale}
    begun = file.with_suffix(".part")
    save_file(tensors, begun)
    begun.rename(file)


def _restore(file: Path, observers: list[InputObserver], decoder: Decoder) -> list[KeySmoothing | None]:
    tensors = load_file(file, device=str(decoder.embedding.device))
    for index, observer in enumerate(observers):
        observer.squares = tensors[f"squares.{index}"]
    smoothed = (f"centre.{index}" in tensors for index in range(len(decoder.layers)))
    return [
        KeySmoothing(tensors[f"centre.{index}"], tensors[f"scale.{index}"]) if found else None
        for index, found in enumerate(smoothed)
    ]


def _keys_of_a_prompt(decoder: Decoder, observers: list[InputObserver], forward: Forward) -> list[Tensor | None]:
    """By layer: float32 [tokens, kv_heads, head_dim], None where a layer has no keys."""
    config, device = decoder.config, decoder.embedding.device
    tokens = min(_TOKENS, decoder.max_positions)
    # Layers made for an fp8 cache have its scales, and run with no other.
    fp8 = any(isinstance(layer.mixer, Attention) and layer.mixer.kv_scales is not None for layer in decoder.layers)
    shape = decoder.cache_shape(_BLOCK_SIZE, FP8 if fp8 else decoder.embedding.dtype)
    kv = KVCache(shape, -(-tokens // _BLOCK_SIZE) + 1, device, num_states=2)
    chance = random.Random(0)
    ids = torch.tensor([chance.randrange(config.vocab_size) for _ in range(tokens)], device=device)
    hidden = forward(ids, AttentionBatch.of_one(tokens, _BLOCK_SIZE, device), kv)
    for observer in observers:
        if observer.linear is decoder.head:
            observer.see(hidden)
    return [_keys_in(cache, tokens) if isinstance(cache, PagedKVCache) else None for cache in kv.layers]


def _keys_in(cache: PagedKVCache, tokens: int) -> Tensor:
    return cache.k[1:].transpose(1, 2).flatten(0, 1)[:tokens].float()
