"""Experts on CUDA: the weights of a layer's experts as one stack, computed together by `kernels.moe`.

Six launches whatever the number of experts and tokens, and none waits for the device: scores, routing, sorting, the two
products, the sum, which may be left to the norm behind. With few tokens they are three: scores and routing, gate and
up, down with the sum. With one token these have kernels of their own (`kernels.moe_one`, `kernels.mxfp4_one`), which
also take the norm before and the residual addition behind. Weights in few bits (FP8, MXFP4, integers in groups) are
widened in the kernels; activations stay as they are. In deterministic mode it is six for any number of tokens, with one
launch shape.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from penstock.engine.backends.activation import has_gate
from penstock.engine.backends.cuda.expert_stacks import AnyStack, PackedStack, Stack, stack_of
from penstock.engine.backends.cuda.grouped_linear import GroupedLinear
from penstock.engine.backends.cuda.kernels import moe, moe_one, mxfp4_one
from penstock.engine.backends.cuda.kernels.addends import Summands
from penstock.engine.backends.cuda.kernels.gemv import MAX_BATCH
from penstock.engine.backends.cuda.kernels.moe import SharedPart
from penstock.engine.backends.cuda.kernels.moe_one import Matrices, Visits
from penstock.engine.backends.cuda.kernels.moe_plan import FEW, FewPairs, Plan, plan
from penstock.engine.backends.cuda.kernels.moe_route import Choice, route, score_and_route
from penstock.engine.backends.cuda.linear import CudaLinear
from penstock.engine.backends.interface import Activation, Ops
from penstock.engine.models.layers.experts import (
    Additions,
    ExpertMlp,
    ExpertSlots,
    ExpertSource,
    Router,
    SharedAndRouted,
)
from penstock.engine.models.layers.feed_forward import FeedForward, GatedMlp, ScaledMlp, gated
from penstock.engine.models.layers.linear import Linear
from penstock.engine.models.layers.visit_norm import VisitNorm

_COUNTERS = 1024
"""Arrival counters of a layer: for each token, or for every 16 outputs."""
_MOST_SCORES = 2048
"""Of tokens and experts, up to which one launch makes and compares them: the vendor's product takes two for so few."""


