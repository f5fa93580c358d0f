"""Adapters of models that the `transformers` library runs: they change the linears that all layers have in common."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from penstock.engine.adapters.apply import LoraKernel
from penstock.engine.adapters.layout import AdapterLayout, Site
from penstock.engine.backends.interface import AttentionBatch
from penstock.engine.kv.cache import KVCache
from penstock.engine.models.transformers.decoder import TransformersDecoder
from penstock.engine.models.transformers.hidden import HiddenStates
from penstock.engine.models.transformers.linears import EngineLinear
from penstock.errors import ConfigError

Shapes = dict[str, tuple[int, int]]
"""Of a layer's linears: inputs and outputs, by the name below the layer."""


def layout_of_modules(decoder: TransformersDecoder, *, by_output: bool = False) -> AdapterLayout:
    """See `layout_of`."""
    layers: dict[int, Shapes] = {}
    for linear in decoder.linears:
        if linear.layer is not None:
            shapes = layers.setdefault(linear.layer, {})
            shapes[linear.module] = (linear.in_features, linear.out_features)
    everywhere = set.intersection(*(set(shapes.items()) for shapes in layers.values())) if layers else set()
    if not everywhere or sorted(layers) != list(range(decoder.config.num_layers)):
        raise ConfigError(
            f"adapters: the layers of a {decoder.config.family} model have no linears in common that adapters could "
            "change; merge the adapter into the model"
        )
    # In the order of the first layer, so that the layout does not depend on hashing.
    common = [(name, shape) for name, shape in layers[0].items() if (name, shape) in everywhere]
    sites = tuple(Site(name, (name,), (outputs,), inputs) for name, (inputs, outputs) in common)
    return AdapterLayout(sites, decoder.config.num_layers, by_output)


def adapt_modules(decoder: TransformersDecoder, kernel: LoraKernel, layout: AdapterLayout) -> TransformersDecoder:
    """See `adapt`. Both decoders have the same modules: adapters are switched on for the passes of this one."""
    numbers = {site.attribute: index for index, site in enumerate(layout.sites)}
    for linear in decoder.linears:
        if linear.layer is not None and linear.module in numbers:
            linear.placed = layout.place(linear.layer, numbers[linear.module])
    return dataclasses.replace(decoder, hidden=_AdaptedPass(decoder.hidden, decoder.linears, kernel))


class _AdaptedPass:
    """See `HiddenStates`."""

    def __init__(self, plain: HiddenStates, linears: list[EngineLinear], kernel: LoraKernel) -> None:
        self.sites = plain.sites
        self._plain = plain
        self._linears = [linear for linear in linears if linear.placed is not None]
        self._kernel = kernel

    def __call__(self, token_ids: Tensor, batch: AttentionBatch, kv: KVCache) -> Tensor:
        for linear in self._linears:
            linear.kernel = self._kernel
        try:
            return self._plain(token_ids, batch, kv)
        finally:
            for linear in self._linears:
                linear.kernel = None
