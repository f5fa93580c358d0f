"""A checkpoint as one rank sees it: the rows and columns of each matrix that are its own, its layers from zero on.

The view has the names and shapes of a smaller model, so builders of decoders and quantizers need not know that there
are other ranks. What is cut: query, key, value, gate and up matrices by outputs (heads, width), output and
down matrices by inputs; their bias stays whole on shard 0 and is zero elsewhere, because it is added to a sum. The
head, tied or not, is cut by outputs under the name `lm_head`, the last part filled up with zeros. All else (norms,
routers, the embedding) is everywhere.

Few-bit matrices are cut as they are stored, and every weight keeps its value. Groups and blocks that a cut goes through
are taken apart into smaller ones; a matrix where that leaves fewer than 32 inputs to a scale, or whose groups are
scattered over the inputs of other shards, is dense on these ranks, which is logged.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.engine.loading.checkpoint import GGUFCheckpoint
from penstock.engine.loading.dequantize import dequantize
from penstock.engine.loading.fp8 import Fp8Checkpoint
from penstock.engine.loading.fp8_experts import Fp4ExpertsCheckpoint
from penstock.engine.loading.gguf import BLOCK, GGMLType, RawTensor
from penstock.engine.loading.groups import IntGroups, from_gguf
from penstock.engine.loading.mxfp4 import Mxfp4, has_mxfp4
from penstock.engine.loading.quantized import QuantizedCheckpoint
from penstock.engine.models.model_config import ModelConfig
from penstock.engine.models.weights import Weights
from penstock.engine.parallel.cuts import Cuts
from penstock.engine.parallel.layer_cuts import WHOLE, Cut
from penstock.engine.parallel.layout import Place

LEAST_GROUP = 32
"""Inputs that the kernels expect to share a scale."""

_log = logging.getLogger(__name__)


def shard(weights: Weights, model: ModelConfig, place: Place) -> Weights:
    """The part of a checkpoint that `place` holds."""
    if isinstance(weights, GGUFCheckpoint):
        return ShardedGGUF(weights, model, place)
    if isinstance(weights, QuantizedCheckpoint):
        return ShardedQuantized(weights, model, place)
    if isinstance(weights, Fp4ExpertsCheckpoint):
        return ShardedFp4Experts(weights, model, place)
    if isinstance(weights, Fp8Checkpoint):
        return ShardedFp8(weights, model, place)
    if has_mxfp4(weights):
        return ShardedMxfp4(weights, model, place)
    return ShardedTensors(weights, model, place)


class _Sharded:
    """What all views share: names and dense tensors."""

    def __init__(self, whole: Any, model: ModelConfig, place: Place) -> None:
        self.config: dict[str, Any] = whole.config
        self._whole = whole
        self._cuts = Cuts(model, place, whole.names())
        self._told: set[str] = set()

    def names(self) -> Collection[str]:
        return self._cuts.names()

    def tensor(self, name: str, device: str | torch.device = "cpu") -> Tensor:
        whole: Tensor = self._whole.tensor(self._cuts.original(name))
        return self._cuts.apply(name, whole).contiguous().to(device)

    def _cut_groups(self, groups: IntGroups, name: str) -> IntGroups | None:
        """This rank's part; None: better dense, which is logged once for the same matrix of all layers."""
        found = _cut_groups(groups, self._cuts.of(name))
        if isinstance(found, IntGroups):
            return found
        self._tell_dense(name, found)
        return None

    def _tell_dense(self, name: str, reason: str) -> None:
        module = name.removesuffix(".weight").rpartition(".")[2]
        if module not in self._told and self._cuts.place.rank == 0:
            self._told.add(module)
            _log.warning("%s and those like it are dense on every shard: %s", name, reason)

    def row_peaks(self, name: str, device: str | torch.device = "cpu") -> Tensor | None:
        """See `quantization.stored`; None for a matrix whose rows are whole."""
        if self._cuts.of(name).inputs is None:
            return None
        whole: Tensor = self._whole.tensor(self._cuts.original(name))
        return whole.float().abs().amax(1).to(device)


class ShardedTensors(_Sharded):
    """Any checkpoint of plain tensors, or one that gives them."""


class ShardedQuantized(_Sharded, QuantizedCheckpoint):
    """Integers in groups, cut without being multiplied out."""

    def groups(self, name: str, device: str | torch.device = "cpu") -> IntGroups | None:
        found: IntGroups | None = self._whole.groups(self._cuts.original(name), device)
        return None if found is None else self._cut_groups(found, name)

    def kv_scale(self, attention: str) -> tuple[float, float]:
        scale: tuple[float, float] = self._whole.kv_scale(self._cuts.original_prefix(attention))
        return scale


