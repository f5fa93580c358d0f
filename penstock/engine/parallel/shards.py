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
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
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
from penstock.engine.models.deepseek_v4 import OUTPUT as COMPRESSED_OUTPUT
from penstock.engine.models.deepseek_v4 import OUTPUT_DOWN, POOL
from penstock.engine.models.families import family_of
from penstock.engine.models.families.tensor_names import HEADS, TensorNames, prefix_of
from penstock.engine.models.kimi_linear import CONVOLUTIONS, DECAY_UP, GATE_UP, QUERY_KEY_VALUE, RATE
from penstock.engine.models.kimi_linear import OUTPUT as DELTA_OUTPUT
from penstock.engine.models.latent import LATENT_UP, OUTPUT, QUERY, QUERY_UP
from penstock.engine.models.llama import SPARSE_INDEXER
from penstock.engine.models.model_config import DeltaConfig, LatentConfig, MambaConfig, ModelConfig, ShortConvConfig
from penstock.engine.models.qwen4_exp import NGRAMS
from penstock.engine.models.weights import Weights
from penstock.engine.parallel.layout import Place, Span, even_span, given_keys, head_span, kv_head_span, stage_span

HEAD = "lm_head.weight"
HEAD_BIAS = "lm_head.bias"
SINKS = ".sinks"
LEAST_GROUP = 32
"""Inputs that the kernels expect to share a scale."""
_LAYER = re.compile(r"(.*\blayers\.)(\d+)(\..*)")
_OF_THE_CACHE = (".k_scale", ".v_scale")
"""How scales of an FP8 cache end. A layer has one for all its KV heads, so that ranks agree with one device."""

