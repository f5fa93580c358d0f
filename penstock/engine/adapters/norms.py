"""Norms that adapters replace: `modules_to_save` of norms between a model's layers.

A norm is known by its gains: `with_norms` makes a decoder whose operations look up, for the gains they are given, what
the adapters of the step have in their place. With `NormBank` they normalize the tokens of these once more, and such
steps are launched from the host, which knows the tokens of each slot. On CUDA the kernel of a norm looks up each
token's gains, also in captured steps (`backends/cuda/slot_tables.py`). Other decoders contain none of this.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.engine.adapters.tiles import grouped
from penstock.engine.models.axk2 import GATED_NORM
from penstock.engine.models.decoder import Decoder, DecoderLayer
from penstock.engine.models.families import family_of
from penstock.engine.models.layers.absent import NoMixer
from penstock.engine.models.layers.forwarder import Forwarder
from penstock.engine.models.layers.side_by_side import SideBySide
from penstock.engine.models.model_config import ModelConfig

Norm = tuple[int | None, str]
"""A layer, counted in this process's part of the model, and the module in it; None: the one behind all layers."""
_IN_LAYER = ("mixer_norm", "feed_forward_norm", "mixer_out_norm", "feed_forward_out_norm")


def norms_in_layer(config: ModelConfig) -> Mapping[str, str]:
    """The norms of a layer that adapters may replace, those whose gains are as stored, by what they may be called: one
    that has a gate behind it is a part of a module of its name."""
    names, stored = family_of(config.family).names, _IN_LAYER if config.out_norm_scale == 1.0 else _IN_LAYER[:2]
    found = [getattr(names, attribute) for attribute in stored if getattr(names, attribute)]
    gated = config.latent is not None and config.latent.gate_rank
    return {name: name for name in found} | ({f"{name}.{GATED_NORM}": name for name in found} if gated else {})


def norms_of(decoder: Decoder) -> list[tuple[Norm, Tensor]]:
    """The gains of every norm that adapters may replace, each once: gains that are those of two norms have the name of
    the first."""
    names = family_of(decoder.config.family).names
    found: list[tuple[Norm, Tensor | None]] = []
    for number, layer in enumerate(decoder.layers):
        if isinstance(layer.mixer, NoMixer):  # a layer of one part has one norm
            found.append(((number, names.mixer_norm), layer.feed_forward_norm))
        found += [((number, getattr(names, attribute)), getattr(layer, attribute)) for attribute in _IN_LAYER]
    found.append(((None, names.final_norm), decoder.final_norm))
    known = {id(gains): (norm, gains) for norm, gains in reversed(found) if gains is not None and norm[1]}
    return list(reversed(known.values()))


class Norms(Protocol):
    """The gains of all slots, as a backend keeps them. `begin` is that of `LoraKernel`."""

    def put(self, slot: int, norms: Mapping[Norm, Tensor] | None) -> None:
        """Bring the gains of an adapter into a slot."""
        ...

    def begin(self, slots: np.ndarray) -> None: ...

    def clear(self) -> None:
        """The coming step replaces nothing."""
        ...

    def on(self, ops: Any) -> Any:
        """Operations whose norms are those of each token's adapter."""
        ...


class NormBank:
    """See `Norms`; each adapter's are where PyTorch puts them."""

    def __init__(self, slots: int, norms: Sequence[tuple[Norm, Tensor]], device: torch.device) -> None:
        """`norms`: see `norms_of`."""
        self._held: list[Mapping[Norm, Tensor] | None] = [None] * slots
        self._device = device
        self._groups: list[tuple[Mapping[Norm, Tensor], Tensor | None]] = []
        self._known = {id(gains): norm for norm, gains in norms}
        self._kept = [gains for _, gains in norms]
        """Keeps what is known by its identity."""

    def on(self, ops: Any) -> Any:
        return NormOps(ops, self)

    def put(self, slot: int, norms: Mapping[Norm, Tensor] | None) -> None:
        self._held[slot] = norms and {at: gains.to(self._device, non_blocking=True) for at, gains in norms.items()}

    def begin(self, slots: np.ndarray) -> None:
        self._groups = grouped(self._held, slots, self._device)

    def clear(self) -> None:
        self._groups = []

    def replaced(self, gains: Tensor | None) -> list[tuple[Tensor, Tensor | None]]:
        """What the step has in place of a norm's gains: gains, and the tokens that have them; None: all."""
        if gains is None or not self._groups:
            return []
        at = self._known.get(id(gains))
        found = ((held.get(at), tokens) for held, tokens in self._groups) if at is not None else ()
        return [(own.to(gains.dtype), tokens) for own, tokens in found if own is not None]


class NormOps(Forwarder):
    """Operations whose norms are those of each token's adapter; see `ActivationOps`."""

    def __init__(self, base: Any, bank: NormBank) -> None:
        super().__init__(base)
        self._bank = bank

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NormOps) and self._base == other._base and self._bank is other._bank

    __hash__ = object.__hash__

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype | None = None) -> Any:
        y = self._base.rms_norm(x, weight, eps, dtype)
        self._again(y, x, weight, eps)
        return y

    def add_rms_norm(
        self, x: Any, residual: Tensor, weight: Tensor | None, eps: float, x_weight: Tensor | None = None
    ) -> Any:
        added = []
        for gains, tokens in self._bank.replaced(x_weight):
            rows = slice(None) if tokens is None else tokens
            normed = self._base.rms_norm(x[rows].contiguous(), gains, eps)
            added.append((rows, residual[rows] + normed.to(residual.dtype)))
        y = self._base.add_rms_norm(x, residual, weight, eps, x_weight)
        for rows, stream in added:
            residual[rows] = stream
            if weight is not None:
                y[rows] = self._base.rms_norm(stream.contiguous(), weight, eps, y.dtype)
            else:
                y[rows] = stream.to(y.dtype)
        self._again(y, residual, weight, eps)
        return y

    def _again(self, y: Tensor, x: Tensor, weight: Tensor | None, eps: float) -> None:
        for gains, tokens in self._bank.replaced(weight):
            rows = slice(None) if tokens is None else tokens
            y[rows] = self._base.rms_norm(x[rows].contiguous(), gains, eps, y.dtype)


class _WithOps(Forwarder):
    """A feed-forward behind other norms."""

    def __init__(self, base: Any, ops: Any) -> None:
        super().__init__(base)
        self.ops = ops


def with_norms(decoder: Decoder, bank: Norms) -> Decoder:
    """`decoder`, whatever ranks it is connected to, with the norms of the step's adapters; nothing in it is fused."""

    def normed(ops: Any) -> Any:
        inside = getattr(ops, "with_inner", None)  # sums over ranks come before the norms
        return bank.on(ops) if inside is None else inside(bank.on)

    layers: list[DecoderLayer] = []
    for layer in decoder.layers:
        mixer: Any = layer.mixer
        if isinstance(mixer, SideBySide):
            parts: Any = {"attention": mixer.attention, "mamba": mixer.mamba}
            parts = {name: dataclasses.replace(part, ops=normed(part.ops)) for name, part in parts.items()}
            mixer = dataclasses.replace(mixer, **parts)
        mixer = dataclasses.replace(mixer, ops=normed(mixer.ops))
        feed_forward: Any = _WithOps(layer.feed_forward, normed(layer.feed_forward.ops))
        layers.append(dataclasses.replace(layer, mixer=mixer, feed_forward=feed_forward))
    return dataclasses.replace(decoder, ops=normed(decoder.ops), layers=layers, fused_up_to=0)
