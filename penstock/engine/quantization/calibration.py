"""Running a model layer by layer over calibration text, and observing the inputs of its linears.

One layer's matrices are in memory at a time: all the text goes through a layer before the next one is read. A layer's
inputs are observed first, then the caller quantizes it, and the text passes through the quantized layer, so that later
layers are calibrated on the inputs they will get. Models that run layers several times are observed as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.engine.backends.interface import AttentionBatch
from penstock.engine.backends.select import pick_backend
from penstock.engine.kv.cache import CacheShape, KVCache
from penstock.engine.kv.kinds import BothKinds, OfLayer
from penstock.engine.models.build import build_decoder
from penstock.engine.models.decoder import Decoder, DecoderLayer
from penstock.engine.models.families import read_config
from penstock.engine.models.layers.composed import StackedLinear
from penstock.engine.models.layers.experts import ApartExperts, ExpertMlp, NarrowExperts, SharedAndRouted
from penstock.engine.models.weights import Weights

_BLOCK_SIZE = 16


class ObservedLinear:
    """Dense float32 weights that can be replaced, and statistics of their inputs."""

    def __init__(self, weights: Weights, names: dict[str, int], inputs: int, bias: Tensor | None) -> None:
        self.names = names
        self.inputs = inputs
        self.bias = bias
        self.weight_bytes = 0
        self.observing = False
        self._source = weights
        self._weight: Tensor | None = None
        self._hessian: Tensor | None = None
        self._magnitude: Tensor | None = None
        self.tokens = 0

    def load(self, device: torch.device) -> None:
        parts = [self._source.tensor(name, device).to(device=device, dtype=torch.float32) for name in self.names]
        self._weight = torch.cat(parts)
        self.weight_bytes = self._weight.numel() * 4

    def drop(self) -> None:
        self._weight = self._hessian = self._magnitude = None
        self.weight_bytes = 0

    @property
    def weight(self) -> Tensor:
        assert self._weight is not None, "not loaded"
        return self._weight

    @weight.setter
    def weight(self, value: Tensor) -> None:
        self._weight = value

    @property
    def hessian(self) -> Tensor:
        """Mean of x x^T over the inputs; the identity where no token came by (an expert not chosen)."""
        if self._hessian is None:
            return torch.eye(self.inputs, device=self.weight.device)
        return self._hessian / self.tokens

    @property
    def magnitude(self) -> Tensor:
        """Mean |x| of each input channel."""
        if self._magnitude is None:
            return torch.ones(self.inputs, device=self.weight.device)
        return self._magnitude / self.tokens

    def rescale_inputs(self, scales: Tensor) -> None:
        """The inputs will come divided by `scales` [in]: weights and statistics follow."""
        self.weight = self.weight * scales
        if self._hessian is not None and self._magnitude is not None:
            self._hessian = self._hessian / scales / scales[:, None]
            self._magnitude = self._magnitude / scales

    def __call__(self, x: Tensor) -> Tensor:
        if self.observing and x.shape[0]:
            square, size = x.T @ x, x.abs().sum(0)
            self._hessian = square if self._hessian is None else self._hessian.add_(square)
            self._magnitude = size if self._magnitude is None else self._magnitude.add_(size)
            self.tokens += x.shape[0]
        return F.linear(x, self.weight, self.bias)


Change = Callable[[DecoderLayer, Sequence[ObservedLinear]], DecoderLayer]
"""Given a layer and its linears, with statistics: replace their weights, and return the layer to go on with."""


@torch.inference_mode()
def calibrate(
    weights: Weights, windows: Sequence[Sequence[int]], change: Change, device: torch.device, threads: int
) -> Iterator[int]:
    """Take all `windows` of token ids through the model, and each layer through `change`; yields the layers done."""
    model = read_config(weights.config)
    longest = max(map(len, windows))
    decoder = build_decoder(
        weights,
        model,
        pick_backend(device, threads).observable(),
        dtype=torch.float32,
        max_positions=longest,
        quantize=ObservedLinear,
    )
    blocks = -(-longest // _BLOCK_SIZE)
    tokens = [torch.tensor(list(ids), device=device) for ids in windows]
    streams = [decoder.embed(ids) for ids in tokens]
    by_tokens = model.ngrams is not None or (model.moe is not None and any(model.moe.hashed))

    if model.cycles is not None:
        yield from _all_at_once(decoder, tokens, change, device)
        return

    sources = {_source(layer) for layer in decoder.layers}
    kept: dict[int, list[KVCache]] = {}
    """Of layers whose keys and values upper layers attend to: one for each window."""
    chosen: list[Any] = [None] * len(windows)
    """What the last indexer below has chosen in each window: layers without one attend to the same tokens."""

    def cache_of(layer: DecoderLayer) -> KVCache:
        shape = replace(decoder, layers=[layer]).cache_shape(_BLOCK_SIZE, torch.float32)
        return KVCache(shape, blocks + 1, device, num_states=2)

    def shared_with(layer: DecoderLayer, below: KVCache) -> KVCache:
        """The cache of a layer that attends to what one below it keeps, and may have index keys of its own."""
        kind, shared = layer.mixer.cache_kind(_BLOCK_SIZE, torch.float32), copy(below)
        shared.layers = [below.first_of(0)]
        if isinstance(kind, BothKinds):
            own = KVCache(CacheShape((kind.second,), _BLOCK_SIZE), blocks + 1, device)
            shared.layers = [(shared.layers[0], own.layers[0])]
        return shared

    def run(index: int, layer: DecoderLayer, update: bool) -> None:
        alone, source = replace(decoder, layers=[layer]), _source(layer)
        if source is not None:
            caches = [shared_with(layer, below) for below in kept[source]]
        elif index in sources:
            caches = kept[index] = [cache_of(layer) for _ in streams]
        else:
            caches = [cache_of(layer)] * len(streams)
        for at, (ids, stream, kv) in enumerate(zip(tokens, streams, caches, strict=True)):
            if by_tokens:
                alone.embed(ids)  # tells the layer which experts these tokens visit, or their n-grams
            residual = stream if update else _copy(stream)
            batch = AttentionBatch.of_one(len(stream), _BLOCK_SIZE, device)
            batch.chosen = chosen[at]
            alone.run(residual, batch, kv)
            if update:
                chosen[at] = batch.chosen

    for index, layer in enumerate(decoder.layers):
        linears = observed(layer)
        for linear in linears:
            linear.load(device)
            linear.observing = True
        run(index, layer, update=False)
        for linear in linears:
            linear.observing = False
        run(index, change(layer, linears), update=True)
        for linear in linears:
            linear.drop()
        yield index + 1


def _all_at_once(decoder: Decoder, tokens: Sequence[Tensor], change: Change, device: torch.device) -> Iterator[int]:
    """Layers that run several times read what later ones have computed: all are observed before any is changed."""
    layers = list({id(layer): layer for layer in decoder.layers}.values())
    linears = [observed(layer) for layer in layers]
    for linear in chain.from_iterable(linears):
        linear.load(device)
        linear.observing = True
    shape = decoder.cache_shape(_BLOCK_SIZE, torch.float32)
    kv = KVCache(shape, -(-max(map(len, tokens)) // _BLOCK_SIZE) + 1, device, num_states=2)
    for ids in tokens:
        decoder.forward(ids, AttentionBatch.of_one(len(ids), _BLOCK_SIZE, device), kv)
    for done, (layer, own) in enumerate(zip(layers, linears, strict=True), start=1):
        change(layer, own)
        for linear in own:
            linear.drop()
        yield len(decoder.layers) * done // len(layers)


def observed(layer: DecoderLayer) -> list[ObservedLinear]:
    """The matrices of a layer that are quantized; those of its experts come last."""
    found, inner = [*layer.mixer.linears, *layer.feed_forward.linears], layer.feed_forward
    while isinstance(inner, SharedAndRouted | ApartExperts | NarrowExperts):
        inner = inner.feed_forward
    if isinstance(inner, ExpertMlp):
        found += [linear for expert in inner.experts for linear in expert.linears]
    parts = [part for linear in found for part in (linear.parts if isinstance(linear, StackedLinear) else (linear,))]
    return [part for part in parts if isinstance(part, ObservedLinear)]


def _source(layer: DecoderLayer) -> int | None:
    """The layer whose keys and values this one attends to, if it has none of its own."""
    kind = layer.mixer.cache_kind(_BLOCK_SIZE, torch.float32)
    kind = kind.first if isinstance(kind, BothKinds) else kind
    return kind.layer if isinstance(kind, OfLayer) else None


def _copy(stream: Tensor) -> Tensor:
    """With what is attached to it: what layers are told of the tokens."""
    copied = stream.clone()
    copied.__dict__.update(stream.__dict__)
    return copied
