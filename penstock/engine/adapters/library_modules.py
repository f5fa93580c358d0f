"""Adapters of models that the `transformers` library runs: they change the linears that all layers have in common, or
put virtual tokens before prompts, whose rows take the place of what the model's embedding gives for them."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, nn

from penstock.engine.adapters.apply import LoraKernel
from penstock.engine.adapters.layout import EMBEDDING, AdapterCut, AdapterLayout, Rows, Site
from penstock.engine.backends.interface import AttentionBatch
from penstock.engine.kv.cache import KVCache
from penstock.engine.models.transformers.decoder import TransformersDecoder
from penstock.engine.models.transformers.hidden import HiddenStates, SequencePass, TokenPass
from penstock.engine.models.transformers.linears import EngineLinear, Shapes
from penstock.errors import ConfigError


def layout_of_modules(decoder: TransformersDecoder, *, by_output: bool = False) -> AdapterLayout:
    """See `layout_of`. Of the part of the model that this process has."""
    cut = cut_of_modules(decoder, by_output=by_output)
    sites = tuple(
        Site(site.attribute, site.modules, (_size(outputs[0]),), _size(inputs))
        for site, inputs, outputs in zip(cut.whole.sites, cut.inputs, cut.outputs, strict=True)
    )
    if cut.whole.virtual_only:
        sites = (*sites[:-1], cut.whole.sites[-1])
    count = cut.layers[1] - cut.layers[0]
    return AdapterLayout(sites, count, by_output, ends=False, virtual_only=cut.whole.virtual_only)


def cut_of_modules(decoder: TransformersDecoder, *, by_output: bool = False) -> AdapterCut:
    """The part of every adapter that belongs to the decoder's part of the model; all of it where that is whole."""
    stage, model = decoder.stage, decoder.config
    named = [(linear.layer, linear.module) for linear in decoder.linears if linear.layer is not None]
    if len(set(named)) < len(named):
        raise ConfigError(
            f"adapters: a {model.family} model has several lists of layers, whose linears have the same names in "
            "adapters; merge the adapter into the model"
        )
    layers = _shapes(decoder) if stage is None else stage.junction.shapes
    everywhere = set.intersection(*(set(shapes.items()) for shapes in layers.values())) if layers else set()
    if not everywhere or sorted(layers) != list(range(model.num_layers)):
        raise ConfigError(
            f"adapters: the layers of a {model.family} model have no linears in common that adapters could change; "
            "merge the adapter into the model"
        )
    # In the order of the first layer, so that the layout does not depend on hashing.
    common = [(name, shape) for name, shape in layers[0].items() if (name, shape) in everywhere]
    sites = tuple(Site(name, (name,), (outputs,), inputs) for name, (inputs, outputs) in common)
    inputs = [(0, site.inputs) for site in sites]
    outputs: list[Rows] = [(0, site.sizes[0]) for site in sites]
    cuts = decoder.cuts
    if cuts is not None:
        names = {linear.module: linear.name for linear in decoder.linears if linear.layer is not None}
        for index, site in enumerate(sites):
            name = names[site.attribute]
            inputs[index] = cuts.columns.get(name, inputs[index])
            outputs[index] = cuts.rows.get(name, outputs[index])
    embedding = decoder.embeds
    if embedding is not None:
        width, vocabulary = embedding.embedding_dim, model.vocab_size
        sites = (*sites, Site(EMBEDDING, (EMBEDDING,), (width,), vocabulary, end="embedding"))
        inputs.append((0, vocabulary))
        outputs.append((0, width))
    return AdapterCut(
        AdapterLayout(sites, model.num_layers, by_output, ends=False, virtual_only=embedding is not None),
        (0, model.num_layers) if stage is None else stage.junction.span,
        tuple(inputs),
        tuple((each,) for each in outputs),
    )


def _shapes(decoder: TransformersDecoder) -> dict[int, Shapes]:
    layers: dict[int, Shapes] = {}
    for linear in decoder.linears:
        if linear.layer is not None:
            layers.setdefault(linear.layer, {})[linear.module] = (linear.in_features, linear.out_features)
    return layers


def _size(span: Rows) -> int:
    if isinstance(span[0], tuple):
        return sum(_size(each) for each in span if isinstance(each, tuple))
    begin, end = span
    assert isinstance(begin, int) and isinstance(end, int)
    return end - begin


def adapt_modules(decoder: TransformersDecoder, kernel: LoraKernel, layout: AdapterLayout) -> TransformersDecoder:
    """See `adapt`. Both decoders have the same modules: adapters are switched on for the passes of this one."""
    before = 0 if decoder.stage is None else decoder.stage.junction.span[0]
    numbers = {site.attribute: index for index, site in enumerate(layout.sites)}
    for linear in decoder.linears:
        if linear.layer is not None and linear.module in numbers:
            linear.placed = layout.place(linear.layer - before, numbers[linear.module])
    return dataclasses.replace(decoder, hidden=_AdaptedPass(decoder.hidden, decoder.linears, kernel, decoder.embeds))


class _AdaptedPass:
    """See `HiddenStates`."""

    def __init__(
        self, plain: HiddenStates, linears: list[EngineLinear], kernel: LoraKernel, embedding: nn.Module | None
    ) -> None:
        self.sites = plain.sites
        self.states = plain.states
        self._embedding = embedding
        self._plain = plain
        self._linears = [linear for linear in linears if linear.placed is not None]
        self._kernel = kernel

    def __call__(self, entry: Tensor, batch: AttentionBatch, kv: KVCache) -> Tensor:
        for linear in self._linears:
            linear.kernel = self._kernel
        divided = self._plain if isinstance(self._plain, SequencePass | TokenPass) else None
        if divided is not None:
            slots = self._kernel.token_slots.cpu().numpy()
            divided.before = partial(self._begin, entry, slots)
        rows, hook = self._kernel.banks.rows, None
        self._ids = entry
        if rows is not None and self._embedding is not None:
            hook = self._embedding.register_forward_hook(self._with_rows)
            entry = rows.known(entry)
        try:
            return self._plain(entry, batch, kv)
        finally:
            if hook is not None:
                hook.remove()
            for linear in self._linears:
                linear.kernel = None
            if divided is not None:
                divided.before = None

    def _begin(self, ids: Tensor, slots: np.ndarray, begin: int, end: int) -> None:
        """Some of the step's tokens come next."""
        self._ids = ids[begin:end]
        self._kernel.begin(slots[begin:end])

    def _with_rows(self, module: nn.Module, args: Any, embedded: Tensor) -> Tensor:
        """What the embedding gives, with the rows of virtual tokens."""
        assert self._kernel.banks.rows is not None
        embedded = embedded.clone()
        self._kernel.banks.rows.replace_embedding(self._ids, embedded.view(len(self._ids), -1))
        return embedded
