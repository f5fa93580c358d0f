"""Applying adapters to a decoder, from outside.

`adapt` makes a second decoder that shares every weight with the first, in which the step's adapters are added to every
linear: behind it, or, where the kernel can, beside it or inside its launch. Steps without adapters run the first one,
so adapters cost them nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from functools import reduce
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
from torch import Tensor

from penstock.engine.adapters.delta_nets import adapted_linears
from penstock.engine.adapters.ends import adapt_ends
from penstock.engine.adapters.experts import adapt_experts
from penstock.engine.adapters.input_gates import adapt_input_gates
from penstock.engine.adapters.kernel import AdaptedLinear
from penstock.engine.adapters.kernel import LoraKernel as LoraKernel
from penstock.engine.adapters.latent import AbsorbedAdapters
from penstock.engine.adapters.layout import (
    LATENT_KEYS,
    LATENT_VALUES,
    MIXER_GATE_IN,
    ROUTER,
    AdapterLayout,
    PlacedSite,
)
from penstock.engine.models.axk2 import GatedNormsLayer
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.layers.absent import NoMixer
from penstock.engine.models.layers.attention import Attention
from penstock.engine.models.layers.compressed_attention import CompressedAttention
from penstock.engine.models.layers.delta_net import GatedDeltaNet
from penstock.engine.models.layers.feed_forward import GatedMlp
from penstock.engine.models.layers.latent_attention import LatentAttention
from penstock.engine.models.layers.linear import InlineLinear, Linear
from penstock.engine.models.layers.mamba import Mamba2
from penstock.engine.models.layers.short_conv import ShortConv
from penstock.engine.models.layers.side_by_side import SideBySide
from penstock.engine.models.muse import GatedResidualLayer


@runtime_checkable
class GraphLora(LoraKernel, Protocol):
    """A kernel that CUDA graphs can contain: a step's tiles lie at fixed addresses."""

    def tables(self, slots: np.ndarray, tokens: int) -> dict[str, np.ndarray]:
        """Tiles of a decode step of up to `tokens` tokens, as int32 arrays named like `TABLES`."""
        ...

    def use(self, tables: dict[str, Tensor], tokens: int, *, alters: bool = False) -> None:
        """Read the tiles of what follows from these device tensors, each [tokens]. `alters`: adapters may change single
        outputs and norms, too."""
        ...


TABLES = ("lora_order", "lora_slots", "lora_starts", "lora_counts", "lora_tokens")
"""`lora_tokens` is the slot of each token; padding in it is -1."""


@runtime_checkable
class FusedLora(LoraKernel, Protocol):
    """A kernel whose work goes into launches that are there anyway, or runs beside them."""

    def inline(self, placed: PlacedSite) -> Any:
        """What the `fused` call of a linear takes to add the step's adapters in its own launch."""
        ...

    def fits_inline(self, layout: AdapterLayout) -> bool:
        """Whether the shapes allow that."""
        ...

    def beside(self, x: Tensor, placed: PlacedSite, base: Callable[[Tensor], Tensor]) -> Any:
        """base(x) with adapters, computed at the same time; in a form that the same backend's `Ops` read."""
        ...


class FusedAdaptedLinear:
    """A linear with its adapters beside it or, in `fused` calls, inside it."""

    def __init__(self, base: Linear, kernel: FusedLora, placed: PlacedSite) -> None:
        self.base = base
        self.weight_bytes = base.weight_bytes
        self._kernel = kernel
        self._placed = placed

    def __call__(self, x: Tensor) -> Any:
        inputs = self._kernel.banks.inputs
        base = self.base if inputs is None else inputs.over(self.base, self._placed)
        return self._kernel.beside(x, self._placed, base)

    def fused(self, x: Tensor, **folded: Any) -> Tensor:
        return cast(InlineLinear, self.base).fused(x, lora=self._kernel.inline(self._placed), **folded)


