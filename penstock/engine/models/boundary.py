"""What lies between the attention of a layer and that of the next one, for steps of one token.

These are products alone, with norms, a gate and residual additions around them: the output of the attention, the
feed-forward, and the query, key and value of the next layer. A backend may have one launch for as many of them as can
be linked (`Ops.chain`); the others are launched one by one. Either way the residual stream is updated in place, and the
results are those of the fused path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.engine.backends.interface import Link, LinkedProducts, Ops
from penstock.engine.models.decoder import DecoderLayer
from penstock.engine.models.layers.attention import Attention
from penstock.engine.models.layers.feed_forward import ChainedFeedForward
from penstock.engine.models.layers.linear import ChainedLinear


@dataclass(frozen=True, slots=True)
class Boundary:
    """Everything behind the attention of `layer` up to that of `after`, or to the end of the residual stream."""

    layer: DecoderLayer
    after: DecoderLayer | None
    eps: float
    chain: LinkedProducts | None = None
    """Of the products of `layer`, and of the first one of `after` if `reaches`; None: they are launched one by one."""
    reaches: bool = False

    def cross(self, attended: Tensor, residual: Tensor) -> Tensor | None:
        """From what the attention gave to what the next one reads; None behind the last layer."""
        if self.chain is not None:
            qkv = self.chain(attended, residual)
            return qkv if self.reaches or self.after is None else self._enter(self.after, residual)
        mixer: Any = self.layer.mixer
        feed_forward: Any = self.layer.feed_forward
        mixer.output.fused(attended, residual=residual)
        feed_forward.fused(residual, self.layer.feed_forward_norm, self.eps)
        return None if self.after is None else self._enter(self.after, residual)

    def _enter(self, after: DecoderLayer, residual: Tensor) -> Tensor:
        mixer: Any = after.mixer
        qkv: Tensor = mixer.qkv.fused(residual, norm=after.mixer_norm, eps=self.eps)
        return qkv


def boundaries_of(layers: Sequence[DecoderLayer], ops: Ops, eps: float) -> tuple[Boundary, ...]:
    """One for each layer; none at all where a layer has experts or no attention, or no product of theirs can
    be linked."""
    if not all(isinstance(one.mixer, Attention) and isinstance(one.feed_forward, ChainedFeedForward) for one in layers):
        return ()
    found = tuple(_boundary(layer, after, ops, eps) for layer, after in zip(layers, [*layers[1:], None], strict=True))
    return found if any(one.chain is not None for one in found) else ()


def _boundary(layer: DecoderLayer, after: DecoderLayer | None, ops: Ops, eps: float) -> Boundary:
    links = _links_behind(layer, eps)
    further = () if after is None else _links_before(after, eps)
    if links and further and (chain := ops.chain([*links, *further])) is not None:
        return Boundary(layer, after, eps, chain, reaches=True)
    return Boundary(layer, after, eps, ops.chain(links) if links else None)


def _links_behind(layer: DecoderLayer, eps: float) -> Sequence[Link]:
    """From the attention of a layer to its end; none where a part of that cannot be linked."""
    mixer, feed_forward, norm = layer.mixer, layer.feed_forward, layer.feed_forward_norm
    assert isinstance(mixer, Attention)
    assert isinstance(feed_forward, ChainedFeedForward)
    if norm is None or not isinstance(mixer.output, ChainedLinear):
        return ()
    links = feed_forward.links(norm, eps)
    return (mixer.output.link(residual=True), *links) if links else ()


def _links_before(layer: DecoderLayer, eps: float) -> Sequence[Link]:
    """From the residual stream to the attention of a layer."""
    mixer, norm = layer.mixer, layer.mixer_norm
    assert isinstance(mixer, Attention)
    return (mixer.qkv.link(norm=norm, eps=eps),) if norm is not None and isinstance(mixer.qkv, ChainedLinear) else ()
