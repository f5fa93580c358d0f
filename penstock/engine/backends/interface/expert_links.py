"""A layer of experts as a part of a chain of products; see `links`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.engine.backends.activation import ClampedSwiglu

_SMALL_TOTAL = 1e-20
"""Added to the sum that sigmoid weights are divided by: all of them may be zero."""


@dataclass(frozen=True, slots=True)
class ExpertChoice:
    """How scores become experts and weights; see `models.layers.experts.Router`."""

    top_k: int
    normalize: bool
    sigmoid: bool = False
    correction: Tensor | None = None
    """Float32 [experts]: added to the scores by which experts are chosen."""
    groups: int = 1
    top_groups: int = 1
    best_two: bool = False
    """Of a group counts the sum of its two best experts, not its best one."""
    scale: float = 1.0

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Of `logits` [experts]: weights and experts [top_k], the best first. Of equals the first one is chosen."""
        shares = logits.sigmoid() if self.sigmoid else logits.softmax(-1)
        by = logits
        if self.correction is not None or self.groups > 1:
            by = shares if self.correction is None else shares + self.correction
        if self.groups > 1:
            grouped = by.view(self.groups, -1)
            best = grouped.topk(2).values.sum(-1) if self.best_two else grouped.amax(-1)
            kept = torch.zeros_like(best, dtype=torch.bool)
            kept[best.argsort(descending=True, stable=True)[: self.top_groups]] = True
            inside = kept.repeat_interleave(grouped.shape[1])
            shares, by = shares.where(inside, 0.0), by.where(inside, float("-inf"))
        chosen = by.argsort(descending=True, stable=True)[: self.top_k]
        weights = shares[chosen]
        if self.normalize:
            weights = weights / (weights.sum() + (_SMALL_TOTAL if self.sigmoid else 0.0))
        return weights * self.scale, chosen


@dataclass(frozen=True, slots=True)
class ExpertLinks:
    """All products of a layer of experts. The input is the residual stream, normalized; the result is added to it."""

    choice: ExpertChoice
    router: Tensor
    """[experts, K], 16 bits."""
    router_bias: Tensor | None
    gate_up: Tensor
    """[experts, 2 * width, K]: gate rows, then up rows. Uint8: in MXFP4, in the rows of the backend."""
    gate_up_scale: Tensor | None
    """Float32, one for every row of weights in few bits. So are the others."""
    down: Tensor
    """[experts, K, width]"""
    down_scale: Tensor | None
    norm: Tensor
    eps: float
    shared_gate_up: Tensor | None = None
    """[2 * shared width, K], of an expert that every token visits."""
    shared_gate_up_scale: Tensor | None = None
    shared_down: Tensor | None = None
    shared_down_scale: Tensor | None = None
    shared_gate: Tensor | None = None
    """[1, K]: the sigmoid of its product is what the shared expert is multiplied by."""
    gate_up_bias: Tensor | None = None
    """[experts, 2 * width]"""
    down_bias: Tensor | None = None
    """[experts, K]"""
    clamped: ClampedSwiglu | None = None
    """What gates; None: SiLU."""

    @property
    def weight(self) -> Tensor:
        """Of the matrices the first, for those who want to know where they are."""
        return self.router

    def gated(self, y: Tensor) -> Tensor:
        """What the activation makes of gates and ups [1, 2 * width]."""
        gate, up = y.chunk(2, dim=-1)
        if self.clamped is None:
            return F.silu(gate) * up
        alpha, limit = self.clamped.alpha, self.clamped.limit
        gate = gate.clamp(max=limit)
        return gate * torch.sigmoid(alpha * gate) * (up.clamp(-limit, limit) + 1)

    def apply(self, residual: Tensor, dtype: torch.dtype) -> None:
        """On `residual` [1, K], in place; activations are rounded to `dtype`. Not for weights in MXFP4."""
        assert self.gate_up.dtype != torch.uint8
        wide = residual.float()
        x = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.norm.float()
        x = x.to(dtype).float()
        bias = None if self.router_bias is None else self.router_bias.float()
        weights, chosen = self.choice(F.linear(x, self.router.float(), bias).to(dtype).float()[0])
        total = torch.zeros_like(wide)
        for weight, expert in zip(weights.tolist(), chosen.tolist(), strict=True):
            inner = _times(x, self.gate_up[expert], _of(self.gate_up_scale, expert))
            inner = self.gated(inner + _bias(self.gate_up_bias, expert)).to(dtype).float()
            out = _times(inner, self.down[expert], _of(self.down_scale, expert))
            total += weight * (out + _bias(self.down_bias, expert))
        if self.shared_gate_up is not None and self.shared_down is not None:
            y = _times(x, self.shared_gate_up, self.shared_gate_up_scale)
            shared = _times(self.gated(y).to(dtype).float(), self.shared_down, self.shared_down_scale)
            if self.shared_gate is not None:
                shared = shared * F.linear(x, self.shared_gate.float()).to(dtype).float().sigmoid()
            total += shared
        residual.copy_(wide + total)


def _of(scales: Tensor | None, expert: int) -> Tensor | None:
    return None if scales is None else scales[expert]


def _bias(biases: Tensor | None, expert: int) -> Tensor | float:
    return 0.0 if biases is None else biases[expert].to(torch.float32)


def _times(x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
    y = F.linear(x, weight.float())
    return y if scale is None else y * scale
