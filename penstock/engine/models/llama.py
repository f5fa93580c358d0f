"""Llama and the families like it: layers of attention and a gated feed-forward, dense or of experts, with
norms before these two parts, behind them, or both.

The residual stream is one tensor updated in place; the residual addition and the norm after it are one operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from penstock.engine.backends.activation import has_gate
from penstock.engine.backends.interface import (
    Activation,
    ActivationOps,
    AttentionBatch,
    BoundedSilu,
    ClampedSilu,
    Clip,
    HeadLayout,
    SparseBlockLayout,
    Xielu,
)
from penstock.engine.kv.cache import KVCache
from penstock.engine.models.architecture import Architecture, LayerContext
from penstock.engine.models.attention_config import SparseBlockConfig
from penstock.engine.models.boundary import Boundary, boundaries_of
from penstock.engine.models.decoder import Decoder, DecoderLayer
from penstock.engine.models.layers.attention import Attention, HeadLayerNorms, RowNorms
from penstock.engine.models.layers.experts import (
    ExpertMlp,
    ExpertSlots,
    ExpertSource,
    NarrowExperts,
    Router,
    StepTokens,
    held,
)
from penstock.engine.models.layers.feed_forward import FeedForward, GatedMlp, ScaledMlp
from penstock.engine.models.layers.gated_attention import OutputGatedAttention
from penstock.engine.models.layers.linear import Linear, WideLinear
from penstock.engine.models.layers.narrow_values import NarrowValueAttention
from penstock.engine.models.layers.rotary import query_scales
from penstock.engine.models.layers.sparse_block_attention import SparseBlockAttention, TokenIndexer
from penstock.engine.models.layers.stage_attention import GivenAttention, LeavingAttention, StepKeys
from penstock.engine.models.layers.visit_norm import VisitNorm
from penstock.engine.models.moe_config import MoeConfig
from penstock.engine.models.weights import WeightReader
from penstock.errors import CheckpointError

SPARSE_INDEXER = "indexer."
"""Of attention, where it chooses blocks by the keys of their tokens."""
HASHED = "gate.tid2eid"
"""Of a block of experts, where token ids say which are visited."""


@dataclass(frozen=True, slots=True)
class LlamaDecoder(Decoder):
    """See `Decoder`. Mixers and feed-forwards may be of any kind."""

    uniform: ClassVar[bool] = True
    boundaries: tuple[Boundary, ...] = field(init=False, repr=False, compare=False, default=())
    """Behind each layer's attention, for steps of one token; none where the backend computes no chain of products."""

    def __post_init__(self) -> None:
        if self.chains and self.fused_up_to:
            # Made of these layers, whichever a copy of the decoder has.
            object.__setattr__(self, "boundaries", boundaries_of(self.layers, self.ops, self.config.rms_eps))

    @property
    def launched_eagerly(self) -> bool:
        return self.config.sparse_blocks is not None  # how a step is cut depends on its sequences

    @property
    def chained(self) -> bool:
        return bool(self.boundaries)

    def run(self, residual: Tensor, batch: AttentionBatch, kv: KVCache) -> Tensor:
        if residual.shape[0] <= self.fused_up_to:
            one = residual.shape[0] == 1 and self.boundaries
            return self._run_chained(residual, batch, kv) if one else self._run_fused(residual, batch, kv)
        layers, eps = self.layers, self.config.rms_eps
        layer = layers[0]
        x = layer.mixer.ops.rms_norm(residual, layer.mixer_norm, eps, self.embedding.dtype)
        for after, cache in zip([*layers[1:], None], kv.layers, strict=True):
            x = layer.mixer.forward(x, batch, cache)
            feed_forward = layer.feed_forward
            x = feed_forward.ops.add_rms_norm(x, residual, layer.feed_forward_norm, eps, layer.mixer_out_norm)
            x = feed_forward.forward(x)
            if after is not None:
                x = after.mixer.ops.add_rms_norm(x, residual, after.mixer_norm, eps, layer.feed_forward_out_norm)
                layer = after
        return self.ops.add_rms_norm(x, residual, self.final_norm, eps, layer.feed_forward_out_norm)

    def _run_fused(self, residual: Tensor, batch: AttentionBatch, kv: KVCache) -> Tensor:
        """The same in six launches a layer: norms, gate and residual additions are part of the linears."""
        caches, eps = kv.layers, self.config.rms_eps
        for index, layer in enumerate(self.layers):
            mixer: Any = layer.mixer
            feed_forward: Any = layer.feed_forward
            residual = mixer.fused(residual, layer.mixer_norm, eps, batch, caches[index])
            residual = feed_forward.fused(residual, layer.feed_forward_norm, eps)
        return self.ops.rms_norm(residual, self.final_norm, eps)

    def _run_chained(self, residual: Tensor, batch: AttentionBatch, kv: KVCache) -> Tensor:
        """The same with everything between two attentions in one launch."""
        caches, eps, layer = kv.layers, self.config.rms_eps, self.layers[0]
        mixer: Any = layer.mixer
        qkv: Any = mixer.qkv.fused(residual, norm=layer.mixer_norm, eps=eps)
        for index, boundary in enumerate(self.boundaries):
            mixer = boundary.layer.mixer
            qkv = boundary.cross(mixer.attend(qkv, batch, caches[index]), residual)
        return self.ops.rms_norm(residual, self.final_norm, eps)


