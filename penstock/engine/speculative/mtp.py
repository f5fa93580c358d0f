"""MTP layers: the layer behind the last one with which a checkpoint predicts the token after the next.

Its input is a projection of the embedding of a token and the hidden states before it, each normalized on its own; the
layer is one of the model's family, and embedding and head are the model's. Four layouts:

- DeepSeek V3, GLM-4.5, GLM-5-Next and Step 3.5: `model.layers.N.*`, N being the number of layers, with `enorm`,
  `hnorm`, `eh_proj` and `shared_head.norm` (`final_layernorm` in GGUF files of MiMo-V2-Flash).
- MiMo-V2-Flash: `model.mtp.layers.0.*`, with `enorm`, `hnorm`, `eh_proj` and `final_layernorm`.
- DeepSeek V4: `mtp.0.*`, with `enorm`, `hnorm`, two projections that are added up (`e_proj`, `h_proj`) and `norm`. It
  reads all residual streams and has as many, which its own head makes one.
- Qwen3-Next: `mtp.*`, with `pre_fc_norm_embedding`, `pre_fc_norm_hidden`, `fc`, `layers.0.*` and `norm`.

The hidden states that it reads are the model's final ones, and what a draft token passes on are its own behind its last
norm. Some families were trained on both before these norms (`ModelConfig.mtp_before_norm`). Of several such layers the
first is used for every draft token.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.engine.backends.backend import Backend, WeightPlan
from penstock.engine.backends.interface import AttentionBatch, Ops
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

_ENTRIES = "self_attn.compressor."
"""Of DeepSeek V4's layers that attend to more than a window."""
_NESTED = ".mtp.layers.0.transformer_layer."
"""Of MiniMax M3."""
_NORMS = ("shared_head.norm", "final_layernorm")
"""Behind the layer."""


@dataclass(frozen=True, slots=True)
class MtpLayout:
    """Where the tensors of an MTP layer are."""

    layer: str
    """What the names of the layer's own tensors begin with."""
    embedding_norm: str
    feature_norm: str
    combine: tuple[str, ...]
    """One matrix for both side by side, or one for each: of the embedding and of hidden states."""
    norm: str


