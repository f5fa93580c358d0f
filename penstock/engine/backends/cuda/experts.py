"""Experts on CUDA: the weights of a layer's experts as one stack, computed together by `kernels.moe`.

Five launches whatever the number of experts and tokens, and none waits for the device: routing, sorting, the two
products, the sum. FP8 and MXFP4 weights are widened in the kernels; activations stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.engine.backends.cuda.block_fp8_linear import BlockFp8Linear
from penstock.engine.backends.cuda.kernels import moe, moe_mxfp4
from penstock.engine.backends.cuda.kernels.gemv import MAX_BATCH
from penstock.engine.backends.cuda.kernels.moe_mxfp4 import Mxfp4Stack
from penstock.engine.backends.cuda.linear import CudaLinear
from penstock.engine.backends.cuda.mxfp4_linear import Mxfp4Linear
from penstock.engine.backends.interface import Activation, Ops
from penstock.engine.models.layers.experts import (
    Additions,
    ExpertMlp,
    ExpertSlots,
    ExpertSource,
    Router,
    SharedAndRouted,
)
from penstock.engine.models.layers.feed_forward import FeedForward, GatedMlp, gated
from penstock.engine.models.layers.linear import Linear


@dataclass(frozen=True, slots=True)
class Stack:
    """One matrix of every expert [experts, out, in], with scales [experts, out] when it is FP8, and biases [experts,
    out] where they have them."""

    weight: Tensor
    scale: Tensor | None
    bias: Tensor | None
    tile: tuple[int, int] | None = None
    """Outputs and inputs that share a scale: these are [experts, out / tile, in / tile] then."""

    @property
    def experts(self) -> int:
        return self.weight.shape[0]

    @property
    def weight_bytes(self) -> int:
        return self.weight.numel() * self.weight.element_size()

    def product(
        self, x: Tensor, plan: moe.Plan, top_k: int, activation: Activation, route_weights: Tensor | None
    ) -> Tensor:
        """See `moe.grouped_linear`."""
        return moe.grouped_linear(
            x,
            self.weight,
            plan,
            top_k,
            weight_scale=self.scale,
            scale_tile=self.tile,
            bias=self.bias,
            route_weights=route_weights,
            activation=activation,
        )

    def put(self, index: int, linear: Linear) -> None:
        """Another expert's matrix, of the same form."""
        assert isinstance(linear, CudaLinear | BlockFp8Linear)
        self.weight.view(torch.uint8)[index].copy_(linear.weight.view(torch.uint8))
        for ours, theirs in ((self.scale, linear.scale), (self.bias, linear.bias)):
            if ours is not None and theirs is not None:
                ours[index].copy_(theirs)


@dataclass(frozen=True, slots=True)
class PackedStack:
    """The same in MXFP4."""

    stack: Mxfp4Stack

    @property
    def experts(self) -> int:
        return self.stack.words.shape[0]

    @property
    def weight_bytes(self) -> int:
        return self.stack.nbytes

    def product(
        self, x: Tensor, plan: moe.Plan, top_k: int, activation: Activation, route_weights: Tensor | None
    ) -> Tensor:
        return moe_mxfp4.grouped_linear(x, self.stack, plan, top_k, route_weights=route_weights, activation=activation)

    def put(self, index: int, linear: Linear) -> None:
        assert isinstance(linear, Mxfp4Linear)
        words, exponents = moe_mxfp4.pack(linear.weight)
        self.stack.words[index].copy_(words)
        self.stack.exponents[index].copy_(exponents)
        if self.stack.bias is not None and linear.bias is not None:
            self.stack.bias[index].copy_(linear.bias)