def compose_layer(context: LayerContext) -> DecoderLayer:
    read, names, prefix, hidden = context.read, context.names, context.prefix, context.config.hidden_size

    def norm(name: str) -> Tensor | None:
        return read.norm(prefix + name, hidden) if name else None

    def out_norm(name: str) -> Tensor | None:
        gains, scale = norm(name), context.config.out_norm_scale
        return gains if gains is None or scale == 1.0 else gains * scale

    return DecoderLayer(
        mixer_norm=norm(names.mixer_norm),
        mixer=compose_attention(context),
        feed_forward_norm=norm(names.feed_forward_norm),
        feed_forward=compose_feed_forward(context),
        mixer_out_norm=out_norm(names.mixer_out_norm),
        feed_forward_out_norm=out_norm(names.feed_forward_out_norm),
    )


def compose_attention(context: LayerContext) -> Attention:
    read, config, names = context.read, context.config, context.names
    kv_heads, dim = config.heads_in(context.index)
    shared, source = config.shares(context.index), config.source_of(context.index)
    given, stage = config.given_to(context.index), config.stage
    prefix, hidden = context.prefix + names.attention, config.hidden_size
    heads = config.queries_in(context.index)
    q_size, kv_size, v_size = heads * dim, kv_heads * dim, config.values_in(context.index)
    q_gains, k_gains = ((heads, dim), (kv_heads, dim)) if config.qk_layer_norm else ((dim,), (dim,))
    unrotated = bool(config.unrotated) and config.unrotated[context.index]
    plain_norms = config.rotated_qk_norm or config.plain_qk_norm or (config.unweighted_qk_norm and not unrotated)
    ones = read.ones(dim) if plain_norms else None
    growth = config.query_growth
    if growth is not None and not growth.everywhere and not unrotated:
        growth = None
    parts = list(zip(names.qkv, (q_size, kv_size, v_size), strict=True))
    qkv = dict(parts[: {"": 3, "values": 2, "both": 1}[config.projects(context.index)]])
    q_norm, k_norm = (prefix + name for name in names.head_norms)
    make: Callable[..., Attention] = Attention
    if config.value_dim or config.value_scale != 1.0:
        make = partial(NarrowValueAttention, value_dim=config.value_dim or dim, value_scale=config.value_scale)
    elif config.output_gate:
        # Gates of heads are too few for matrices in few bits.
        gate = (read.dense() if config.gates_by_head else read).linear(
            prefix, {names.output_gate: config.gates_in(context.index)}, hidden
        )
        output_gains = read.ones(dim) if config.normed_outputs else None
        make = partial(
            OutputGatedAttention, output_gate=gate, softplus=config.softplus_gates, output_gains=output_gains
        )
    elif config.sparse_blocks is not None and config.sparse_blocks.layers[context.index]:
        make = partial(SparseBlockAttention, indexer=_compose_indexer(context, config.sparse_blocks))
    elif given is not None:
        make = partial(GivenAttention, step=StepKeys(given))
    elif stage is not None and (whole := stage.first + context.index) in dict(stage.leaves.keys):
        make = partial(LeavingAttention, step=StepKeys(whole))
    return make(
        # Gates that stay dense read what projections read, as plain numbers.
        ops=read.backend.ops if config.output_gate and config.gates_by_head else context.inner,
        attention_ops=read.backend.ops,
        qkv=read.linear(prefix, qkv, hidden, config.qkv_bias, fused=names.fused_qkv),
        output=read.linear(prefix, {names.output: hidden}, config.attended_in(context.index), config.output_bias),
        heads=HeadLayout(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=dim,
            scale=config.attention_scale,
            window=config.windows[context.index],
            chunked=config.chunked and config.windows[context.index] is not None,
            softcap=config.attention_softcap,
            interleaved=config.interleaved_rope,
            centred_norms=config.qk_layer_norm,
            normed_values=config.normed_values,
            shared=shared,
        ),
        cos_sin=context.cos_sin,
        q_norm=read.norm(q_norm, *q_gains) if config.qk_norm else ones,
        k_norm=read.norm(k_norm, *k_gains) if config.qk_norm and shared != "both" else ones,
        head_norms=HeadLayerNorms(*(_head_norm(read, name, dim) for name in (q_norm, k_norm)))
        if config.biased_qk_norm
        else None,
        row_norms=RowNorms(read.norm(q_norm, q_size), read.norm(k_norm, kv_size)) if config.row_norms else None,
        query_gains=read.norm(q_norm, dim).float() * read.norm(k_norm, dim).float() if config.rotated_qk_norm else None,
        eps=config.rms_eps,
        kv_scales=read.kv_scales(f"{context.beginning(source)}{names.attention}", kv_heads)
        if context.fp8_cache
        else None,
        query_scales=None if growth is None else query_scales(growth, len(context.cos_sin), read.backend.device),
        clip=None if config.clip_qkv is None else Clip(config.clip_qkv),
        sinks=read.get(f"{prefix}sinks", heads, dtype=torch.float32) if config.has_sinks(context.index) else None,
        source=None if source == context.index else source,
    )