def find_mtp(names: Collection[str], prefix: str, layers: int) -> MtpLayout | None:
    """The MTP layer of a checkpoint, if it has one."""
    # Of MiniMax M3 all but what combines lies one level further down.
    for at, own in ((f"{prefix}layers.{layers}.", "eh_proj"), (f"{prefix}mtp.layers.0.", "input_layernorm")):
        if f"{at}eh_proj.weight" in names and f"{at}{own}.weight" in names:
            norm = next((name for name in _NORMS if f"{at}{name}.weight" in names), _NORMS[0])
            return MtpLayout(at, f"{at}enorm", f"{at}hnorm", (f"{at}eh_proj",), f"{at}{norm}")
    if "mtp.fc.weight" in names:
        norms = "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden"
        return MtpLayout("mtp.layers.0.", *norms, ("mtp.fc",), "mtp.norm")
    if "mtp.0.e_proj.weight" in names:
        return MtpLayout("mtp.0.", "mtp.0.enorm", "mtp.0.hnorm", ("mtp.0.e_proj", "mtp.0.h_proj"), "mtp.0.norm")
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
    """Whether the layer is like those that are composed here: of several streams it reads all, or what they became, no
    gate is behind its norms, and its heads are known."""
    known = not model.heads_differ or model.mtp_like is not None
    streams = model.streams is None or model.mtp_before_norm or family_of(model.family).drafting is not None
    return streams and known and (model.latent is None or not model.latent.gate_rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpDecoder(HeadDecoder):
    """See `HeadDecoder`."""

    inner: Decoder
    """Of one layer, with the norm behind it."""
    embedding_norm: Tensor
    feature_norm: Tensor
    combine: tuple[Linear, ...]
    """See `MtpLayout`."""

    @property
    def launched_eagerly(self) -> bool:
        return self.inner.launched_eagerly

    def read(self, embedded: Tensor, features: Tensor, batch: AttentionBatch, kv: KVCache) -> tuple[Tensor, Tensor]:
        ops, eps = self.ops, self.config.rms_eps
        token = ops.rms_norm(embedded, self.embedding_norm, eps)
        hidden = ops.rms_norm(features.view(-1, embedded.shape[1]), self.feature_norm, eps)
        if len(self.combine) == 1:
            stream = self.combine[0](torch.cat((token, hidden), dim=-1))
        else:
            of_token, of_hidden = (project(x) for project, x in zip(self.combine, (token, hidden), strict=True))
            stream = (of_hidden.view(len(token), -1, token.shape[1]) + of_token.unsqueeze(1)).flatten(1)
        stream = ops.widen(stream) if self.stream_dtype is not stream.dtype else stream
        out = self.inner.run(stream, batch, kv)
        return out, stream.to(features.dtype) if self.config.mtp_before_norm else out


@dataclass(frozen=True, slots=True)
class MtpHead:
    """An MTP layer on the device; embedding and head are the target's."""

    config: ModelConfig
    decoder_type: type[Decoder]
    layer: DecoderLayer
    embedding_norm: Tensor
    feature_norm: Tensor
    combine: tuple[Linear, ...]
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


def mtp_tap(target: ModelConfig, ops: Ops | None = None) -> Tap:
    """What a model keeps for its MTP layer."""
    if not target.mtp_before_norm:
        return Tap(target.hidden_size, ops)
    streams = 1 if target.streams is None else target.streams.count
    return Tap(streams * target.hidden_size, ops, (target.num_layers,), as_read=True)


def load_mtp(
    weights: Weights, target: ModelConfig, backend: Backend, dtype: torch.dtype, plan: WeightPlan, max_positions: int
) -> MtpHead:
    """Read the MTP layer of the target's checkpoint; its weights have the target's form."""
    read = WeightReader(weights, backend, dtype, plan.quantize, target.norm_offset)
    layout = find_mtp(read.names, prefix_of(read.names, family_of(target.family).names), target.num_layers)
    if layout is None and any(_NESTED in name for name in read.names):
        raise CheckpointError(
            f"it is not established whether the MTP layer of {target.family} models reads hidden states before the "
            "last norm or behind it, so it is not run; use ngram, or a draft model"
        )
    if layout is None:
        raise CheckpointError(f"the checkpoint of this {target.family} model has no MTP layer")
    if not _is_composed(target):
        raise CheckpointError(
            f"speculation: mtp is not available for {target.family} models; use ngram, or a draft model"
        )
    if any(name.startswith(f"{layout.layer}{_ENTRIES}") for name in read.names):
        raise CheckpointError("its MTP layer attends to entries; one that has the window alone can be run")
    hidden, config = target.hidden_size, _one_layer(target, layout, read.names)
    inputs = (2 if len(layout.combine) == 1 else 1) * hidden
    decoder_type, layer = compose_one(read, config, layout.layer, max_positions=max_positions, inner=plan.inner)
    return MtpHead(
        config=config,
        decoder_type=decoder_type,
        layer=layer,
        embedding_norm=read.norm(layout.embedding_norm, hidden),
        feature_norm=read.norm(layout.feature_norm, hidden),
        combine=tuple(read.dense().linear("", {name: hidden}, inputs) for name in layout.combine),
        final_norm=read.norm(layout.norm, hidden),
        tap=mtp_tap(target, backend.ops),
    )


def _one_layer(target: ModelConfig, layout: MtpLayout, names: Collection[str]) -> ModelConfig:
    """The target with the MTP layer in place of its own: attention like that of `mtp_like`, or full attention with
    rotary embedding; experts if the layer has a router, and no bounds."""
    alone = family_of(target.family).drafting is not None
    latent, delta = target.latent, None if alone else target.delta
    if latent is not None and latent.index is not None:
        latent = replace(latent, index=replace(latent.index, layers=(True,), paged_pools=latent.pooled))
    moe, tensors = target.moe, family_of(target.family).names
    if moe is not None:
        routed = f"{layout.layer}{tensors.moe}{tensors.router}.weight" in names
        moe = replace(moe, layers=(True,), placement=(), bounds=(), hashed=()) if routed else None
    windows = target.compression
    if windows is not None:
        windows = replace(windows, rates=(0,), chosen=(False,), paged_window=True)
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
        compression=windows,
        delta=None if delta is None else replace(delta, layers=(False,)),
        streams=None if alone else target.streams,
    )
