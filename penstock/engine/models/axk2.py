"""A.X K2: DeepSeek V3.2's layers, with gates behind their norms, which are computed from what these give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from penstock.engine.backends.interface import AttentionBatch
from penstock.engine.kv.cache import KVCache
from penstock.engine.models.architecture import Architecture, LayerContext
from penstock.engine.models.decoder import Decoder, DecoderLayer
from penstock.engine.models.latent import compose_attention
from penstock.engine.models.layers.gated_streams import by_token
from penstock.engine.models.layers.linear import Linear
from penstock.engine.models.llama import compose_feed_forward

GATED_NORM, GATE_DOWN, GATE_UP = "norm", "W_down", "W_up"


@dataclass(frozen=True, slots=True)
class InputGate:
    """Multiplies every number that a part reads by the sigmoid of one that is computed from all of them."""

    down: Linear
    up: Linear
    alone: Callable[[], bool]
    """Whether every token is computed by itself."""

    def __call__(self, x: Tensor) -> Tensor:
        # Not the linears, which may have adapters: those of all tokens of a step.
        alone = self.alone()
        gates = self.up(by_token(F.silu, self.down(x), alone=alone))
        return by_token(lambda x, gates: (x * gates.float().sigmoid()).to(x.dtype), x, gates, alone=alone)

    @property
    def weight_bytes(self) -> int:
        return self.down.weight_bytes + self.up.weight_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedNormsLayer(DecoderLayer):
    mixer_gate: InputGate
    feed_forward_gate: InputGate | None
    """Of experts."""


@dataclass(frozen=True, slots=True)
class AXK2Decoder(Decoder):
    """See `Decoder`."""

    @property
    def launched_eagerly(self) -> bool:
        return True  # gates are operations of their own, which are not recorded

    def run(self, residual: Tensor, batch: AttentionBatch, kv: KVCache) -> Tensor:
        ops, eps, dtype = self.ops, self.config.rms_eps, self.embedding.dtype
        for layer, cache in zip(self._layers, kv.layers, strict=True):
            x = layer.mixer_gate(ops.rms_norm(residual, layer.mixer_norm, eps, dtype))
            mixed = layer.mixer.forward(x, batch, cache)
            x = layer.feed_forward.ops.add_rms_norm(mixed, residual, layer.feed_forward_norm, eps)
            x = layer.feed_forward.forward(x if layer.feed_forward_gate is None else layer.feed_forward_gate(x))
            ops.add_rms_norm(x, residual, None, eps)
        return ops.rms_norm(residual, self.final_norm, eps, dtype)

    @property
    def weight_bytes(self) -> int:
        total = Decoder.weight_bytes.__get__(self)
        gates = (gate for layer in self._layers for gate in (layer.mixer_gate, layer.feed_forward_gate))
        return int(total + sum(gate.weight_bytes for gate in gates if gate is not None))

    @property
    def _layers(self) -> list[GatedNormsLayer]:
        layers: list[GatedNormsLayer] = self.layers  # type: ignore[assignment]
        return layers


def compose_layer(context: LayerContext) -> GatedNormsLayer:
    read, names, prefix, config = context.read, context.names, context.prefix, context.config
    routed = config.moe is not None and config.moe.layers[context.index]
    mixer_norm, feed_forward_norm = f"{prefix}{names.mixer_norm}.", f"{prefix}{names.feed_forward_norm}"
    return GatedNormsLayer(
        mixer_norm=read.norm(mixer_norm + GATED_NORM, config.hidden_size),
        mixer=compose_attention(context),
        feed_forward_norm=read.norm(
            f"{feed_forward_norm}.{GATED_NORM}" if routed else feed_forward_norm, config.hidden_size
        ),
        feed_forward=compose_feed_forward(context),
        mixer_gate=_gate(context, mixer_norm),
        feed_forward_gate=_gate(context, f"{feed_forward_norm}.") if routed else None,
    )


def _gate(context: LayerContext, at: str) -> InputGate:
    # Checkpoints do not store them in few bits.
    read, config, ops = context.read.dense(), context.config, context.read.backend.ops
    assert config.latent is not None
    rank, hidden = config.latent.gate_rank, config.hidden_size
    return InputGate(
        down=read.linear(at, {GATE_DOWN: rank}, hidden),
        up=read.linear(at, {GATE_UP: hidden}, rank),
        alone=lambda: ops.batch_invariant,
    )


AXK2_LIKE = Architecture(AXK2Decoder, compose_layer)
