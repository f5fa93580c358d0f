"""The feed-forward of a layer: the interface, and the dense gated MLP. A mixture of experts is in `experts`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from penstock.engine.backends.interface import (
    Activation,
    ActivationOps,
    BoundedSilu,
    ClampedSilu,
    ClampedSwiglu,
    Link,
    Xielu,
)
from penstock.engine.models.layers.linear import ChainedLinear, InlineLinear, Linear


class FeedForward(Protocol):
    """Computes every token on its own: [T, hidden] normalized to [T, hidden], which is added to the residual stream."""

    @property
    def ops(self) -> ActivationOps:
        """Their norm makes the input; that of FP8 linears hands over FP8 activations with their scales."""
        ...

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The matrices that every token passes."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of all its matrices."""
        ...

    def forward(self, x: Any) -> Tensor: ...


@runtime_checkable
class FusedFeedForward(FeedForward, Protocol):
    """One whose linears take the norm, the gate and the residual addition into their launches."""

    @property
    def fuses(self) -> bool:
        """Whether they are of a form that does, for one token at least."""
        ...

    def fused(self, residual: Tensor, norm: Tensor, eps: float) -> Tensor:
        """`residual` plus the feed-forward of the normalized `residual`; may update it in place."""
        ...


@runtime_checkable
class ChainedFeedForward(FusedFeedForward, Protocol):
    """One whose products can be links of a chain; see `Ops.chain`."""

    def links(self, norm: Tensor, eps: float) -> Sequence[Link]:
        """The same as `fused`; none where its linears are of a form that cannot be linked."""
        ...


@runtime_checkable
class SummedByNorm(FeedForward, Protocol):
    """One that can leave the last sum of its result to the norm that reads it."""

    def leaving_sums(self) -> FeedForward:
        """The same, for layers in which nothing but the norm of its backend reads the result."""
        ...


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """down(act(gate(x)) * up(x)), with gate and up as one matrix; down(act(up(x))) where the activation has no gate."""

    ops: ActivationOps
    activation: Activation
    gate_up: Linear
    down: Linear

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.gate_up, self.down

    @property
    def weight_bytes(self) -> int:
        return self.gate_up.weight_bytes + self.down.weight_bytes

    def forward(self, x: Any) -> Tensor:
        in_place: Callable[[Any, Activation], Any] | None = getattr(self.gate_up, "gated", None)
        if in_place is not None and self.activation in ("silu", "gelu_tanh"):
            return self.down(in_place(x, self.activation))  # a linear that gates its outputs before it writes them
        return self.down(gated(self.ops, self.activation, self.gate_up(x)))

    @property
    def fuses(self) -> bool:
        return self.activation == "silu" and all(isinstance(linear, InlineLinear) for linear in self.linears)

    def fused(self, residual: Tensor, norm: Tensor, eps: float) -> Tensor:
        """See `FusedFeedForward`; for linears that are `FusedLinear` and a gate that is SiLU."""
        gate_up: Any = self.gate_up
        down: Any = self.down
        out: Tensor = down.fused(gate_up.fused(residual, norm=norm, eps=eps, gated=True), residual=residual)
        return out

    def links(self, norm: Tensor, eps: float) -> Sequence[Link]:
        """See `ChainedFeedForward`."""
        gate_up, down = self.gate_up, self.down
        if not self.fuses or not isinstance(gate_up, ChainedLinear) or not isinstance(down, ChainedLinear):
            return ()
        return gate_up.link(norm=norm, eps=eps, gated=True), down.link(residual=True)


@dataclass(frozen=True, slots=True)
class ScaledMlp(GatedMlp):
    """The same with factors: scale * down(act(gate_scale * gate(x)) * up(x))."""

    gate_scale: float
    scale: float

    @property
    def fuses(self) -> bool:
        return False

    def forward(self, x: Any) -> Tensor:
        gate_up = self.gate_up(x)
        if self.gate_scale != 1.0:
            gate_up[:, : gate_up.shape[1] // 2].mul_(self.gate_scale)
        return self.down(gated(self.ops, self.activation, gate_up)).mul_(self.scale)


def gated(ops: ActivationOps, activation: Activation, gate_up: Tensor) -> Any:
    """act(gate) * up of [T, 2 * ffn], or act(up) of [T, ffn], in a form that the linears of `ops` read. May write over
    its input."""
    if isinstance(activation, Xielu) or activation in ("relu2", "plain_gelu", "plain_gelu_tanh"):
        return ops.pointwise(gate_up, activation)
    if isinstance(activation, ClampedSwiglu):
        return ops.clamped_swiglu(gate_up, activation.alpha, activation.limit)
    if isinstance(activation, BoundedSilu):
        return ops.bounded_silu(gate_up, activation.limit)
    if isinstance(activation, ClampedSilu):
        gate, up = gate_up.chunk(2, -1)
        gate.clamp_(max=activation.limit)
        up.clamp_(-activation.limit, activation.limit)
        return ops.silu_mul(gate_up)
    return ops.silu_mul(gate_up) if activation == "silu" else ops.gelu_mul(gate_up)