def adapt(
    decoder: Decoder,
    kernel: LoraKernel,
    layout: AdapterLayout,
    *,
    sites: int | None = None,
    summed: Collection[str] = (),
    further: bool = False,
) -> Decoder:
    """`decoder` with adapters, on the first `sites` of the layout or on all; on those that few touch only if `further`.
    Activations stay plain tensors. Norms and residuals stay outside the linears, unless all of these take adapters into
    their launch. `summed`: sites whose output other ranks have parts of; adapters are inside those parts, so that the
    sum is made once."""
    made: Callable[[Linear, Any, PlacedSite], Linear] = AdaptedLinear
    fused_up_to = 0
    plain = all(
        isinstance(layer.feed_forward, GatedMlp) and not isinstance(layer, GatedResidualLayer)
        for layer in decoder.layers
    )
    if isinstance(kernel, FusedLora) and plain and all(isinstance(layer.mixer, Attention) for layer in decoder.layers):
        made = FusedAdaptedLinear
        linears = [linear for layer in decoder.layers for linear in layer.linears]
        if not summed and kernel.fits_inline(layout) and all(isinstance(linear, InlineLinear) for linear in linears):
            fused_up_to = decoder.fused_up_to
    layers = []
    for run, layer in enumerate(decoder.layers):
        number = layout.runs[run] if layout.runs else run
        recurrent = isinstance(layer.mixer, GatedDeltaNet | Mamba2 | ShortConv)
        both = isinstance(layer.mixer, SideBySide)
        assert recurrent or both or isinstance(layer.mixer, Attention | LatentAttention | CompressedAttention | NoMixer)
        mixer: dict[str, Any] = {"ops": decoder.ops}
        feed_forward: dict[str, Any] = {}
        others: dict[str, PlacedSite] = {}
        for index, site in enumerate(layout.sites[:sites]):
            if (
                (not both and (site.of_attention if recurrent else site.of_recurrent))
                or site.end
                or not site.is_in(number)
                or (site.further and not further)
            ):
                continue
            nested = "." in site.attribute
            if site.further and not nested:
                others[site.attribute] = layout.place(number, index)
                continue
            part: Any = layer.mixer
            if isinstance(layer.mixer, SideBySide):
                part = layer.mixer.mamba if site.of_recurrent else layer.mixer.attention
            in_mixer = nested or hasattr(part, site.attribute)
            holder, found = (part, mixer) if in_mixer else (layer.feed_forward, feed_forward)
            placed = layout.place(number, index)
            make = AdaptedLinear if site.attribute in summed or nested else made
            base: Any = reduce(getattr, site.attribute.split("."), cast(Any, holder))
            found[site.attribute] = make(base, kernel, placed)
        if isinstance(layer.mixer, LatentAttention) and LATENT_KEYS in others:
            mixer["additions"] = AbsorbedAdapters(kernel, others[LATENT_KEYS], others[LATENT_VALUES])
        if isinstance(layer.mixer, GatedDeltaNet):
            mixer |= adapted_linears(layer.mixer, kernel, others)
        new_mixer: Any = _replaced(layer.mixer, mixer)
        changed = dataclasses.replace(layer, mixer=new_mixer)
        if feed_forward:
            assert isinstance(layer.feed_forward, GatedMlp)
            adapted: Any = dataclasses.replace(layer.feed_forward, ops=decoder.ops, **feed_forward)
            changed = dataclasses.replace(changed, feed_forward=adapted)
        elif ROUTER in others:
            adapted_experts = adapt_experts(layer.feed_forward, kernel, others, decoder.ops)
            changed = dataclasses.replace(changed, feed_forward=adapted_experts)
        if isinstance(changed, GatedNormsLayer) and MIXER_GATE_IN in others:
            changed = adapt_input_gates(changed, kernel, others)
        layers.append(changed)
    adapted_decoder = dataclasses.replace(decoder, layers=layers, fused_up_to=fused_up_to)
    return adapt_ends(adapted_decoder, kernel, layout) if further else adapted_decoder


def _replaced(mixer: Any, changes: dict[str, Any]) -> Any:
    if not isinstance(mixer, SideBySide):
        return _with_parts(mixer, changes)
    ops = changes.pop("ops")
    parts = {
        name: dataclasses.replace(part, ops=ops, **{key: one for key, one in changes.items() if hasattr(part, key)})
        for name, part in (("attention", mixer.attention), ("mamba", mixer.mamba))
    }
    return dataclasses.replace(mixer, ops=ops, **cast(Any, parts))


def _with_parts(part: Any, changes: Mapping[str, Any]) -> Any:
    """`changes` by attribute; with dots, of parts of it."""
    own = {path: value for path, value in changes.items() if "." not in path}
    inside: dict[str, dict[str, Any]] = {}
    for path in changes.keys() - own.keys():
        name, _, rest = path.partition(".")
        inside.setdefault(name, {})[rest] = changes[path]
    own |= {name: _with_parts(getattr(part, name), nested) for name, nested in inside.items()}
    return dataclasses.replace(part, **own)
