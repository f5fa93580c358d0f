"""A checkpoint as one rank sees it: the rows and columns of each matrix that are its own, its layers from zero on.

The view has the names and shapes of a smaller model, so builders of decoders and quantizers need not know that there
are other ranks. What is cut: query, key, value, gate and up matrices by outputs (heads, width), output and
down matrices by inputs; their bias stays whole on shard 0 and is zero elsewhere, because it is added to a sum. The
head, tied or not, is cut by outputs under the name `lm_head`, the last part filled up with zeros. All else (norms,
routers, the embedding) is everywhere.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.engine.loading.checkpoint import GGUFCheckpoint
from penstock.engine.loading.fp8 import Fp8Checkpoint
from penstock.engine.loading.gguf import BLOCK, RawTensor
from penstock.engine.loading.groups import IntGroups, from_gguf
from penstock.engine.loading.quantized import QuantizedCheckpoint
from penstock.engine.models.families import family_of
from penstock.engine.models.model_config import ModelConfig
from penstock.engine.models.weights import Weights
from penstock.engine.parallel.layout import Place, Span, even_span, head_span, kv_head_span, layer_span
from penstock.errors import ConfigError

HEAD = "lm_head.weight"
LEAST_GROUP = 32
"""Inputs that the kernels expect to share a scale."""
_LAYER = re.compile(r"(.*\blayers\.)(\d+)(\..*)")


@dataclass(frozen=True, slots=True)
class Cut:
    """Which part of a matrix [out, in] a rank has: some runs of outputs, or one run of inputs."""

    outputs: tuple[Span, ...] | None = None
    inputs: Span | None = None
    padding: int = 0
    """Rows of zeros behind the outputs."""

    def apply(self, tensor: Tensor) -> Tensor:
        if self.inputs is not None:
            return tensor[:, slice(*self.inputs)]
        if self.outputs is None:
            return tensor
        parts = [tensor[slice(*span)] for span in self.outputs]
        if self.padding:
            parts.append(tensor.new_zeros(self.padding, *tensor.shape[1:]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


WHOLE = Cut()


class Cuts:
    """The cut of every tensor of a model for one rank, and the names it goes by there."""

    def __init__(self, model: ModelConfig, place: Place, names: Collection[str]) -> None:
        self.place = place
        self.layers = layer_span(model.num_layers, place)
        dim = model.head_dim
        heads, kv_heads = head_span(model, place), kv_head_span(model, place)
        q = heads[0] * dim, heads[1] * dim
        kv = kv_heads[0] * dim, kv_heads[1] * dim
        queries, keys = model.num_heads * dim, model.num_kv_heads * dim
        tensors = family_of(model.family).names
        query, key, value = tensors.qkv
        self._attention = {
            query: Cut(outputs=(q,)),
            key: Cut(outputs=(kv,)),
            value: Cut(outputs=(kv,)),
            tensors.fused_qkv: Cut(outputs=(q, _shift(kv, queries), _shift(kv, queries + keys))),
            tensors.output: Cut(inputs=q),
        }
        dense = (*tensors.gate_up, tensors.fused_gate_up, tensors.down)
        expert = (*tensors.expert_gate_up, tensors.fused_gate_up, tensors.expert_down)
        self._dense = self._gated(model.ffn_size, *dense)
        self._experts = self._dense if model.moe is None else self._gated(model.moe.ffn_size, *expert)
        if model.moe is not None and model.moe.placement:
            self._experts = {}  # whole experts, each on some shards
        rows = head_rows(model, place)
        begin = min(place.shard * rows, model.vocab_size)
        end = min(begin + rows, model.vocab_size)
        self._head = Cut(outputs=((begin, end),), padding=rows - (end - begin))
        self._names: dict[str, str] = {}
        for name in names:
            found = _LAYER.fullmatch(name)
            if found is None:
                self._names[name] = name
            elif self.layers[0] <= int(found[2]) < self.layers[1]:
                self._names[f"{found[1]}{int(found[2]) - self.layers[0]}{found[3]}"] = name
        stored = [self._names.pop(name) for name in (HEAD, f"language_model.{HEAD}") if name in self._names]
        if not stored and model.tied_embeddings:
            stored = [name for name in self._names if name.endswith("embed_tokens.weight")]
        if stored:
            self._names[HEAD] = stored[0]

    def _gated(self, width: int, gate: str, up: str, gate_up: str, down: str) -> dict[str, Cut]:
        span = even_span(width, self.place)
        outputs, inputs = Cut(outputs=(span,)), Cut(inputs=span)
        return {
            gate: outputs,
            up: outputs,
            gate_up: Cut(outputs=(span, _shift(span, width))),
            down: inputs,
        }

    def names(self) -> Collection[str]:
        return self._names.keys()

    def original(self, name: str) -> str:
        """What the whole checkpoint calls a tensor of this rank."""
        return self._names.get(name, name)

    def of(self, name: str) -> Cut:
        if name == HEAD:
            return self._head
        module = name.rpartition(".")[0].rpartition(".")[2]
        feed_forward = self._experts if ".experts." in name else self._dense
        return self._attention.get(module) or feed_forward.get(module) or WHOLE

    def apply(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's part of a whole tensor: a matrix, a bias, or the scales of a quantized matrix's outputs."""
        cut = self.of(name)
        if tensor.dim() == 0 or tensor.numel() == 1:
            return tensor
        if cut.inputs is not None and (tensor.dim() == 1 or tensor.shape[1] == 1):
            # One number per output: every shard needs a scale, but only one may add a bias.
            return torch.zeros_like(tensor) if name.endswith(".bias") and self.place.shard else tensor
        return cut.apply(tensor)


