"""Routing: the experts of every token, and the weights of their outputs.

`route` takes scores as they are. With few tokens `score_and_route` multiplies by the router itself: programs of a token
share its experts' scores, and the last to finish (an atomic counter, reset for the next launch) chooses among them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.backends.cuda.kernels.common import (
    ceil_div,
    is_building,
    launch,
    launch_successor,
    next_power_of_2,
    wait_for_inputs,
)
from penstock.engine.models.moe_config import SMALL_TOTAL

_LEFT_OUT = tl.constexpr(-3.0e38)
"""Score of an expert in a group that was not chosen: taken when nothing else is left."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How scores become experts and weights; see `models.layers.experts.Router`."""

    top_k: int
    normalize: bool
    sigmoid: bool = False
    bias: Tensor | None = None
    groups: int = 1
    top_groups: int = 1
    best_two: bool = False
    scale: float = 1.0
    total_eps: float = SMALL_TOTAL

    @property
    def added(self) -> float | None:
        """What is added to the sum that weights are divided by; None: they are not."""
        if not self.normalize:
            return None
        return self.total_eps if self.sigmoid else 0.0

    def options(self, experts: int) -> dict[str, Any]:
        return {
            "EXPERTS": experts,
            "BLOCK": next_power_of_2(experts),
            "TOP_K": self.top_k,
            "TOP_BLOCK": next_power_of_2(self.top_k),
            "ADDED": self.added,
            "SIGMOID": self.sigmoid,
            "BIAS": self.bias is not None,
            "GROUPS": self.groups,
            "GROUP_BLOCK": next_power_of_2(self.groups),
            "TOP_GROUPS": self.top_groups,
            "BEST_TWO": self.best_two,
            "SCALE": self.scale,
        }

    def outputs(self, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
        weights = torch.empty((tokens, self.top_k), dtype=torch.float32, device=device)
        chosen = torch.empty((tokens, self.top_k), dtype=torch.int32, device=device)
        if is_building():
            chosen.zero_()  # what comes next looks experts up, and nothing chooses any
        return weights, chosen


@triton.jit
def _choose(
    x: tl.tensor,
    row: tl.tensor,
    bias_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_BLOCK: tl.constexpr,
    ADDED: tl.constexpr,
    SIGMOID: tl.constexpr,
    BIAS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BEST_TWO: tl.constexpr,
    SCALE: tl.constexpr,
) -> None:
    """Scores [BLOCK] in float32, -inf past the last expert, to the token's experts and weights."""
    e = tl.arange(0, BLOCK)
    if SIGMOID:
        p = 1.0 / (1.0 + tl.exp(-x))
        whole = 1.0
    else:
        p = tl.exp(x - tl.max(x, axis=0))
        whole = tl.sum(p, axis=0)
    choice = p
    BY_LOGIT: tl.constexpr = SIGMOID and not BIAS and GROUPS == 1
    if BY_LOGIT:
        choice = x  # sigmoids of large logits are all one
    if BIAS:
        # Scores and corrections are of one size: softmax scores must be what they are before they are corrected.
        choice = p / whole + tl.load(bias_ptr + e, mask=e < EXPERTS, other=0.0)
    left = tl.where(e < EXPERTS, choice, float("-inf"))
    if GROUPS > 1:
        of = e // (EXPERTS // GROUPS)
        g = tl.arange(0, GROUP_BLOCK)
        scores = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
        for group in tl.static_range(GROUPS):
            inside = tl.where(of == group, left, float("-inf"))
            score = tl.max(inside, axis=0)
            if BEST_TWO:
                score += tl.max(tl.where(e == tl.argmax(inside, axis=0), float("-inf"), inside), axis=0)
            scores = tl.where(g == group, score, scores)
        kept = e < 0
        for _ in tl.static_range(TOP_GROUPS):
            group = tl.argmax(scores, axis=0)
            kept = kept | (of == group)
            scores = tl.where(g == group, float("-inf"), scores)
        left = tl.where(kept | (e >= EXPERTS), left, _LEFT_OUT)
        p = tl.where(kept, p, 0.0)
    i = tl.arange(0, TOP_BLOCK)
    best = tl.zeros([TOP_BLOCK], tl.float32)
    chosen = tl.zeros([TOP_BLOCK], tl.int32)
    for turn in tl.static_range(TOP_K):
        weight, expert = tl.max(left, axis=0, return_indices=True)
        if BIAS or GROUPS > 1 or BY_LOGIT:
            # Nothing is left in the groups: the rest are visits without weight.
            weight = tl.where(weight <= _LEFT_OUT, 0.0, tl.sum(tl.where(e == expert, p, 0.0), axis=0))
        best = tl.where(i == turn, weight, best)
        chosen = tl.where(i == turn, expert, chosen)
        left = tl.where(e == expert, float("-inf"), left)
    total = whole if ADDED is None else tl.sum(best, axis=0) + ADDED
    tl.store(weights_ptr + row * TOP_K + i, best / total * SCALE, mask=i < TOP_K)
    tl.store(experts_ptr + row * TOP_K + i, chosen, mask=i < TOP_K)


@triton.jit
def _route_kernel(
    logits_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    stride: tl.tensor,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_BLOCK: tl.constexpr,
    ADDED: tl.constexpr,
    SIGMOID: tl.constexpr,
    BIAS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BEST_TWO: tl.constexpr,
    SCALE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    launch_successor(PDL)
    wait_for_inputs(PDL)
    x = tl.load(logits_ptr + row * stride + e, mask=e < EXPERTS, other=float("-inf")).to(tl.float32)
    _choose(
        x, row, bias_ptr, weights_ptr, experts_ptr,
        EXPERTS, BLOCK, TOP_K, TOP_BLOCK, ADDED, SIGMOID, BIAS, GROUPS, GROUP_BLOCK, TOP_GROUPS, BEST_TWO, SCALE,
    )  # fmt: skip


def route(logits: Tensor, choice: Choice, *, pdl: bool = False) -> tuple[Tensor, Tensor]:
    """Scores of [T, experts], the best of each row: weights float32 and experts int32, [T, top_k] each."""
    tokens, experts = logits.shape
    weights, chosen = choice.outputs(tokens, logits.device)
    if tokens:
        launch(
            _route_kernel,
            (tokens,),
            logits,
            logits if choice.bias is None else choice.bias,
            weights,
            chosen,
            logits.stride(0),
            **choice.options(experts),
            num_warps=1 if experts <= 256 else 4,
            pdl=pdl,
        )
    return weights, chosen


@triton.jit
def _load_rows(rows: tl.tensor, HIDDEN: tl.constexpr, BLOCK_K: tl.constexpr) -> tl.tensor:
    """The weights at `rows`, step by step."""
    found = ()
    for step in tl.static_range((HIDDEN + BLOCK_K - 1) // BLOCK_K):
        at = step * BLOCK_K + tl.arange(0, BLOCK_K)
        w = tl.load(rows[:, None] + at[None, :], mask=(at < HIDDEN)[None, :], other=0.0)
        found = found + (w,)  # type: ignore[assignment]
    return found


@triton.jit
def _inputs(
    x_ptr: tl.tensor, gains: tl.tensor, eps: tl.tensor, HIDDEN: tl.constexpr, BLOCK_K: tl.constexpr, NORM: tl.constexpr
) -> tl.tensor:
    """One token, step by step; with `NORM` normalized, and rounded as the norm's own result would be."""
    found = ()
    square = tl.zeros([BLOCK_K], tl.float32)
    for step in tl.static_range((HIDDEN + BLOCK_K - 1) // BLOCK_K):
        at = step * BLOCK_K + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + at, mask=at < HIDDEN, other=0.0).to(tl.float32)
        square += x * x
        found = found + (x,)  # type: ignore[assignment]
    if NORM:
        inverse = tl.rsqrt(tl.sum(square, axis=0) / HIDDEN + eps)
        normed = ()
        for step in tl.static_range((HIDDEN + BLOCK_K - 1) // BLOCK_K):
            x = found[step] * inverse * gains[step].to(tl.float32)
            normed = normed + (x.to(x_ptr.dtype.element_ty).to(tl.float32),)  # type: ignore[assignment]
        found = normed
    return found


@triton.jit
def _scores(
    inputs: tl.tensor, rows: tl.tensor, HIDDEN: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr
) -> tl.tensor:
    """One token times rows of weights."""
    sums = tl.zeros([BLOCK_E, BLOCK_K], tl.float32)
    for step in tl.static_range((HIDDEN + BLOCK_K - 1) // BLOCK_K):
        sums += rows[step].to(tl.float32) * inputs[step][None, :]
    return tl.sum(sums, axis=1)


@triton.jit
def _score_kernel(
    x_ptr: tl.tensor,
    router_ptr: tl.tensor,
    router_bias_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    counter_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    shared_ptr: tl.tensor,
    shared_gate_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    normed_ptr: tl.tensor,
    eps: tl.tensor,
    HIDDEN: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROUTER_BIAS: tl.constexpr,
    SHARED: tl.constexpr,
    NORM: tl.constexpr,
    CHOOSE: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_BLOCK: tl.constexpr,
    ADDED: tl.constexpr,
    SIGMOID: tl.constexpr,
    BIAS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BEST_TWO: tl.constexpr,
    SCALE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    PROGRAMS: tl.constexpr = (EXPERTS + BLOCK_E - 1) // BLOCK_E
    pid = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    mine = pid * BLOCK_E + tl.arange(0, BLOCK_E)
    launch_successor(PDL)
    # Weights are constants: they may be under way before the input is there. Experts past the end read the last row:
    # their sums are not stored.
    rows = router_ptr + tl.minimum(mine, EXPERTS - 1) * HIDDEN
    if SHARED:
        rows = tl.where(mine < PROGRAMS * BLOCK_E, rows, shared_ptr + mine * 0)
    weights = _load_rows(rows, HIDDEN, BLOCK_K)
    gains = ()
    if NORM:
        for step in tl.static_range((HIDDEN + BLOCK_K - 1) // BLOCK_K):
            at = step * BLOCK_K + tl.arange(0, BLOCK_K)
            gains = gains + (tl.load(norm_ptr + at, mask=at < HIDDEN, other=0.0),)  # type: ignore[assignment]
    wait_for_inputs(PDL)
    inputs = _inputs(x_ptr + row * HIDDEN, gains, eps, HIDDEN, BLOCK_K, NORM)
    if NORM:  # noqa: SIM102 - known when compiled; the other is not
        if pid == 0:
            for step in tl.static_range((HIDDEN + BLOCK_K - 1) // BLOCK_K):
                at = step * BLOCK_K + tl.arange(0, BLOCK_K)
                kept = inputs[step].to(normed_ptr.dtype.element_ty)
                tl.store(normed_ptr + row * HIDDEN + at, kept, mask=at < HIDDEN)
    scores = _scores(inputs, weights, HIDDEN, BLOCK_E, BLOCK_K)
    if SHARED:  # noqa: SIM102
        if pid == PROGRAMS:
            score = scores.to(x_ptr.dtype.element_ty).to(tl.float32)
            first = tl.arange(0, BLOCK_E) == 0
            tl.store(shared_gate_ptr + row + tl.zeros([BLOCK_E], tl.int32), 1.0 / (1.0 + tl.exp(-score)), mask=first)
            return
    if ROUTER_BIAS:
        scores += tl.load(router_bias_ptr + mine, mask=mine < EXPERTS, other=0.0).to(tl.float32)
    # Rounded as the linear's own result would be.
    scores = scores.to(x_ptr.dtype.element_ty).to(tl.float32)
    tl.store(logits_ptr + row * EXPERTS + mine, scores, mask=mine < EXPERTS)
    if CHOOSE:
        # All threads' stores happen before the barrier, and thread 0's release makes them visible to the chip.
        tl.debug_barrier()
        arrived = tl.atomic_add(counter_ptr + row, 1, sem="acq_rel", scope="gpu")
        if arrived == PROGRAMS - 1:
            tl.store(counter_ptr + row, 0)
            e = tl.arange(0, BLOCK)
            every = tl.load(logits_ptr + row * EXPERTS + e, mask=e < EXPERTS, other=float("-inf"))
            _choose(
                every, row, bias_ptr, weights_ptr, experts_ptr,
                EXPERTS, BLOCK, TOP_K, TOP_BLOCK, ADDED, SIGMOID, BIAS,
                GROUPS, GROUP_BLOCK, TOP_GROUPS, BEST_TWO, SCALE,
            )  # fmt: skip


def score_and_route(
    x: Tensor,
    router: Tensor,
    router_bias: Tensor | None,
    choice: Choice,
    counters: Tensor,
    *,
    shared: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    normed: Tensor | None = None,
    logits: Tensor | None = None,
    pdl: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`route` of `x` [T, hidden] times the transpose of `router` [experts, hidden], in one launch. `counters`: int32,
    zero, one for every token. With `shared` [1, hidden], the gate of a shared expert, its sigmoids float32 [T] too.
    `norm`, `eps`: x is RMS-normalized first, and `normed` [T, hidden] is what it then is. With `logits` (float32 [T,
    experts]) these are written and nothing is chosen."""
    (tokens, hidden), experts = x.shape, router.shape[0]
    weights, chosen = choice.outputs(tokens, x.device)
    block_e, warps = 2 if experts * tokens <= 1024 else 4, 4
    if tokens == 1:
        # Nothing but latency: a warp alone adds up and chooses without waiting for others. Inputs stay in registers.
        block_e, warps = 1, min(4, next_power_of_2(ceil_div(hidden, 2048)))
    gates = None if shared is None else torch.empty(tokens, dtype=torch.float32, device=x.device)
    launch(
        _score_kernel,
        (ceil_div(experts, block_e) + (shared is not None), tokens),
        x,
        router,
        router if router_bias is None else router_bias,
        torch.empty((tokens, experts), dtype=torch.float32, device=x.device) if logits is None else logits,
        counters,
        x if choice.bias is None else choice.bias,
        weights,
        chosen,
        x if shared is None else shared,
        weights if gates is None else gates,
        x if norm is None else norm,
        x if normed is None else normed,
        eps,
        HIDDEN=hidden,
        BLOCK_E=block_e,
        BLOCK_K=min(1024, next_power_of_2(hidden)),
        ROUTER_BIAS=router_bias is not None,
        SHARED=shared is not None,
        NORM=norm is not None,
        CHOOSE=logits is None,
        **choice.options(experts),
        num_warps=warps,
        pdl=pdl,
    )
    return weights, chosen, gates