def _compose_indexer(context: LayerContext, index: SparseBlockConfig) -> TokenIndexer:
    read, config = context.read, context.config
    at = f"{context.prefix}{context.names.attention}{SPARSE_INDEXER}"
    return TokenIndexer(
        linear=read.linear(at, {"q_proj": index.heads * index.dim, "k_proj": index.dim}, config.hidden_size),
        query_norm=read.norm(f"{at}q_norm", index.dim),
        key_norm=read.norm(f"{at}k_norm", index.dim),
        layout=SparseBlockLayout(index.heads, index.dim, index.rate, index.most, index.local, config.rms_eps),
        dtype=read.dtype,
    )


def _head_norm(read: WeightReader, name: str, dim: int) -> tuple[Tensor, Tensor]:
    gains, biases = (read.get(f"{name}.{part}", dim, dtype=torch.float32) for part in ("weight", "bias"))
    return gains, biases


def compose_feed_forward(context: LayerContext, tokens: StepTokens | None = None) -> FeedForward:
    """Dense, or of experts where the configuration says so. `tokens`: those of a step, where experts are chosen by
    them."""
    config, names, moe = context.config, context.names, context.config.moe
    if moe is None or not moe.layers[context.index]:
        mlp = compose_mlp(context, names.mlp, config.ffn_in(context.index), context.inner)
        if config.mlp_scales == (1.0, 1.0):
            return mlp
        return ScaledMlp(mlp.ops, mlp.activation, mlp.gate_up, mlp.down, *config.mlp_scales)
    routed = compose_routed(context, tokens)
    if not moe.shared_ffn_size:
        return routed
    read, backend = context.read, context.read.backend
    gate = f"{context.prefix}{names.moe}"
    shared = compose_mlp(context, names.moe + names.shared_expert, moe.shared_ffn_size, backend.ops)
    if moe.shared_scale != 1.0:
        shared = ScaledMlp(shared.ops, shared.activation, shared.gate_up, shared.down, 1.0, moe.shared_scale)
    return backend.with_shared(
        routed=routed,
        shared=shared,
        gate=read.dense().linear(gate, {names.shared_gate: 1}, config.hidden_size) if moe.shared_gate else None,
    )


def compose_mlp(context: LayerContext, at: str, ffn: int, ops: ActivationOps) -> GatedMlp:
    """One that every token visits; `at`: what its names begin with."""
    names, bias = context.names, context.config.mlp_bias
    made = _gated(context, context.read, context.prefix + at, (*names.gate_up, names.down), ffn, bias, ops)
    bound = context.config.bound_in(context.index)
    return replace(made, activation=BoundedSilu(bound)) if bound else made


def _gated(
    context: LayerContext,
    read: WeightReader,
    prefix: str,
    matrices: tuple[str, str, str],
    ffn: int,
    bias: bool,
    ops: ActivationOps,
    *,
    fused: str | None = None,
    outer: int = 0,
) -> GatedMlp:
    """`matrices`: gate, up, down; `fused`: the first two, where they are stored as one. `outer`: numbers that are read
    and given, where they are not those of a token."""
    config, (gate, up, down), activation = context.config, matrices, context.config.activation
    outer, fused = outer or config.hidden_size, context.names.fused_gate_up if fused is None else fused
    if isinstance(activation, Xielu):
        activation = _xielu(read, f"{prefix}act_fn.", activation)
    parts = dict.fromkeys((gate, up) if has_gate(activation) else (up,), ffn)
    return GatedMlp(
        ops=ops,
        activation=activation,
        gate_up=read.linear(prefix, parts, outer, bias, fused),
        down=read.linear(prefix, {down: outer}, ffn, bias),
    )


