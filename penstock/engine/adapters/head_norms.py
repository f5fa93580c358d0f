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
from penstock.engine.adapters.stored_keys import Storing, StoringOps, with_storing_ops
from penstock.engine.adapters.tiles import grouped
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.families import family_of
from penstock.engine.models.model_config import ModelConfig


def head_norms_in_layer(config: ModelConfig) -> dict[str, int]:
    """How many gains these norms have, by what the family calls them; empty where it has none."""
    if not config.qk_norm or config.qk_layer_norm or config.layer_heads:
        return {}
    names = family_of(config.family).names
    return {f"{names.attention}{name}": config.head_dim for name in names.head_norms}


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


class HeadNormOps(StoringOps):
    """Rotates and stores the tokens of adapters once more, with their gains."""

    def __init__(self, base: Any, bank: HeadNormBank, q: Norm, k: Norm) -> None:
        super().__init__(base)
        self._bank = bank
        self._q, self._k = q, k

    def _stored(self, call: Storing) -> Tensor:
        groups = self._bank.replaced((self._q, call.q_norm), (self._k, call.k_norm))
        if len(groups) == 1 and groups[0][1] is None:
            q_norm, k_norm = groups[0][0]
            return self._base_stores(call._replace(q_norm=q_norm, k_norm=k_norm))
        own = [call.qkv[tokens] for _, tokens in groups]  # `qkv` may be overwritten
        q, batch = self._base_stores(call), call.batch
        for ((q_norm, k_norm), tokens), rows in zip(groups, own, strict=True):
            of = dataclasses.replace(batch, positions=batch.positions[tokens], slots=batch.slots[tokens])
            q[tokens] = self._base_stores(call._replace(qkv=rows, batch=of, q_norm=q_norm, k_norm=k_norm))
        return q


def with_head_norms(decoder: Decoder, bank: HeadNormBank) -> Decoder:
    """`decoder` with the norms of queries and keys that the step's adapters have."""
    names = list(head_norms_in_layer(decoder.config))
    if not names:
        return decoder
    q, k = names
    return with_storing_ops(decoder, lambda ops, layer: HeadNormOps(ops, bank, (layer, q), (layer, k)))
