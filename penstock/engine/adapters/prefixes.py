"""Prefix tuning: keys and values that adapters put before those of every prompt.

Such a prefix stands in the cache where virtual tokens do (`adapters.kinds.prompts`): they are scheduled, named and
shared like others, so requests of an adapter find its blocks written. What layers compute for these tokens is not
used: behind the operation that stores a step's keys and values, those of the prefix are stored in their place. They are
kept as they are used, rotated already. Steps that do this are launched from the host.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.engine.adapters.layout import DELTA_MIX, INDEXER, AdapterCut, rows_of
from penstock.engine.adapters.spec import WEIGHTS
from penstock.engine.adapters.stored_keys import Storing, StoringOps, with_storing_ops
from penstock.engine.adapters.tiles import grouped
from penstock.engine.models.decoder import Decoder
from penstock.errors import CheckpointError

PREFIX = "stored_prefix"
"""What the tensor is called, once it is converted: [tokens, layers * (keys, values) of all heads]."""
_QKV = "qkv"


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """Keys and values of one adapter, of this process's layers and heads."""

    data: Tensor
    """[layers, tokens, 2 * key heads * head size]: keys, then values."""

    def pinned(self) -> StoredPrefix:
        return StoredPrefix(self.data.pin_memory())

    def to(self, device: torch.device) -> StoredPrefix:
        return StoredPrefix(self.data.to(device, non_blocking=True))


def read_prefix(stored: Tensor, cut: AdapterCut, dtype: torch.dtype) -> StoredPrefix:
    """This process's part of what a file has."""
    layout = cut.whole
    index = _site(cut)
    kept = {(site.sizes[1:], cut.outputs[at][1:]) for at, site in enumerate(layout.sites) if site.attribute == _QKV}
    if len(kept) > 1 or any(len(set(sizes)) != 1 or len(sizes) != 2 for sizes, _ in kept):
        raise CheckpointError("prefix tuning needs a model whose layers all have KV heads of one number and size")
    if any(site.attribute == INDEXER for site in layout.sites):
        raise CheckpointError(
            "prefix tuning is not available for models whose layers choose blocks by keys of their tokens, which keys "
            "and values of a prefix do not have: train prompt tuning or a LoRA"
        )
    if index is None or any(site.of_recurrent or site.attribute == DELTA_MIX for site in layout.sites):
        raise CheckpointError(
            "prefix tuning needs a model whose layers all have attention over keys and values; PEFT cannot run it on "
            "latent attention, Mamba layers or delta nets either: train prompt tuning or a LoRA"
        )
    width = layout.sites[index].sizes[1]
    layers = layout.cached_layers
    if stored.dim() != 2 or not len(stored) or stored.shape[1] != layers * 2 * width:
        raise CheckpointError(
            f"{WEIGHTS}: prompt_embeddings is {tuple(stored.shape)}; keys and values of this model's {layers} "
            f"layers are {layers * 2 * width} numbers for each token"
        )
    # [layers, 2, numbers, tokens], so that heads are rows.
    by_layer = stored.view(len(stored), layers, 2, width).permute(1, 2, 3, 0)[slice(*cut.cached_layers)]
    own = [
        torch.cat([rows_of(of_layer[side], cut.outputs[index][1 + side]) for side in range(2)]).t()
        for of_layer in by_layer
    ]
    data = torch.stack(own).to(dtype).contiguous()
    if not bool(data.isfinite().all()):
        raise CheckpointError(f"{WEIGHTS}: prompt_embeddings holds values that are not finite in {dtype}")
    return StoredPrefix(data)


def prefix_bytes(tokens: int, cut: AdapterCut, dtype: torch.dtype) -> int:
    """What the keys and values of so many tokens take, of this process's part of the model."""
    index = _site(cut)
    if index is None:
        return 0
    whole = torch.empty(cut.whole.sites[index].sizes[1], 0)
    width = sum(len(rows_of(whole, of)) for of in cut.outputs[index][1:3])
    first, last = cut.cached_layers
    return tokens * (last - first) * width * dtype.itemsize


def _site(cut: AdapterCut) -> int | None:
    """Which site makes queries, keys and values."""
    return next((index for index, site in enumerate(cut.whole.sites) if site.attribute == _QKV), None)


class PrefixBank:
    """The prefixes of all slots. `begin` is that of `LoraKernel`."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self._held: list[StoredPrefix | None] = [None] * slots
        self._device = device
        self._groups: list[tuple[StoredPrefix, Tensor | None]] = []
        self._chosen: tuple[Tensor, list[tuple[StoredPrefix, Tensor, Tensor]]] | None = None
        """Of a step's positions: what `chosen` returns for them."""

    def put(self, slot: int, prefix: StoredPrefix | None) -> None:
        """Bring the prefix of an adapter into a slot. Few adapters have one: slots reserve nothing for it. See
        `AdaptedModel.beside`."""
        self._held[slot] = None
        if prefix is not None:
            self._held[slot] = prefix.to(self._device)

    def begin(self, slots: np.ndarray) -> None:
        self._groups, self._chosen = grouped(self._held, slots, self._device), None

    def clear(self) -> None:
        """The coming step is captured: it stores nothing of a prefix."""
        self._groups, self._chosen = [], None

    def chosen(self, positions: Tensor) -> list[tuple[StoredPrefix, Tensor, Tensor]]:
        """The step's prefixes, the tokens that stand for each, and which of its tokens these are."""
        if not self._groups:
            return []
        if self._chosen is None or self._chosen[0] is not positions:
            found = []
            for prefix, tokens in self._groups:
                at = positions if tokens is None else positions[tokens]
                among = torch.nonzero(at < prefix.data.shape[1]).flatten()
                if len(among):
                    found.append((prefix, among if tokens is None else tokens[among], at[among].long()))
            self._chosen = positions, found
        return self._chosen[1]


class PrefixOps(StoringOps):
    """Stores the prefixes of the step's adapters over what the layer computed for their virtual tokens."""

    def __init__(self, base: Any, bank: PrefixBank, layer: int) -> None:
        super().__init__(base)
        self._bank = bank
        self._layer = layer

    def _stored(self, call: Storing) -> Tensor:
        q = self._base_stores(call)
        layout, cos_sin, batch = call.layout, call.cos_sin, call.batch
        for prefix, tokens, at in self._bank.chosen(batch.positions):
            own = prefix.data[self._layer][at].to(q.dtype)
            rows = torch.cat((own.new_zeros(len(own), layout.heads * layout.head_dim), own), dim=1)
            unrotated = cos_sin.new_zeros(1, cos_sin.shape[1])
            unrotated[:, : cos_sin.shape[1] // 2] = 1.0
            of = dataclasses.replace(
                batch, positions=torch.zeros_like(batch.positions[tokens]), slots=batch.slots[tokens]
            )
            self._base_stores(call._replace(qkv=rows, cos_sin=unrotated, batch=of, q_norm=None, k_norm=None))
        return q


def with_prefixes(decoder: Decoder, bank: PrefixBank) -> Decoder:
    """`decoder` with the prefixes that the step's adapters have."""
    return with_storing_ops(decoder, lambda ops, layer: PrefixOps(ops, bank, layer))