def compose_routed(context: LayerContext, tokens: StepTokens | None = None) -> FeedForward:
    """The experts of which a token visits a few. `tokens`: see `compose_feed_forward`."""
    read, config, names, moe = context.read, context.config, context.names, context.config.moe
    assert moe is not None
    hidden, backend = config.hidden_size, context.read.backend
    block, ffn = context.prefix + names.moe, moe.ffn_size
    corrected, hashed = f"{block}{names.correction_bias}", bool(moe.hashed) and moe.hashed[context.index]
    router = Router(
        linear=_scores(context, moe),
        top_k=moe.top_k,
        normalize=moe.normalize,
        scoring=moe.scoring,
        bias=read.row(corrected, moe.experts, torch.float32) if moe.correction_bias and not hashed else None,
        groups=moe.groups,
        top_groups=moe.top_groups,
        group_score=moe.group_score,
        outside=moe.outside,
        scale=moe.scale,
        total_eps=moe.total_eps,
        weight_inputs=moe.weight_inputs,
        logit_softcap=moe.logit_softcap,
        logit_scale=moe.logit_scale,
        sigmoid=backend.ops.sigmoid,
        gains=read.row(f"{block}{names.expert_gains}", moe.experts, torch.float32) if moe.expert_gains else None,
        sqrt_softplus=backend.ops.sqrt_softplus,
        table=_expert_table(read, f"{block}{HASHED}", config.vocab_size, moe) if hashed else None,
        tokens=tokens or StepTokens(),
    )
    table = moe.placement[context.index] if moe.placement else None
    fused = "" if names.expert_stacks else names.fused_gate_up  # of stacks the parts are read one by one

    latent_norm, behind = names.expert_norms
    visit_norm = None
    if behind:
        eps = config.rms_eps if config.out_norm_eps is None else config.out_norm_eps
        scale = read.norm(f"{block}{behind}", moe.latent or hidden)
        visit_norm = VisitNorm(backend.ops, scale.float(), read.ones(moe.latent or hidden), eps)
    bound: Activation | None = ClampedSilu(moe.clamp) if moe.clamp else None
    if moe.bounds and moe.bounds[context.index]:
        bound = BoundedSilu(moe.bounds[context.index])

    def experts(read: WeightReader) -> ExpertMlp:
        def make(index: int) -> GatedMlp:
            at, matrices = f"{block}experts.{index}.", (*names.expert_gate_up, names.expert_down)
            outer = moe.latent or hidden
            made = _gated(context, read, at, matrices, ffn, moe.expert_bias, backend.ops, fused=fused, outer=outer)
            return made if bound is None else replace(made, activation=bound)

        source = ExpertSource(make, lambda index: read.touch(f"{block}experts.{index}."))
        parts = [make(index) for index in held(table, moe.shard, moe.experts)]
        slots = None if table is None else ExpertSlots(table, moe.shard, moe.experts, backend.device)
        return ExpertMlp(backend.ops, router, parts, source, slots, visit_norm)

    routed = backend.experts(lambda: experts(read), lambda: experts(read.dense()))
    if moe.latent:
        into, out = names.expert_latents
        routed = NarrowExperts(
            routed,
            into=read.linear(block, {into: moe.latent}, hidden, config.mlp_bias),
            out=read.linear(block, {out: hidden}, moe.latent, config.mlp_bias),
            norm=read.norm(f"{block}{latent_norm}", moe.latent) if latent_norm else None,
            eps=config.rms_eps,
        )
    return routed


def _scores(context: LayerContext, moe: MoeConfig) -> Linear:
    """The matrix of a router."""
    read, block, name = context.read.dense(), f"{context.prefix}{context.names.moe}", context.names.router
    if not moe.wide_router:
        return read.linear(block, {name: moe.experts}, context.config.hidden_size, moe.router_bias)
    weight = read.get(f"{block}{name}.weight", moe.experts, context.config.hidden_size, dtype=torch.float32)
    ops = read.backend.ops
    return WideLinear(weight, lambda: ops.batch_invariant)


def _xielu(read: WeightReader, at: str, usual: Xielu) -> Xielu:
    """With a layer's own numbers, in the precision in which they are stored."""
    positive, negative = (softplus(read.number(f"{at}alpha_{sign}", 1)) for sign in "pn")
    beta, eps = (
        read.number(at + name) if read.stores(at + name) else number
        for name, number in (("beta", usual.beta), ("eps", usual.eps))
    )
    return Xielu(positive, beta + negative, beta, eps)


def softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def _expert_table(read: WeightReader, name: str, vocab: int, moe: MoeConfig) -> Tensor:
    table = read.get(name, vocab, moe.top_k, dtype=torch.int64)
    if not table.is_meta and not 0 <= int(table.min()) <= int(table.max()) < moe.experts:
        raise CheckpointError(f"{name!r} names experts from {int(table.min())} to {int(table.max())} of {moe.experts}")
    return table


LLAMA_LIKE = Architecture(LlamaDecoder, compose_layer)