@dataclass(frozen=True, slots=True)
class GroupedExpertMlp:
    """As `ExpertMlp`, all experts at once."""

    ops: Ops
    router: Router
    activation: Activation
    gate_up: AnyStack
    down: AnyStack
    source: ExpertSource
    choice: Choice
    """What the router does with its scores."""
    counters: Tensor
    """int32 [_COUNTERS]: zero between launches."""
    slots: ExpertSlots | None = None
    leaves_sums: bool = False
    """Whether the norm behind adds up what a token's experts gave."""
    visit_norm: VisitNorm | None = None

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (self.router.linear,)

    @property
    def weight_bytes(self) -> int:
        return self.router.linear.weight_bytes + self.gate_up.weight_bytes + self.down.weight_bytes

    @property
    def form(self) -> tuple[object, ...]:
        """Layers of one file may have experts in different bits."""
        return *self.gate_up.form, *self.down.form

    @property
    def fuses(self) -> bool:
        """See `FusedFeedForward`."""
        return self.takes_one and _is_dense(self.router.linear) and self.router.gains is None

    @property
    def takes_one(self) -> bool:
        """Whether `moe_one` or `mxfp4_one` reads these weights."""
        stacks = (self.gate_up, self.down)
        plain = all(isinstance(one, Stack) and one.tile is None and one.bias is None for one in stacks)
        packed = all(isinstance(one, PackedStack) for one in stacks) and not self.router.weight_inputs
        fits = has_gate(self.activation) and self.slots is None and not self.ops.batch_invariant and self.routes
        return fits and self.visit_norm is None and (plain or packed)

    @property
    def routes(self) -> bool:
        """Whether kernels choose experts as the router does."""
        router = self.router
        plain = router.scoring != "sqrt_softplus" and not router.logit_softcap and router.logit_scale == 1.0
        return plain and router.table is None and router.outside == -math.inf

    def fused(self, residual: Tensor, norm: Tensor, eps: float) -> Tensor:
        """See `FusedFeedForward`; for one token."""
        return _one_token(self, residual, norm=norm, eps=eps)

    def leaving_sums(self) -> GroupedExpertMlp:
        """See `SummedByNorm`."""
        return replace(self, leaves_sums=self.slots is None and self.visit_norm is None)

    def forward(self, x: Tensor, inputs: Tensor | None = None) -> Tensor:
        if inputs is None and len(x) == 1 and self.fuses:
            return _one_token(self, x)
        weights, chosen = self.choose(x)
        x = x if inputs is None else inputs
        if self.slots is not None:
            return self.apply(x, weights, self.slots.here(chosen))
        if self.takes_few(x):
            return self._products(x, weights, FewPairs(chosen))
        if self.leaves_sums and len(x):
            left: Any = Summands(self._products(x, weights, plan(chosen, self.gate_up.experts)), chosen.shape[1])
            return left  # type: ignore[no-any-return]
        return self.apply(x, weights, chosen)

    def takes_few(self, x: Tensor) -> bool:
        """Whether the products of `x` need no order of pairs."""
        if self.ops.batch_invariant or self.slots is not None or self.visit_norm is not None:
            return False
        return 0 < len(x) <= FEW and self.down.outputs <= 16 * _COUNTERS

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        linear: Any = self.router.linear
        if not self.routes:
            weights, chosen = self.router(x)
            return weights, chosen.int()
        if _is_dense(linear) and 0 < len(x) <= max(FEW, min(64, _MOST_SCORES // len(linear.weight))):
            weights, chosen, _ = score_and_route(x, linear.weight, linear.bias, self.choice, self.counters)
        else:
            weights, chosen = route(linear(x), self.choice)
        return self.router.gained(weights, chosen), chosen

    def apply(self, x: Tensor, weights: Tensor, chosen: Tensor, added: Additions | None = None) -> Tensor:
        if not len(x):
            return torch.empty_like(x)
        if added is not None:
            return self._with_additions(x, weights, chosen.int(), added)
        chosen, experts = chosen.int(), self.gate_up.experts
        if self.visit_norm is not None:
            pairs = self._products(x, torch.ones_like(weights), plan(chosen, experts))
            return self._normed(pairs, weights, chosen)
        pairs = self._products(x, weights, plan(chosen, experts))
        return moe.combine(pairs, chosen.shape[1], chosen=None if self.slots is None else chosen, experts=experts)

    def _normed(self, pairs: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """The sum of what the experts gave, normalized and then weighted."""
        assert self.visit_norm is not None
        top_k = chosen.shape[1]
        pairs = (self.visit_norm(pairs, top_k) * weights.view(-1, 1)).to(pairs.dtype)
        chosen_here = None if self.slots is None else chosen
        return moe.combine(pairs, top_k, chosen=chosen_here, experts=self.gate_up.experts)

    def _products(self, x: Tensor, weights: Tensor, schedule: Plan | FewPairs) -> Tensor:
        top_k, early = weights.shape[1], self.router.weight_inputs
        of = self.counters, self.ops.batch_invariant
        inner = self.gate_up.product(x, schedule, top_k, self.activation, weights if early else None, *of)
        return self.down.product(inner, schedule, top_k, None, None if early else weights, *of)

    def _with_additions(self, x: Tensor, weights: Tensor, chosen: Tensor, added: Additions) -> Tensor:
        """The same with a row in memory for every pair between the launches, so that something can be added to it."""
        top_k, experts = chosen.shape[1], self.gate_up.experts
        schedule = plan(chosen, experts)
        order = schedule.order.clamp(0, chosen.numel() - 1).long()  # what is behind the runs was not written
        each, late = x.unsqueeze(1).expand(-1, top_k, -1).flatten(0, 1), weights
        if self.router.weight_inputs:
            each, late = (each * weights.view(-1, 1)).to(x.dtype), torch.ones_like(weights)
        if self.visit_norm is not None:
            late = torch.ones_like(weights)
        of = self.counters, self.ops.batch_invariant

        def gate_up(rows: Tensor) -> Tensor:
            return self.gate_up.product(rows[order], schedule, top_k, None, None, *of)

        def down(rows: Tensor) -> Tensor:
            return self.down.product(rows[order], schedule, top_k, None, late, *of)

        inner = gated(self.ops, self.activation, added.gate_up(each, gate_up))
        pairs = added.down(inner, down, weights=late)
        if self.visit_norm is not None:
            return self._normed(pairs, weights, chosen)
        return moe.combine(pairs, top_k, chosen=None if self.slots is None else chosen, experts=experts)

    def replace(self, slot: int, expert: GatedMlp) -> None:
        """In place: recorded steps read the stacks."""
        for stack, linear in ((self.gate_up, expert.gate_up), (self.down, expert.down)):
            stack.put(slot, linear)


def group(mlp: ExpertMlp) -> GroupedExpertMlp | None:
    """Stack the experts of `mlp`; None where their weights are in a form that the kernels do not read."""
    gate_up = stack_of([expert.gate_up for expert in mlp.experts], paired=True)
    down = stack_of([expert.down for expert in mlp.experts], paired=False)
    if gate_up is None or down is None:
        return None
    if isinstance(gate_up, PackedStack) and not has_gate(mlp.experts[0].activation):
        return None
    counters = torch.zeros(_COUNTERS, dtype=torch.int32, device=gate_up.device)
    activation, choice = mlp.experts[0].activation, choice_of(mlp.router)
    return GroupedExpertMlp(
        mlp.ops, mlp.router, activation, gate_up, down, mlp.source, choice, counters, mlp.slots,
        visit_norm=mlp.visit_norm,
    )  # fmt: skip


def choice_of(router: Router) -> Choice:
    return Choice(
        router.top_k,
        router.normalize,
        sigmoid=router.scoring == "sigmoid",
        bias=router.bias,
        groups=router.groups,
        top_groups=router.top_groups,
        best_two=router.group_score == "best_two",
        scale=router.scale,
        total_eps=router.total_eps,
    )


@dataclass(frozen=True, slots=True)
class FusedSharedAndRouted(SharedAndRouted):
    """For few tokens the shared expert is computed in the launches of the others, or in two of its own: the gate is in
    one, the sum with the others in the other."""

    joined: bool = False
    """Whether it is in the form of the others, so that it can be computed in their launches."""

    @property
    def fuses(self) -> bool:
        """See `FusedFeedForward`."""
        return self.joined and isinstance(self.routed, GroupedExpertMlp) and self.routed.fuses

    def fused(self, residual: Tensor, norm: Tensor, eps: float) -> Tensor:
        """See `FusedFeedForward`; for one token."""
        routed: Any = self.routed
        return _one_token(routed, residual, self.shared, self.gate, norm=norm, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        routed: Any = self.routed
        if len(x) == 1 and self.fuses:
            return _one_token(routed, x, self.shared, self.gate)
        if self.joined and isinstance(routed, GroupedExpertMlp) and routed.takes_few(x) and routed.router.gains is None:
            return self._together(x, routed)
        if x.shape[0] > MAX_BATCH or self.gate is not None or self.shared.activation != "silu":
            return SharedAndRouted.forward(self, x)
        gate_up: Any = self.shared.gate_up
        down: Any = self.shared.down
        out: Tensor = down.fused(gate_up.fused(x, gated=True), residual=routed.forward(x))
        return out

    def _together(self, x: Tensor, routed: GroupedExpertMlp) -> Tensor:
        gate_up: Any = self.shared.gate_up
        down: Any = self.shared.down
        router: Any = routed.router.linear
        gate: Any = self.gate
        assert isinstance(routed.gate_up, Stack) and isinstance(routed.down, Stack)
        weights, chosen, gates = score_and_route(
            x, router.weight, router.bias, routed.choice, routed.counters, shared=None if gate is None else gate.weight
        )
        top_k, early, schedule = weights.shape[1], routed.router.weight_inputs, FewPairs(chosen)
        rows = torch.empty((len(x), down.weight.shape[1]), dtype=x.dtype, device=x.device)
        inner = routed.gate_up.product(
            x, schedule, top_k, routed.activation, weights if early else None, routed.counters,
            shared=SharedPart(gate_up.weight, gate_up.scale, rows, None),
        )  # fmt: skip
        return routed.down.product(
            inner, schedule, top_k, None, None if early else weights, routed.counters,
            shared=SharedPart(down.weight, down.scale, rows, gates),
        )  # fmt: skip


def _one_token(
    routed: GroupedExpertMlp,
    x: Tensor,
    shared: GatedMlp | None = None,
    shared_gate: Linear | None = None,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """The experts of one token, in three launches; with `norm`, of the residual stream, to which it adds in place."""
    if isinstance(routed.gate_up, PackedStack):
        return _one_packed(routed, x, norm, eps)
    router: Any = routed.router.linear
    gate: Any = shared_gate
    up, down = (_matrices(*pair) for pair in _pairs(routed, shared))
    normed = x if norm is None else torch.empty_like(x)
    logits = None
    if moe_one.ranks(routed.choice, routed.gate_up.experts):
        logits = torch.empty((1, routed.gate_up.experts), dtype=torch.float32, device=x.device)
    weights, chosen, gates = score_and_route(
        x, router.weight, router.bias, routed.choice, routed.counters,
        shared=None if gate is None else gate.weight, norm=norm, eps=eps, normed=normed, logits=logits,
    )  # fmt: skip
    visits = Visits(chosen, weights, routed.router.weight_inputs, logits, routed.choice)
    inner = moe_one.gate_up(normed, up, visits, routed.activation)
    return moe_one.down(inner, down, visits, shared_gate=gates, residual=None if norm is None else x)


def _one_packed(routed: GroupedExpertMlp, x: Tensor, norm: Tensor | None, eps: float) -> Tensor:
    """The same in MXFP4."""
    router: Any = routed.router.linear
    gate_up, down = routed.gate_up, routed.down
    assert isinstance(gate_up, PackedStack) and isinstance(down, PackedStack)
    normed = x if norm is None else torch.empty_like(x)
    # Its programs wait for each other: not where ranks may share the device, which would hold each other's places.
    alone = norm is not None and routed.leaves_sums
    fast = alone and mxfp4_one.takes(x, gate_up.stack, down.stack, routed.choice.top_k)
    logits = None
    if fast and moe_one.ranks(routed.choice, gate_up.experts):
        logits = torch.empty((1, gate_up.experts), dtype=torch.float32, device=x.device)
    weights, chosen, _ = score_and_route(
        x, router.weight, router.bias, routed.choice, routed.counters, norm=norm, eps=eps, normed=normed, logits=logits
    )
    if not fast:
        out = routed._products(normed, weights, FewPairs(chosen))
        return out if norm is None else x.add_(out)
    visits = Visits(chosen, weights, False, logits, routed.choice)
    return mxfp4_one.experts_of_one(
        normed, *gate_up.parts, *down.parts, visits, routed.activation, routed.counters,
        residual=None if norm is None else x,
    )  # fmt: skip


def _pairs(routed: GroupedExpertMlp, shared: GatedMlp | None) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    gate_up, down = (None, None) if shared is None else (shared.gate_up, shared.down)
    return (routed.gate_up, gate_up), (routed.down, down)


def _matrices(stack: Stack, linear: CudaLinear | None) -> Matrices:
    if linear is None:
        return Matrices(stack.weight, stack.scale)
    return Matrices(stack.weight, stack.scale, linear.weight, linear.scale)


def with_shared(routed: FeedForward, shared: GatedMlp, gate: Linear | None) -> FeedForward:
    """See `LayerFactory`."""
    plain = all(isinstance(one, CudaLinear) for one in shared.linears)
    integers = all(isinstance(one, GroupedLinear) and not one.fixed for one in shared.linears)
    if isinstance(shared, ScaledMlp) or (not plain and not integers):
        return SharedAndRouted(routed, shared, gate)
    joined = plain and isinstance(routed, GroupedExpertMlp) and _can_join(routed, shared, gate)
    if (gate is not None or shared.activation != "silu") and not joined:
        return SharedAndRouted(routed, shared, gate)
    return FusedSharedAndRouted(routed, shared, gate, joined=joined)


def _can_join(routed: GroupedExpertMlp, shared: GatedMlp, gate: Linear | None) -> bool:
    def alike(stack: AnyStack, linear: Any) -> bool:
        return (
            isinstance(stack, Stack)
            and stack.tile is None
            and linear.bias is None
            and linear.weight.dtype == stack.weight.dtype
            and (linear.scale is None) == (stack.scale is None)
        )

    if not routed.routes:
        return False
    gated = gate is None or (_is_dense(gate) and getattr(gate, "bias", None) is None)
    both = alike(routed.gate_up, shared.gate_up) and alike(routed.down, shared.down)
    return gated and both and _is_dense(routed.router.linear) and routed.activation == shared.activation


def _is_dense(linear: Linear | None) -> bool:
    return isinstance(linear, CudaLinear) and linear.scale is None
