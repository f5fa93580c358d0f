"""Norms that adapters replace: `modules_to_save` of norms between a model's layers, and of queries and keys.

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

from penstock.engine.backends.interface import AttentionBatch, HeadLayout, KeySmoothing, KVScales
from penstock.engine.models.decoder import Decoder, DecoderLayer
from penstock.engine.models.families import family_of
from penstock.engine.models.layers.absent import NoMixer
from penstock.engine.models.layers.attention import Attention
from penstock.engine.models.layers.side_by_side import SideBySide
from penstock.engine.models.model_config import ModelConfig

Norm = tuple[int | None, str]
"""A layer, counted in this process's part of the model, and the module in it; None: the one behind all layers."""
_OF_HEADS = ("q_norm", "k_norm")
_IN_LAYER = ("mixer_norm", "feed_forward_norm", "mixer_out_norm", "feed_forward_out_norm")


def norms_in_layer(config: ModelConfig) -> dict[str, int]:
    """The norms of a layer that adapters may replace, by what the family calls them: how many gains each has."""
    names = family_of(config.family).names
    found = {getattr(names, attribute): config.hidden_size for attribute in _IN_LAYER if getattr(names, attribute)}
    if _has_head_norms(config):
        found |= {f"{names.attention}{norm}": config.head_dim for norm in _OF_HEADS}
    return found


def _has_head_norms(config: ModelConfig) -> bool:
    """Whether queries and keys are normalized head by head, all heads with the same gains."""
    return config.qk_norm and not config.qk_layer_norm


def norms_of(decoder: Decoder) -> list[tuple[Norm, Tensor]]:
    """The gains of every norm that adapters may replace, each once: gains that are those of two norms have the name of
    the first."""
    names = family_of(decoder.config.family).names
    found: list[tuple[Norm, Tensor | None]] = []
    for number, layer in enumerate(decoder.layers):
        if isinstance(layer.mixer, NoMixer):  # a layer of one part has one norm
            found.append(((number, names.mixer_norm), layer.feed_forward_norm))
        found += [((number, getattr(names, attribute)), getattr(layer, attribute)) for attribute in _IN_LAYER]
        attention = layer.mixer.attention if isinstance(layer.mixer, SideBySide) else layer.mixer
        if isinstance(attention, Attention) and _has_head_norms(decoder.config):
            found += [((number, f"{names.attention}{norm}"), getattr(attention, norm)) for norm in _OF_HEADS]
    found.append(((None, names.final_norm), decoder.final_norm))
    known = {id(gains): (norm, gains) for norm, gains in reversed(found) if gains is not None}
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
        self._groups = []
        for slot in np.unique(slots[slots >= 0]).tolist() if any(self._held) else ():
            held = self._held[slot]
            if held:
                of = np.flatnonzero(slots == slot)
                self._groups.append((held, None if len(of) == len(slots) else torch.from_numpy(of).to(self._device)))

    def clear(self) -> None:
        self._groups = []

    def replaced_of_heads(
        self, q_norm: Tensor | None, k_norm: Tensor | None
    ) -> list[tuple[Tensor | None, Tensor | None, Tensor | None]]:
        """The same of the norms of queries and keys: both gains, and the tokens that have them."""
        found = []
        for held, tokens in self._groups:
            places = [None if gains is None else self._known.get(id(gains)) for gains in (q_norm, k_norm)]
            q, k = (None if at is None else held.get(at) for at in places)
            if q is not None or k is not None:
                new_q = q_norm if q is None or q_norm is None else q.to(q_norm.dtype)
                new_k = k_norm if k is None or k_norm is None else k.to(k_norm.dtype)
                found.append((new_q, new_k, tokens))
        return found

    def replaced(self, gains: Tensor | None) -> list[tuple[Tensor, Tensor | None]]:
        """What the step has in place of a norm's gains: gains, and the tokens that have them; None: all."""
        if gains is None or not self._groups:
            return []
        at = self._known.get(id(gains))
        found = ((held.get(at), tokens) for held, tokens in self._groups) if at is not None else ()
        return [(own.to(gains.dtype), tokens) for own, tokens in found if own is not None]


class NormOps:
    """Operations whose norms are those of each token's adapter; see `ActivationOps`."""

    def __init__(self, base: Any, bank: NormBank) -> None:
        self._base = base
        self._bank = bank

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)  # of a copy that is not whole yet
        return getattr(self._base, name)

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

    def rope_and_cache(
        self,
        qkv: Tensor,
        layout: HeadLayout,
        cos_sin: Tensor,
        batch: AttentionBatch,
        k_cache: Tensor,
        v_cache: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        kv_scales: KVScales | None = None,
        key_smoothing: KeySmoothing | None = None,
    ) -> Tensor:
        def rotated(rows: Tensor, of: AttentionBatch, q_gains: Tensor | None, k_gains: Tensor | None) -> Tensor:
            made: Tensor = self._base.rope_and_cache(
                rows, layout, cos_sin, of, k_cache, v_cache, q_gains, k_gains, eps, kv_scales, key_smoothing
            )
            return made

        groups = self._bank.replaced_of_heads(q_norm, k_norm)
        own = [qkv if tokens is None else qkv[tokens] for *_, tokens in groups]  # `qkv` may be overwritten
        if len(groups) == 1 and groups[0][2] is None:
            return rotated(qkv, batch, groups[0][0], groups[0][1])
        q = rotated(qkv, batch, q_norm, k_norm)
        for (new_q, new_k, tokens), rows in zip(groups, own, strict=True):
            assert tokens is not None  # of all tokens there is one group
            of = dataclasses.replace(batch, positions=batch.positions[tokens], slots=batch.slots[tokens])
            q[tokens] = rotated(rows, of, new_q, new_k)
        return q

    def _again(self, y: Tensor, x: Tensor, weight: Tensor | None, eps: float) -> None:
        for gains, tokens in self._bank.replaced(weight):
            rows = slice(None) if tokens is None else tokens
            y[rows] = self._base.rms_norm(x[rows].contiguous(), gains, eps, y.dtype)


class _WithOps:
    """A feed-forward behind other norms."""

    def __init__(self, base: Any, ops: Any) -> None:
        self._base = base
        self.ops = ops

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._base, name)


def with_norms(decoder: Decoder, bank: Norms) -> Decoder:
    """`decoder`, whatever ranks it is connected to, with the norms of the step's adapters; nothing in it is fused."""

    def normed(ops: Any) -> Any:
        inside = getattr(ops, "with_inner", None)  # sums over ranks come before the norms
        return bank.on(ops) if inside is None else inside(bank.on)

    def changed(mixer: Any) -> Any:
        mixer = dataclasses.replace(mixer, ops=normed(mixer.ops))
        if not isinstance(mixer, Attention) or not _has_head_norms(decoder.config):
            return mixer
        return dataclasses.replace(mixer, attention_ops=bank.on(mixer.attention_ops))

    layers: list[DecoderLayer] = []
    for layer in decoder.layers:
        mixer: Any = layer.mixer
        if isinstance(mixer, SideBySide):
            parts: Any = {"attention": mixer.attention, "mamba": mixer.mamba}
            parts = {name: changed(part) for name, part in parts.items()}
            mixer = dataclasses.replace(mixer, **parts)
        mixer = changed(mixer)
        feed_forward: Any = _WithOps(layer.feed_forward, normed(layer.feed_forward.ops))
        layers.append(dataclasses.replace(layer, mixer=mixer, feed_forward=feed_forward))
    return dataclasses.replace(decoder, ops=normed(decoder.ops), layers=layers, fused_up_to=0)
