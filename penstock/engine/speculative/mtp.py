"""MTP layers: the layer behind the last one with which a checkpoint predicts the token after the next.

Its input is a projection of the embedding of a token and the final hidden states before it, each normalized on its own;
the layer is one of the model's family, and embedding and head are the model's. Two layouts:

- DeepSeek V3, GLM-4.5 and Step 3.5: `model.layers.N.*`, N being the number of layers, with `enorm`, `hnorm`, `eh_proj`
  and `shared_head.norm`.
- Qwen3-Next: `mtp.*`, with `pre_fc_norm_embedding`, `pre_fc_norm_hidden`, `fc`, `layers.0.*` and `norm`.

What a draft token passes on are the hidden states behind the last norm, as it is with those of the model. Of several
such layers the first is used for every draft token.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.engine.backends.backend import Backend, WeightPlan
from penstock.engine.backends.interface import AttentionBatch
from penstock.engine.kv.cache import KVCache
from penstock.engine.models.build import compose_one
from penstock.engine.models.decoder import Decoder, DecoderLayer
from penstock.engine.models.families import family_of
from penstock.engine.models.families.tensor_names import prefix_of
from penstock.engine.models.latent import INDEX_KEYS, INDEXER
from penstock.engine.models.layers.linear import Linear
from penstock.engine.models.model_config import ModelConfig
from penstock.engine.models.tap import Tap
from penstock.engine.models.weights import WeightReader, Weights
from penstock.engine.speculative.head_decoder import HeadDecoder
from penstock.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class MtpLayout:
    """Where the tensors of an MTP layer are."""

    layer: str
    """What the names of the layer's own tensors begin with."""
    embedding_norm: str
    feature_norm: str
    combine: str
    norm: str


def find_mtp(names: Collection[str], prefix: str, layers: int) -> MtpLayout | None:
    """The MTP layer of a checkpoint, if it has one."""
    at = f"{prefix}layers.{layers}."
    if f"{at}eh_proj.weight" in names:
        return MtpLayout(at, f"{at}enorm", f"{at}hnorm", f"{at}eh_proj", f"{at}shared_head.norm")
    if "mtp.fc.weight" in names:
        return MtpLayout("mtp.layers.0.", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
    return None


def has_mtp(weights: Weights, model: ModelConfig) -> bool:
    if model.by_transformers or not _is_composed(model):
        return False
    names, tensors = weights.names(), family_of(model.family).names
    layout = find_mtp(names, prefix_of(names, tensors), model.num_layers)
    if layout is None or model.latent is None or model.latent.index is None:
        return layout is not None
    # One that has no indexer attends to what the model's layers chose, which it does not see here.
    return f"{layout.layer}{tensors.attention}{INDEXER}{INDEX_KEYS}.weight" in names


def _is_composed(model: ModelConfig) -> bool:
    """Whether the layer is like those that are composed here: it reads no several streams, no gate is behind its norms,
    and its heads are known."""
    known = not model.heads_differ or model.mtp_like is not None
    return model.streams is None and known and (model.latent is None or not model.latent.gate_rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpDecoder(HeadDecoder):
    """See `HeadDecoder`."""

    inner: Decoder
    """Of one layer, with the norm behind it."""
    embedding_norm: Tensor
    feature_norm: Tensor
    combine: Linear

    def read(self, embedded: Tensor, features: Tensor, batch: AttentionBatch, kv: KVCache) -> tuple[Tensor, Tensor]:
        ops, eps = self.ops, self.config.rms_eps
        token = ops.rms_norm(embedded, self.embedding_norm, eps)
        hidden = ops.rms_norm(features, self.feature_norm, eps)
        stream = self.combine(torch.cat((token, hidden), dim=-1))
        stream = ops.widen(stream) if self.stream_dtype is not stream.dtype else stream
        out = self.inner.run(stream, batch, kv)
        return out, out


@dataclass(frozen=True, slots=True)
class MtpHead:
    """An MTP layer on the device; embedding and head are the target's."""

    config: ModelConfig
    decoder_type: type[Decoder]
    layer: DecoderLayer
    embedding_norm: Tensor
    feature_norm: Tensor
    combine: Linear
    final_norm: Tensor
    tap: Tap

    @property
    def needs_head(self) -> bool:
        return True

    def decoder(self, backend: Backend, features: Tensor, block_size: int, embedding: Tensor, head: Linear,
                max_positions: int) -> MtpDecoder:  # fmt: skip
        inner = self.decoder_type(
            config=self.config,
            ops=backend.ops,
            embedding=embedding,
            layers=[self.layer],
            final_norm=self.final_norm,
            head=head,
            max_positions=max_positions,
        )
        return MtpDecoder(
            config=self.config,
            ops=backend.ops,
            embedding=embedding,
            layers=[self.layer],
            final_norm=self.final_norm,
            head=head,
            max_positions=max_positions,
            features=features,
            block_size=block_size,
            inner=inner,
            embedding_norm=self.embedding_norm,
            feature_norm=self.feature_norm,
            combine=self.combine,
        )


def load_mtp(
    weights: Weights, target: ModelConfig, backend: Backend, dtype: torch.dtype, plan: WeightPlan, max_positions: int
) -> MtpHead:
    """Read the MTP layer of the target's checkpoint; its weights have the target's form."""
    read = WeightReader(weights, backend, dtype, plan.quantize, target.norm_offset)
    layout = find_mtp(read.names, prefix_of(read.names, family_of(target.family).names), target.num_layers)
    if layout is None:
        raise CheckpointError(f"the checkpoint of this {target.family} model has no MTP layer")
    if not _is_composed(target):
        raise CheckpointError(
            f"speculation: mtp is not available for {target.family} models; use ngram, or a draft model"
        )
    hidden, config = target.hidden_size, _one_layer(target, layout, read.names)
    decoder_type, layer = compose_one(read, config, layout.layer, max_positions=max_positions, inner=plan.inner)
    return MtpHead(
        config=config,
        decoder_type=decoder_type,
        layer=layer,
        embedding_norm=read.norm(layout.embedding_norm, hidden),
        feature_norm=read.norm(layout.feature_norm, hidden),
        combine=read.dense().linear("", {layout.combine: hidden}, 2 * hidden),
        final_norm=read.norm(layout.norm, hidden),
        tap=Tap(hidden, backend.ops),
    )


def _one_layer(target: ModelConfig, layout: MtpLayout, names: Collection[str]) -> ModelConfig:
    """The target with the MTP layer in place of its own: attention like that of `mtp_like`, or full attention with
    rotary embedding; experts if the layer has a router, and no bounds."""
    latent = target.latent
    if latent is not None and latent.index is not None:
        latent = replace(latent, index=replace(latent.index, layers=(True,)))
    moe, tensors = target.moe, family_of(target.family).names
    if moe is not None:
        routed = f"{layout.layer}{tensors.moe}{tensors.router}.weight" in names
        moe = replace(moe, layers=(True,), placement=(), bounds=()) if routed else None
    like = target.mtp_like
    return replace(
        target,
        num_layers=1,
        windows=(None,) if like is None else (target.windows[like],),
        num_heads=target.num_heads if like is None else target.queries_in(like),
        num_kv_heads=target.num_kv_heads if like is None else target.heads_in(like)[0],
        head_dim=target.head_dim if like is None else target.heads_in(like)[1],
        query_heads=(),
        layer_heads=(),
        bounds=(),
        unrotated=(),
        layer_ropes=(),
        moe=moe,
        latent=latent,
        delta=None if target.delta is None else replace(target.delta, layers=(False,)),
    )
