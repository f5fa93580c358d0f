"""The cut of every tensor of a model; `shards` says what is cut how."""

from __future__ import annotations

import re
from collections.abc import Collection

import torch
from torch import Tensor

from penstock.engine.models.deepseek_v4 import POOL
from penstock.engine.models.families import family_of
from penstock.engine.models.families.tensor_names import HEADS, TensorNames, prefix_of
from penstock.engine.models.latent import INDEXER
from penstock.engine.models.llama import SPARSE_INDEXER
from penstock.engine.models.model_config import ModelConfig
from penstock.engine.models.qwen4_exp import NGRAMS
from penstock.engine.parallel.layer_cuts import (
    WHOLE,
    Cut,
    attention_cuts,
    channel_delta_cuts,
    compression_cuts,
    delta_cuts,
    latent_cuts,
    mamba_cuts,
    mamba_heads,
    shifted,
    short_conv_cuts,
)
from penstock.engine.parallel.layout import Place, Span, even_span, given_keys, head_span, kv_head_span, stage_span

HEAD = "lm_head.weight"
HEAD_BIAS = "lm_head.bias"
SINKS = ".sinks"
_LAYER = re.compile(r"(.*\blayers\.)(\d+)(\..*)")
_OF_THE_CACHE = (".k_scale", ".v_scale")
"""How scales of an FP8 cache end. A layer has one for all its KV heads, so that ranks agree with one device."""


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
        self._choosing_of_latents = f".{tensors.attention}{INDEXER}" if model.latent is not None else ""
        if model.latent is not None:
            self._attention = latent_cuts(heads, model.latent)
        if model.compression is not None:
            self._attention = {} if place.data else compression_cuts(model, heads, place)
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
        unrotated = model.latent is not None and model.latent.unrotated
        if not place.data and (model.heads_differ or model.ffn_sizes or unrotated):
            for index in range(model.num_layers):
                latent = model.latent
                own = attention_cuts(model, place, index) if latent is None else latent_cuts(heads, latent, index)
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
            gate_up: Cut(outputs=(span, shifted(span, width))),
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
        if self._choosing_of_latents and self._choosing_of_latents in name:
            return WHOLE
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


def head_rows(model: ModelConfig, place: Place) -> int:
    """Rows of the head on this rank; none behind the first stage."""
    return -(-model.vocab_size // place.tensor) if place.first else 0


def vocabulary_span(model: ModelConfig, place: Place) -> Span:
    """The tokens whose logits this rank computes; the last shards may have fewer, and padding."""
    rows = head_rows(model, place)
    begin = min(place.shard * rows, model.vocab_size)
    return begin, min(begin + rows, model.vocab_size)