_log = logging.getLogger(__name__)


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
        self.layers = stage_span(model, place)
        heads, kv_heads = head_span(model, place), kv_head_span(model, place)
        tensors = family_of(model.family).names
        self._attention = attention_cuts(model, place)
        q, kv = (self._attention[name].outputs or () for name in tensors.qkv[:2])
        self._gate = f".{tensors.attention}{tensors.output_gate}." if tensors.output_gate else ""
        self._model = model
        self._choosing = f".{tensors.attention}{SPARSE_INDEXER}" if model.sparse_blocks is not None else ""
        if model.latent is not None:
            self._attention = _latent_cuts(heads, model.latent)
        if model.compression is not None:
            self._attention = {} if place.data else _compression_cuts(model, heads, place)
        if model.row_norms:
            self._attention |= {"q_norm": Cut(outputs=q), "k_norm": Cut(outputs=kv)}
        self._channel_delta: dict[str, Cut] = {}
        """Of delta nets whose matrices are called as those of attention in other layers."""
        self._recurrent: tuple[bool, ...] = ()
        self._mixer = f".{tensors.attention}"
        delta = model.delta
        if delta is not None and not delta.by_channel:
            self._attention |= delta_cuts(delta, place)
        elif delta is not None and not place.data:
            self._channel_delta, self._recurrent = channel_delta_cuts(delta, place), delta.layers
        self._inner_norm, self._mamba_norm = WHOLE, f".{tensors.mamba}norm.weight"
        if model.mamba is not None:
            self._attention |= mamba_cuts(model.mamba, place, tensors.mamba)
            self._inner_norm = WHOLE if place.data else mamba_heads(model.mamba, place, model.mamba.head_dim)
        self._short_conv_prefix = f".{tensors.short_conv}"
        self._short_conv: dict[str, Cut] = {}
        if model.short_conv is not None and not place.data:
            self._short_conv = short_conv_cuts(model.short_conv, place)
        if model.qk_layer_norm:
            q_norm, k_norm = tensors.head_norms
            self._attention |= {q_norm: Cut(outputs=(heads,)), k_norm: Cut(outputs=(kv_heads,))}
        dense = (*tensors.gate_up, tensors.fused_gate_up, tensors.down)
        expert = (*tensors.expert_gate_up, tensors.fused_gate_up, tensors.expert_down)
        self._dense = self._gated(model.ffn_size, *dense)
        self._experts = self._dense if model.moe is None else self._gated(model.moe.ffn_size, *expert)
        self._shared = self._dense if model.moe is None else self._gated(model.moe.shared_ffn_size, *dense)
        self._shared_prefix = f".{tensors.shared_expert}"
        self._shared_width = 0 if model.moe is None else model.moe.shared_ffn_size
        if model.moe is not None and model.moe.placement:
            self._experts = {}  # whole experts, each on some shards
        if model.moe is not None and model.moe.latent:
            # What the experts of a shard add up to is a part of the input: all of the matrix, the bias once.
            self._dense = {**self._dense, tensors.expert_latents[1]: Cut(inputs=(0, model.moe.latent))}
        self._by_layer: list[dict[str, Cut]] = []
        """Of layers that differ in their heads or in the width of their feed-forward."""
        if not place.data and (model.heads_differ or model.ffn_sizes):
            for index in range(model.num_layers):
                own = attention_cuts(model, place, index)
                self._by_layer.append(own | self._gated(model.ffn_in(index), *dense))
        if place.data:
            self._attention, self._dense, self._shared = {}, {}, {}
        begin, end = vocabulary_span(model, place)
        self._head = Cut(outputs=((begin, end),), padding=head_rows(model, place) - (end - begin))
        self._names: dict[str, str] = {}
        for name in names:
            found = _LAYER.fullmatch(name)
            if found is None:
                self._names[name] = name
            elif self.layers[0] <= int(found[2]) < self.layers[1]:
                self._names[f"{found[1]}{int(found[2]) - self.layers[0]}{found[3]}"] = name
        self._given = {at: layer for at, layer in enumerate(given_keys(model, place)) if layer is not None}
        self._give(names, tensors)
        stored = [self._names.pop(name) for name in map("{}.weight".format, HEADS) if name in self._names]
        if not stored and model.tied_embeddings:
            stored = [f"{prefix_of(self._names, tensors)}{tensors.embedding}.weight"]
        if stored:
            self._names[HEAD] = stored[0]

    def _give(self, names: Collection[str], tensors: TensorNames) -> None:
        """Layers that store keys of another stage's have that one's norm."""
        norm = f".{tensors.attention}{tensors.head_norms[1]}."
        for name in names if self._given else ():
            found = _LAYER.fullmatch(name)
            if found is not None and found[3].startswith(norm):
                for at, layer in self._given.items():
                    if int(found[2]) == layer:
                        self._names[f"{found[1]}{at}{found[3]}"] = name

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

    def original_prefix(self, prefix: str) -> str:
        """The same of the beginning of the names of what scales a layer's keys and values."""
        found = _LAYER.fullmatch(prefix)
        if found is None:
            return prefix
        at = int(found[2])
        return f"{found[1]}{self._given.get(at, at + self.layers[0])}{found[3]}"

    def of(self, name: str) -> Cut:
        if name in (HEAD, HEAD_BIAS):
            return self._head
        if name.endswith(SINKS):
            return self._by_heads(name, 1)
        if self._gate and self._gate in name:
            latent, layer = self._model.latent, self._layer(name)
            own = self._model.gates_in(layer) // self._model.queries_in(layer)
            return self._by_heads(name, own if latent is None else latent.value)
        if self._choosing and self._choosing in name:
            return self._of_indexer(name)
        if f".{POOL}" in name or f".{NGRAMS}" in name:
            return WHOLE  # entries and what chooses them are the same for all heads; n-grams belong to the streams
        if name.endswith(self._mamba_norm):
            return self._inner_norm
        module = name.rpartition(".")[0].rpartition(".")[2]
        if self._short_conv and self._short_conv_prefix in name:
            return self._short_conv.get(module, WHOLE)
        if self._channel_delta and self._mixer in name and self._recurrent[self._layer(name)]:
            return self._channel_delta.get(name.rpartition(".")[2]) or self._channel_delta.get(module, WHOLE)
        shared = self._shared_width and self._shared_prefix in name
        found = _LAYER.fullmatch(name) if self._by_layer else None
        if found is not None and ".experts." not in name and not shared:
            return self._by_layer[self._layer(name)].get(module, WHOLE)
        feed_forward = self._experts if ".experts." in name else self._dense
        if self._shared_prefix in name:
            feed_forward = self._shared
        return self._attention.get(module) or feed_forward.get(module) or WHOLE

    def _of_indexer(self, name: str) -> Cut:
        """Of what chooses blocks for the KV heads of a shard: its queries."""
        index = self._model.sparse_blocks
        assert index is not None
        if self.place.data or not name.endswith("q_proj.weight"):
            return WHOLE
        first, last = kv_head_span(self._model, self.place, index.heads)
        return Cut(outputs=((first * index.dim, last * index.dim),))

    def _by_heads(self, name: str, size: int) -> Cut:
        """Of something with `size` rows for each query head."""
        if self.place.data:
            return WHOLE
        first, last = head_span(self._model, self.place, self._layer(name))
        return Cut(outputs=((first * size, last * size),))

    def _layer(self, name: str) -> int:
        """The number of a layer in the whole model."""
        found = _LAYER.fullmatch(name)
        assert found is not None
        return self.layers[0] + int(found[2])

    def apply(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's part of a whole tensor: a matrix, a bias, or the scales of a quantized matrix's outputs."""
        cut = self.of(name)
        if tensor.dim() == 0 or tensor.numel() == 1 or name.endswith(_OF_THE_CACHE):
            return tensor
        if tensor.dim() == 4:  # [1, 1, heads, 1]
            return cut.apply(tensor.flatten()).view(1, 1, -1, 1)
        if cut.inputs is not None and (tensor.dim() == 1 or tensor.shape[1] == 1):
            # One number per output: every shard needs a scale, but only one may add a bias.
            return torch.zeros_like(tensor) if name.endswith(".bias") and self.place.shard else tensor
        return cut.apply(tensor)


def attention_cuts(model: ModelConfig, place: Place, layer: int | None = None) -> dict[str, Cut]:
    """Of attention. `layer`: where layers differ in their heads."""
    tensors = family_of(model.family).names
    kv_heads, dim = (model.num_kv_heads, model.head_dim) if layer is None else model.heads_in(layer)
    (first, last), (kv_first, kv_last) = head_span(model, place, layer), kv_head_span(model, place, kv_heads)
    q, kv = (first * dim, last * dim), (kv_first * dim, kv_last * dim)
    wide = model.value_dim or dim
    values, attended = (kv_first * wide, kv_last * wide), (first * wide, last * wide)
    queries, keys = (model.num_heads if layer is None else model.queries_in(layer)) * dim, kv_heads * dim
    query, key, value = tensors.qkv
    return {
        query: Cut(outputs=((2 * q[0], 2 * q[1]) if model.gated_attention else q,)),
        key: Cut(outputs=(kv,)),
        value: Cut(outputs=(values,)),
        tensors.fused_qkv: Cut(outputs=(q, _shift(kv, queries), _shift(values, queries + keys))),
        tensors.output: Cut(inputs=attended),
    }


def delta_cuts(delta: DeltaConfig, place: Place) -> dict[str, Cut]:
    """Of a gated delta net: by key heads, each with its value heads."""
    ratio = delta.v_heads // delta.k_heads
    keys, wide = delta.k_heads * delta.k_dim, ratio * delta.v_dim
    span = even_span(delta.k_heads, place)

    def each(size: int, shift: int = 0) -> Span:
        """Of something with `size` rows for each key head."""
        return _shift((span[0] * size, span[1] * size), shift)

    channels = Cut(outputs=(each(delta.k_dim), each(delta.k_dim, keys), each(wide, 2 * keys)))
    by_value_head = Cut(outputs=(each(ratio),))
    return {
        "in_proj_qkvz": Cut(outputs=(each(2 * delta.k_dim + 2 * wide),)),
        "in_proj_ba": Cut(outputs=(each(2 * ratio),)),
        "in_proj_qkv": channels,
        "conv1d": channels,
        "in_proj_z": Cut(outputs=(each(wide),)),
        "in_proj_b": by_value_head,
        "in_proj_a": by_value_head,
        "linear_attn": by_value_head,  # numbers of each head, which are no matrices
        "out_proj": Cut(inputs=each(wide)),
    }


def channel_delta_cuts(delta: DeltaConfig, place: Place) -> dict[str, Cut]:
    """Of a delta net with a decay for every channel, by heads: matrices, and tensors that are none. What decays and
    output gates go through is everywhere."""
    begin, end = even_span(delta.k_heads, place)
    wide = begin * delta.k_dim, end * delta.k_dim
    by_channel = (*QUERY_KEY_VALUE, *CONVOLUTIONS, DECAY_UP.rpartition(".")[2], GATE_UP, "dt_bias")
    return {
        **dict.fromkeys(by_channel, Cut(outputs=(wide,))),
        **dict.fromkeys((RATE, "A_log"), Cut(outputs=((begin, end),))),
        DELTA_OUTPUT: Cut(inputs=wide),
    }


def mamba_heads(mamba: MambaConfig, place: Place, size: int = 1) -> Cut:
    """Of something with `size` rows for each head of a Mamba layer."""
    begin, end = even_span(mamba.heads, place)
    return Cut(outputs=((begin * size, end * size),))


def mamba_spans(mamba: MambaConfig, place: Place) -> tuple[Span, ...]:
    """A shard's rows of the convolution: by heads, with the groups that its heads share."""
    begin, end = even_span(mamba.heads, place)
    ratio, inner, shared = mamba.heads // mamba.groups, mamba.inner, mamba.groups * mamba.state
    group = begin // ratio * mamba.state, -(-end // ratio) * mamba.state
    return (begin * mamba.head_dim, end * mamba.head_dim), _shift(group, inner), _shift(group, inner + shared)


def mamba_projection(mamba: MambaConfig, place: Place) -> tuple[Span, ...]:
    """A shard's rows of the projection: gates, what is convolved, time steps."""
    channels = mamba_spans(mamba, place)
    behind = (_shift(span, mamba.inner) for span in channels)
    return channels[0], *behind, _shift(even_span(mamba.heads, place), mamba.inner + mamba.channels)


def mamba_cuts(mamba: MambaConfig, place: Place, prefix: str) -> dict[str, Cut]:
    """Of a Mamba layer: by heads. For its norm, which is called as others are, see `Cuts`."""
    channels = mamba_spans(mamba, place)
    return {
        "in_proj": Cut(outputs=mamba_projection(mamba, place)),
        "conv1d": Cut(outputs=channels),
        prefix.rstrip("."): mamba_heads(mamba, place),  # numbers of each head, which are no matrices
        "out_proj": Cut(inputs=channels[0]),
    }


def short_conv_cuts(short: ShortConvConfig, place: Place) -> dict[str, Cut]:
    """Of a short convolution: by channels."""
    span = even_span(short.channels, place)
    parts = tuple(_shift(span, part * short.channels) for part in range(3))
    return {"in_proj": Cut(outputs=parts), "conv": Cut(outputs=(span,)), "out_proj": Cut(inputs=span)}


def head_rows(model: ModelConfig, place: Place) -> int:
    """Rows of the head on this rank; none behind the first stage."""
    return -(-model.vocab_size // place.tensor) if place.first else 0


def vocabulary_span(model: ModelConfig, place: Place) -> Span:
    """The tokens whose logits this rank computes; the last shards may have fewer, and padding."""
    rows = head_rows(model, place)
    begin = min(place.shard * rows, model.vocab_size)
    return begin, min(begin + rows, model.vocab_size)


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


def _compression_cuts(model: ModelConfig, heads: Span, place: Place) -> dict[str, Cut]:
    """Of attention to entries: by runs of heads."""
    shape = model.compression
    assert shape is not None
    begin, end = even_span(shape.output_groups, place)
    runs = begin * shape.output_rank, end * shape.output_rank
    return {
        QUERY_UP: Cut(outputs=((heads[0] * model.head_dim, heads[1] * model.head_dim),)),
        OUTPUT_DOWN: Cut(outputs=(runs,)),
        COMPRESSED_OUTPUT: Cut(inputs=runs),
    }


def _latent_cuts(heads: Span, latent: LatentConfig) -> dict[str, Cut]:
    """By heads; what makes latents, and what queries go through, is everywhere."""

    def of(size: int) -> Span:
        return heads[0] * size, heads[1] * size

    query = latent.plain + latent.rotary
    queries = Cut(outputs=(of(query),))
    return {
        QUERY: queries,
        QUERY_UP: Cut(outputs=(of(query + latent.value),)) if latent.gated_queries else queries,
        LATENT_UP: Cut(outputs=(of(latent.plain + latent.value),)),
        OUTPUT: Cut(inputs=of(latent.value)),
    }


def _shift(span: Span, by: int) -> Span:
    return span[0] + by, span[1] + by