class ShardedFp8(_Sharded, Fp8Checkpoint):
    """FP8 numbers and their scales: of rows, or of tiles."""

    @property
    def tiled(self) -> bool:
        tiled: bool = self._whole.tiled
        return tiled

    def stored(self, name: str, device: str | torch.device = "cpu") -> tuple[Tensor, Tensor] | None:
        found: tuple[Tensor, Tensor] | None = self._whole.stored(self._cuts.original(name), device)
        if found is None:
            return None
        weight, scale = found
        cut = self._cuts.of(name)
        return cut.apply(weight).contiguous(), scale if cut.inputs is not None else cut.apply(scale)

    def grouped(self, name: str, device: str | torch.device = "cpu") -> tuple[Tensor, Tensor] | None:
        found: tuple[Tensor, Tensor] | None = self._whole.grouped(self._cuts.original(name), device)
        if found is None:
            return None
        weight, scale = found
        cut = self._cuts.of(name)
        if cut.inputs is None:
            return cut.apply(weight).contiguous(), cut.apply(scale)
        group = weight.shape[1] // scale.shape[1]
        size = math.gcd(*cut.inputs, group)
        columns = torch.arange(*cut.inputs, size, device=scale.device) // group
        return cut.apply(weight).contiguous(), scale[:, columns].contiguous()

    def kv_scale(self, attention: str) -> tuple[float, float]:
        scale: tuple[float, float] = self._whole.kv_scale(self._cuts.original_prefix(attention))
        return scale


class ShardedMxfp4(_Sharded):
    """Experts in MXFP4, cut between blocks; where a cut would go through one, the matrix is dense."""

    def mxfp4(self, name: str, device: str | torch.device = "cpu") -> Mxfp4 | None:
        found: Mxfp4 | None = self._whole.mxfp4(self._cuts.original(name), device)
        cut = self._cuts.of(name)
        if found is None or cut is WHOLE:
            return found
        if cut.inputs is None:
            return Mxfp4(cut.apply(found.blocks), cut.apply(found.scales))
        begin, end = cut.inputs
        if begin % LEAST_GROUP or end % LEAST_GROUP:
            self._tell_dense(name, f"a cut at inputs {begin} and {end} goes through a block of {LEAST_GROUP}")
            return None
        return found.inputs(begin, end)


class ShardedFp4Experts(ShardedFp8, ShardedMxfp4):
    """The one with experts of the other."""


class ShardedGGUF(_Sharded, GGUFCheckpoint):
    """A GGUF file whose stored blocks are cut without being decoded, where the cut is between two of them."""

    def raw(self, name: str) -> RawTensor:
        raw: RawTensor = self._whole.raw(self._cuts.original(name))
        cut = self._cuts.of(name)
        if len(raw.shape) != 2 or cut is WHOLE:
            return raw
        if cut.inputs is None:
            data = cut.apply(torch.from_numpy(raw.data)).numpy()
            return RawTensor(raw.type, np.ascontiguousarray(data), (len(data), raw.shape[1]))
        weights, size = BLOCK[raw.type]
        begin, end = cut.inputs
        first, last = begin // weights, -(-end // weights)
        data = np.ascontiguousarray(raw.data[:, first * size : last * size])
        if begin % weights == 0 and end % weights == 0:
            return RawTensor(raw.type, data, (raw.shape[0], end - begin))
        wide = dequantize(torch.from_numpy(data), raw.type, (raw.shape[0], (last - first) * weights))
        inside = wide[:, begin - first * weights : end - first * weights].contiguous()
        return RawTensor(GGMLType.F32, inside.numpy().view(np.uint8), (raw.shape[0], end - begin))

    def groups(self, name: str, device: str | torch.device = "cpu") -> IntGroups | None:
        raw = self.raw(name)
        if raw.type != GGMLType.F32:
            return from_gguf(raw, device)
        found: IntGroups | None = self._whole.groups(self._cuts.original(name), device)
        return None if found is None else self._cut_groups(found, name)


def _cut_groups(groups: IntGroups, cut: Cut) -> IntGroups | str:
    """A rank's part of integers in groups, or why it is dense there."""
    if cut.inputs == (0, groups.shape[1]):  # in a pipeline of single shards nothing is cut
        cut = replace(cut, inputs=None)
    if cut.inputs is None:
        low = None if groups.minimum is None else cut.apply(groups.minimum)
        return replace(groups, quants=cut.apply(groups.quants), scale=cut.apply(groups.scale), minimum=low)
    begin, end = cut.inputs
    if groups.order is not None:
        return "its groups are scattered over the inputs (act-order)"
    size = math.gcd(begin, end, groups.group)
    if size % LEAST_GROUP:
        return f"a cut at inputs {begin} and {end} leaves groups of {size}"
    groups = groups.in_groups_of(size)
    columns = slice(begin // size, end // size)
    return replace(
        groups,
        quants=groups.quants[:, begin:end].contiguous(),
        scale=groups.scale[:, columns].contiguous(),
        minimum=None if groups.minimum is None else groups.minimum[:, columns].contiguous(),
    )
