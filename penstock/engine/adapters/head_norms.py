"""Norms of queries and keys that adapters replace (`modules_to_save`), where all heads of a layer have the same.

Such a norm is part of the operation that rotates queries and keys and stores these: it is made once more for the tokens
of an adapter, with its gains. Steps with such adapters are launched from the host, which knows the tokens of each slot;
recorded and captured steps contain none of this.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.engine.adapters.norms import Norm
from penstock.engine.adapters.tiles import grouped
from penstock.engine.backends.interface import AttentionBatch, HeadLayout, KeySmoothing, KVScales
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.families import family_of
from penstock.engine.models.layers.attention import Attention
from penstock.engine.models.layers.side_by_side import SideBySide
from penstock.engine.models.model_config import ModelConfig

_NAMES = ("q_norm", "k_norm")


def head_norms_in_layer(config: ModelConfig) -> dict[str, int]:
    """How many gains these norms have, by what the family calls them; empty where it has none."""
    if not config.qk_norm or config.qk_layer_norm:
        return {}
    return {f"{family_of(config.family).names.attention}{name}": config.head_dim for name in _NAMES}


class HeadNormBank:
    """The gains of all slots. `begin` is that of `LoraKernel`."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self._held: list[Mapping[Norm, Tensor] | None] = [None] * slots
        self._device = device
        self._groups: list[tuple[Mapping[Norm, Tensor], Tensor | None]] = []

    def put(self, slot: int, norms: Mapping[Norm, Tensor] | None) -> None:
        """Bring the gains of an adapter into a slot."""
        self._held[slot] = norms and {at: gains.to(self._device, non_blocking=True) for at, gains in norms.items()}

    def begin(self, slots: np.ndarray) -> None:
        self._groups = grouped(self._held, slots, self._device)

    def clear(self) -> None:
        """The coming step is captured: it replaces nothing."""
        self._groups = []

    def replaced(self, *norms: tuple[Norm, Tensor | None]) -> list[tuple[list[Tensor | None], Tensor | None]]:
        """The gains of these norms that the step's adapters have, in the type of the model's own, and the tokens that
        have them; None: all."""
        found = []
        for held, tokens in self._groups:
            if any(at in held for at, _ in norms):
                gains = [own if own is None or at not in held else held[at].to(own.dtype) for at, own in norms]
                found.append((gains, tokens))
        return found


class HeadNormOps:
    """Operations of one layer; see `AttentionOps`."""

    def __init__(self, base: Any, bank: HeadNormBank, q: Norm, k: Norm) -> None:
        self._base = base
        self._bank = bank
        self._q, self._k = q, k

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)  # of a copy that is not whole yet
        return getattr(self._base, name)

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
        def rotated(rows: Tensor, of: AttentionBatch, gains: list[Tensor | None]) -> Tensor:
            made: Tensor = self._base.rope_and_cache(
                rows, layout, cos_sin, of, k_cache, v_cache, *gains, eps, kv_scales, key_smoothing
            )
            return made

        groups = self._bank.replaced((self._q, q_norm), (self._k, k_norm))
        if len(groups) == 1 and groups[0][1] is None:
            return rotated(qkv, batch, groups[0][0])
        own = [qkv[tokens] for _, tokens in groups]  # `qkv` may be overwritten
        q = rotated(qkv, batch, [q_norm, k_norm])
        for (gains, tokens), rows in zip(groups, own, strict=True):
            of = dataclasses.replace(batch, positions=batch.positions[tokens], slots=batch.slots[tokens])
            q[tokens] = rotated(rows, of, gains)
        return q


def with_head_norms(decoder: Decoder, bank: HeadNormBank) -> Decoder:
    """`decoder` with the norms of queries and keys that the step's adapters have."""
    names = list(head_norms_in_layer(decoder.config))
    if not names:
        return decoder

    def changed(number: int, mixer: Any) -> Any:
        if isinstance(mixer, SideBySide):
            return dataclasses.replace(mixer, attention=changed(number, mixer.attention))
        if not isinstance(mixer, Attention):
            return mixer
        ops: Any = HeadNormOps(mixer.attention_ops, bank, *((number, name) for name in names))
        return dataclasses.replace(mixer, attention_ops=ops)

    layers = [
        dataclasses.replace(layer, mixer=changed(number, layer.mixer)) for number, layer in enumerate(decoder.layers)
    ]
    return dataclasses.replace(decoder, layers=layers)