def head_rows(model: ModelConfig, place: Place) -> int:
    """Rows of the head on this rank; none behind the first stage."""
    return -(-model.vocab_size // place.tensor) if place.first else 0


def shard(weights: Weights, model: ModelConfig, place: Place) -> Weights:
    """The part of a checkpoint that `place` holds."""
    if isinstance(weights, GGUFCheckpoint):
        return ShardedGGUF(weights, model, place)
    if isinstance(weights, QuantizedCheckpoint):
        return ShardedQuantized(weights, model, place)
    if isinstance(weights, Fp8Checkpoint) and weights.scaled_by_rows:
        return Fp8Checkpoint(ShardedTensors(weights.inner, model, place))
    return ShardedTensors(weights, model, place)


class _Sharded:
    """What all views share: names and dense tensors."""

    def __init__(self, whole: Any, model: ModelConfig, place: Place) -> None:
        self.config: dict[str, Any] = whole.config
        self._whole = whole
        self._cuts = Cuts(model, place, whole.names())

    def names(self) -> Collection[str]:
        return self._cuts.names()

    def tensor(self, name: str, device: str | torch.device = "cpu") -> Tensor:
        whole: Tensor = self._whole.tensor(self._cuts.original(name))
        return self._cuts.apply(name, whole).contiguous().to(device)


class ShardedTensors(_Sharded):
    """Any checkpoint of plain tensors, or one that gives them."""


class ShardedQuantized(_Sharded, QuantizedCheckpoint):
    """Integers in groups, cut without being multiplied out."""

    def groups(self, name: str, device: str | torch.device = "cpu") -> IntGroups | None:
        found: IntGroups | None = self._whole.groups(self._cuts.original(name), device)
        return None if found is None else _cut_groups(found, self._cuts.of(name), name, self._cuts.place)


class ShardedGGUF(_Sharded, GGUFCheckpoint):
    """A GGUF file whose stored blocks are cut without being decoded."""

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
        if begin % weights or end % weights:
            raise _inside(name, self._cuts.place, cut.inputs, f"a {raw.type.name} block of {weights}")
        data = raw.data[:, begin // weights * size : end // weights * size]
        return RawTensor(raw.type, np.ascontiguousarray(data), (raw.shape[0], end - begin))

    def groups(self, name: str, device: str | torch.device = "cpu") -> IntGroups | None:
        return from_gguf(self.raw(name), device)


def _cut_groups(groups: IntGroups, cut: Cut, name: str, place: Place) -> IntGroups:
    if cut.inputs is None:
        low = None if groups.minimum is None else cut.apply(groups.minimum)
        return replace(groups, quants=cut.apply(groups.quants), scale=cut.apply(groups.scale), minimum=low)
    if groups.order is not None:
        raise ConfigError(
            f"tensor_parallel: {place.tensor} cannot cut {name}: its groups are scattered over the inputs (act-order); "
            "use pipeline_parallel instead, or weights: dense"
        )
    begin, end = cut.inputs
    size = math.gcd(begin, end, groups.group)
    if size % LEAST_GROUP:
        raise _inside(name, place, cut.inputs, f"a group of {groups.group}")
    groups = groups.in_groups_of(size)
    columns = slice(begin // size, end // size)
    return replace(
        groups,
        quants=groups.quants[:, begin:end].contiguous(),
        scale=groups.scale[:, columns].contiguous(),
        minimum=None if groups.minimum is None else groups.minimum[:, columns].contiguous(),
    )


def _inside(name: str, place: Place, inputs: Span, what: str) -> ConfigError:
    return ConfigError(
        f"tensor_parallel: {place.tensor} cuts {name} at inputs {inputs[0]} and {inputs[1]}, inside {what}; "
        "use fewer shards, pipeline_parallel, or weights: dense"
    )


def _shift(span: Span, by: int) -> Span:
    return span[0] + by, span[1] + by
