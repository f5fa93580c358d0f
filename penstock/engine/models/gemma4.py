"""Gemma 4: layers whose heads differ by what they see, whose values are normalized, and behind which the residual
stream is multiplied by a number.

Layers with experts have a dense feed-forward beside them; both read the residual stream, with norms of their own. In
the small models the upper layers attend to the keys and values of lower ones, and every layer is told of the token
itself (`layers.token_input`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.engine.backends.interface import AttentionBatch
from penstock.engine.kv.cache import KVCache
from penstock.engine.models.architecture import Architecture, LayerContext
from penstock.engine.models.decoder import Decoder, DecoderLayer
from penstock.engine.models.layers.experts import ApartExperts
from penstock.engine.models.layers.stage_attention import GivenAttention, LeavingAttention, StepKeys
from penstock.engine.models.layers.token_input import TokenInput, TokenTable, attach, given_with, keys_with
from penstock.engine.models.llama import compose_attention, compose_feed_forward, compose_mlp, compose_routed
from penstock.engine.models.model_config import ModelConfig
from penstock.engine.models.weights import WeightReader

ROUTER_GAINS = "router.scale"
SHARED_OUT, ROUTED_IN, ROUTED_OUT = (
    "post_feedforward_layernorm_1",
    "pre_feedforward_layernorm_2",
    "post_feedforward_layernorm_2",
)
TOKEN_GATE, TOKEN_OUTPUT, TOKEN_NORM = "per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm"
TOKEN_TABLE, TOKEN_PROJECTION = "embed_tokens_per_layer", "per_layer_model_projection"
TOKEN_PROJECTION_NORM = "per_layer_projection_norm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Layer(DecoderLayer):
    """Where `feed_forward_norm` is None the feed-forward reads the residual stream itself."""

    factor: Tensor
    """float32 [1]: of the residual stream, behind the layer."""
    token_input: TokenInput | None = None


@dataclass(frozen=True, slots=True)
class Gemma4Decoder(Decoder):
    """See `Decoder`."""

    table: TokenTable | None = None

    def embed(self, token_ids: Tensor) -> Tensor:
        stream = Decoder.embed(self, token_ids)
        if self.table is not None:
            attach(stream, self.table.vectors(token_ids, stream, self.embedding.dtype))
        return stream

    @property
    def stream_width(self) -> int:
        stage = self.config.stage
        return self.config.hidden_size + (0 if stage is None else stage.arrives.width)

    def entered(self, sent: Tensor) -> Tensor:
        stage = self.config.stage
        if stage is None:
            return sent
        widths = [self.config.hidden_size, stage.arrives.vectors, *(width for _, width in stage.arrives.keys)]
        stream, vectors, *keys = (part.contiguous() for part in torch.split(sent, widths, dim=1))
        dtype = self.embedding.dtype
        layers = (layer for layer, _ in stage.arrives.keys)
        given = {layer: rows.to(dtype) for layer, rows in zip(layers, keys, strict=True)}
        attach(stream, vectors.to(dtype), given)
        for step in self._steps(GivenAttention):
            step.rows = keys_with(stream)[step.layer]
        return stream

    def passed_on(self, stream: Tensor) -> Tensor:
        stage = self.config.stage
        if stage is None:
            return stream
        made = {step.layer: step.of(len(stream)) for step in self._steps(LeavingAttention)}
        keys = {**keys_with(stream), **made}
        parts = [keys[layer] for layer, _ in stage.leaves.keys]
        if stage.leaves.vectors:
            parts.insert(0, given_with(stream)[:, -stage.leaves.vectors :])
        return torch.cat([stream, *(part.to(stream.dtype) for part in parts)], dim=1)

    def _steps(self, kind: type[GivenAttention] | type[LeavingAttention]) -> list[StepKeys]:
        return [layer.mixer.step for layer in self.layers if isinstance(layer.mixer, kind)]

    def run(self, residual: Tensor, batch: AttentionBatch, kv: KVCache) -> Tensor:
        ops, eps, dtype = self.ops, self.config.rms_eps, self.embedding.dtype
        for index, cache in zip(range(len(self.layers)), kv.layers, strict=True):
            layer: Any = self.layers[index]
            mixer, feed_forward = layer.mixer, layer.feed_forward
            x = mixer.forward(mixer.ops.rms_norm(residual, layer.mixer_norm, eps, dtype), batch, cache)
            x = feed_forward.ops.add_rms_norm(x, residual, layer.feed_forward_norm, eps, layer.mixer_out_norm)
            x = feed_forward.forward(residual if layer.feed_forward_norm is None else x)
            ops.add_rms_norm(x, residual, None, eps, layer.feed_forward_out_norm)
            if layer.token_input is not None:
                layer.token_input.add(given_with(residual), residual, ops, eps, dtype)
            residual.mul_(layer.factor)
        return ops.rms_norm(residual, self.final_norm, eps, dtype)


def compose_layer(context: LayerContext) -> Gemma4Layer:
    read, config, names, prefix = context.read, context.config, context.names, context.prefix
    hidden, apart = config.hidden_size, config.moe is not None
    return Gemma4Layer(
        mixer_norm=read.norm(prefix + names.mixer_norm, hidden),
        mixer=compose_attention(context),
        feed_forward_norm=None if apart else read.norm(prefix + names.feed_forward_norm, hidden),
        feed_forward=compose_apart(context) if apart else compose_feed_forward(context),
        mixer_out_norm=read.norm(prefix + names.mixer_out_norm, hidden),
        feed_forward_out_norm=read.norm(prefix + names.feed_forward_out_norm, hidden),
        factor=read.get(f"{prefix}layer_scalar", 1, dtype=torch.float32),
        token_input=None if config.token_inputs is None else compose_token_input(context, config.token_inputs.size),
    )


def compose_apart(context: LayerContext) -> ApartExperts:
    read, config, names, prefix = context.read, context.config, context.names, context.prefix
    hidden, moe = config.hidden_size, config.moe
    assert moe is not None
    # The router reads normalized rows times gains, divided by the root of the width.
    gains = read.get(prefix + ROUTER_GAINS, hidden, dtype=torch.float32) * hidden**-0.5
    return ApartExperts(
        routed=compose_routed(context),
        shared=compose_mlp(context, names.moe + names.shared_expert, moe.shared_ffn_size, read.backend.ops),
        norms=(
            read.norm(prefix + names.feed_forward_norm, hidden),
            gains,
            read.norm(prefix + ROUTED_IN, hidden),
            read.norm(prefix + SHARED_OUT, hidden),
            read.norm(prefix + ROUTED_OUT, hidden),
        ),
        eps=config.rms_eps,
        dtype=read.dtype,
    )


def compose_token_input(context: LayerContext, size: int) -> TokenInput:
    read, prefix, hidden = context.read.dense(), context.prefix, context.config.hidden_size
    return TokenInput(
        ops=read.backend.ops,
        layer=context.index,
        gate=read.linear(prefix, {TOKEN_GATE: size}, hidden),
        output=read.linear(prefix, {TOKEN_OUTPUT: hidden}, size),
        norm=read.norm(prefix + TOKEN_NORM, hidden),
    )


def compose_table(read: WeightReader, config: ModelConfig, prefix: str) -> Mapping[str, Any]:
    """Beside the layers: what makes the vectors that they are told."""
    inputs = config.token_inputs
    if inputs is None or (config.stage is not None and config.stage.first):
        return {}
    width = inputs.layers * inputs.size
    table = TokenTable(
        ops=read.backend.ops,
        table=read.as_stored(f"{prefix}{TOKEN_TABLE}.weight", inputs.vocab, width),
        project=read.dense().linear(prefix, {TOKEN_PROJECTION: width}, config.hidden_size),
        norm=read.norm(prefix + TOKEN_PROJECTION_NORM, inputs.size),
        eps=config.rms_eps,
    )
    return {"table": table}


GEMMA4_LIKE = Architecture(Gemma4Decoder, compose_layer, compose_table)