@dataclass(frozen=True, slots=True)
class GroupedExpertMlp:
    """As `ExpertMlp`, all experts at once."""

    ops: Ops
    router: Router
    activation: Activation
    gate_up: Stack | PackedStack
    down: Stack | PackedStack
    source: ExpertSource
    slots: ExpertSlots | None = None

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (self.router.linear,)

    @property
    def weight_bytes(self) -> int:
        return self.router.linear.weight_bytes + self.gate_up.weight_bytes + self.down.weight_bytes

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.choose(x)
        return self.apply(x, weights, chosen if self.slots is None else self.slots.here(chosen))

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        router = self.router
        return moe.route(
            router.linear(x),
            router.top_k,
            router.normalize,
            sigmoid=router.scoring == "sigmoid",
            bias=router.bias,
            groups=router.groups,
            top_groups=router.top_groups,
            best_two=router.group_score == "best_two",
            scale=router.scale,
        )

    def apply(self, x: Tensor, weights: Tensor, chosen: Tensor, added: Additions | None = None) -> Tensor:
        if not len(x):
            return torch.empty_like(x)
        if added is not None:
            return self._with_additions(x, weights, chosen.int(), added)
        top_k, chosen, experts = chosen.shape[1], chosen.int(), self.gate_up.experts
        plan = moe.plan(chosen, experts)
        choices = top_k
        if self.router.weight_inputs:  # a row for every choice
            x, choices = (x.unsqueeze(1) * weights.unsqueeze(-1)).to(x.dtype).flatten(0, 1), 1
            weights = torch.ones_like(weights)
        inner = self.gate_up.product(x, plan, choices, self.activation, None)
        pairs = self.down.product(inner, plan, top_k, self.activation, weights)
        return moe.combine(pairs, top_k, chosen=None if self.slots is None else chosen, experts=experts)

    def _with_additions(self, x: Tensor, weights: Tensor, chosen: Tensor, added: Additions) -> Tensor:
        """The same with a row in memory for every pair between the launches, so that something can be added to it."""
        top_k, experts = chosen.shape[1], self.gate_up.experts
        plan = moe.plan(chosen, experts)
        order = plan.order.clamp(0, chosen.numel() - 1).long()  # what is behind the runs was not written
        each, ones = x.repeat_interleave(top_k, 0), torch.ones_like(weights)
        if self.router.weight_inputs:
            each, weights = (each * weights.view(-1, 1)).to(x.dtype), ones
        inner = self.gate_up.product(each[order], plan, top_k, self.activation, ones)
        added.gate_up(each, inner)
        inner = gated(self.ops, self.activation, inner)
        pairs = self.down.product(inner[order], plan, top_k, self.activation, weights)
        added.down(inner, pairs, weights=weights)
        return moe.combine(pairs, top_k, chosen=None if self.slots is None else chosen, experts=experts)

    def replace(self, slot: int, expert: GatedMlp) -> None:
        """In place: recorded steps read the stacks."""
        for stack, linear in ((self.gate_up, expert.gate_up), (self.down, expert.down)):
            stack.put(slot, linear)


def group(mlp: ExpertMlp) -> GroupedExpertMlp | None:
    """Stack the experts of `mlp`; None where their weights are in a form that the kernels do not read."""
    gate_up = _stack([expert.gate_up for expert in mlp.experts])
    down = _stack([expert.down for expert in mlp.experts])
    if gate_up is None or down is None:
        return None
    return GroupedExpertMlp(mlp.ops, mlp.router, mlp.experts[0].activation, gate_up, down, mlp.source, mlp.slots)


def _stack(linears: list[Linear]) -> Stack | PackedStack | None:
    packed = [linear for linear in linears if isinstance(linear, Mxfp4Linear)]
    if len(packed) == len(linears):
        words, exponents = zip(*(moe_mxfp4.pack(linear.weight) for linear in packed), strict=True)
        biases = [linear.bias for linear in packed if linear.bias is not None]
        bias = torch.stack(biases) if biases else None
        return PackedStack(Mxfp4Stack(torch.stack(words), torch.stack(exponents), bias))
    parts = [linear for linear in linears if isinstance(linear, CudaLinear | BlockFp8Linear)]
    tiles = {part.tile if isinstance(part, BlockFp8Linear) else None for part in parts}
    if len(tiles) > 1:
        return None
    scales = [part.scale for part in parts if part.scale is not None]
    biases = [part.bias for part in parts if part.bias is not None]
    if len(parts) != len(linears) or any(len(found) not in (0, len(parts)) for found in (scales, biases)):
        return None
    # Stacked as bytes: not every operation knows FP8.
    weight = torch.stack([part.weight.view(torch.uint8) for part in parts]).view(parts[0].weight.dtype)
    bias = torch.stack(biases) if biases else None
    return Stack(weight, torch.stack(scales) if scales else None, bias, tiles.pop() if tiles else None)


@dataclass(frozen=True, slots=True)
class FusedSharedAndRouted(SharedAndRouted):
    """For few tokens the shared expert is two launches: the gate is in one, the sum with the others in the other."""

    def forward(self, x: Tensor) -> Tensor:
        gate_up: Any = self.shared.gate_up
        down: Any = self.shared.down
        if x.shape[0] > MAX_BATCH:
            return SharedAndRouted.forward(self, x)
        routed = self.routed.forward(x)
        out: Tensor = down.fused(gate_up.fused(x, gated=True), residual=routed)
        return out


def with_shared(routed: FeedForward, shared: GatedMlp, gate: Linear | None) -> FeedForward:
    """See `LayerFactory`."""
    fuses = gate is None and shared.activation == "silu" and all(isinstance(one, CudaLinear) for one in shared.linears)
    return (FusedSharedAndRouted if fuses else SharedAndRouted)(routed, shared, gate)
