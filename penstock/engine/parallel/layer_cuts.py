"""How the matrices of attention, recurrent layers and their like are cut between shards: by heads, or by what is like
them. See `cuts`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine.models.attention_config import LatentConfig
from penstock.engine.models.deepseek_v4 import OUTPUT as COMPRESSED_OUTPUT
from penstock.engine.models.deepseek_v4 import OUTPUT_DOWN
from penstock.engine.models.families import family_of
from penstock.engine.models.kimi_linear import CONVOLUTION, CONVOLUTIONS, DECAY_UP, GATE_UP, QUERY_KEY_VALUE, RATE
from penstock.engine.models.kimi_linear import OUTPUT as DELTA_OUTPUT
from penstock.engine.models.latent import LATENT_UP, OUTPUT, QUERY, QUERY_UP, SCALES
from penstock.engine.models.model_config import ModelConfig
from penstock.engine.models.recurrence_config import DeltaConfig, MambaConfig, ShortConvConfig
from penstock.engine.parallel.layout import Place, Span, even_span, head_span, kv_head_span


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
        tensors.fused_qkv: Cut(outputs=(q, shifted(kv, queries), shifted(values, queries + keys))),
        tensors.output: Cut(inputs=attended),
    }


def latent_cuts(heads: Span, latent: LatentConfig, layer: int = 0) -> dict[str, Cut]:
    """By heads; what makes latents, and what queries go through, is everywhere. `layer`: where layers differ."""

    def of(size: int) -> Span:
        return heads[0] * size, heads[1] * size

    query = latent.plain + latent.rotary
    queries = Cut(outputs=(of(query),))
    return {
        QUERY: queries,
        QUERY_UP: Cut(outputs=(of(query + latent.value),)) if latent.gated_queries else queries,
        LATENT_UP: Cut(outputs=(of(latent.plain_in(layer) + latent.value),)),
        SCALES: Cut(outputs=(heads,)),
        OUTPUT: Cut(inputs=of(latent.value)),
    }


def compression_cuts(model: ModelConfig, heads: Span, place: Place) -> dict[str, Cut]:
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


def delta_cuts(delta: DeltaConfig, place: Place) -> dict[str, Cut]:
    """Of a gated delta net: by key heads, each with its value heads."""
    ratio = delta.v_heads // delta.k_heads
    keys, wide = delta.k_heads * delta.k_dim, ratio * delta.v_dim
    span = even_span(delta.k_heads, place)

    def each(size: int, shift: int = 0) -> Span:
        """Of something with `size` rows for each key head."""
        return shifted((span[0] * size, span[1] * size), shift)

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
    parts = tuple(shifted(wide, part * delta.k_heads * delta.k_dim) for part in range(3))
    by_channel = (*QUERY_KEY_VALUE, *CONVOLUTIONS, DECAY_UP.rpartition(".")[2], GATE_UP, "dt_bias")
    return {
        **dict.fromkeys(by_channel, Cut(outputs=(wide,))),
        CONVOLUTION: Cut(outputs=parts),
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
    return (begin * mamba.head_dim, end * mamba.head_dim), shifted(group, inner), shifted(group, inner + shared)


def mamba_projection(mamba: MambaConfig, place: Place) -> tuple[Span, ...]:
    """A shard's rows of the projection: gates, what is convolved, time steps."""
    channels = mamba_spans(mamba, place)
    behind = (shifted(span, mamba.inner) for span in channels)
    return channels[0], *behind, shifted(even_span(mamba.heads, place), mamba.inner + mamba.channels)


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
    parts = tuple(shifted(span, part * short.channels) for part in range(3))
    return {"in_proj": Cut(outputs=parts), "conv": Cut(outputs=(span,)), "out_proj": Cut(inputs=span)}


def shifted(span: Span, by: int) -> Span:
    return span[0] + by, span[1] + by
