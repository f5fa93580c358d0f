"""A layer of experts as a part of a chain of products; see `links`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

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
    """[experts, 2 * width, K]: gate rows, then up rows; gated by SiLU."""
    gate_up_scale: Tensor | None
    """Float32, one for every row of e4m3 weights. So are the others."""
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

    @property
    def weight(self) -> Tensor:
        """Of the matrices the first, for those who want to know where they are."""
        return self.router

    def apply(self, residual: Tensor, dtype: torch.dtype) -> None:
        """On `residual` [1, K], in place; activations are rounded to `dtype`."""
        wide = residual.float()
        x = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.norm.float()
        x = x.to(dtype).float()
        bias = None if self.router_bias is None else self.router_bias.float()
        weights, chosen = self.choice(F.linear(x, self.router.float(), bias).to(dtype).float()[0])
        total = torch.zeros_like(wide)
        for weight, expert in zip(weights.tolist(), chosen.tolist(), strict=True):
            up = _of(self.gate_up_scale, expert)
            total += weight * _mlp(x, self.gate_up[expert], up, self.down[expert], _of(self.down_scale, expert), dtype)
        if self.shared_gate_up is not None and self.shared_down is not None:
            parts = (self.shared_gate_up, self.shared_gate_up_scale, self.shared_down, self.shared_down_scale)
            shared = _mlp(x, *parts, dtype)
            if self.shared_gate is not None:
                shared = shared * F.linear(x, self.shared_gate.float()).to(dtype).float().sigmoid()
            total += shared
        residual.copy_(wide + total)


def _of(scales: Tensor | None, expert: int) -> Tensor | None:
    return None if scales is None else scales[expert]


def _mlp(
    x: Tensor, gate_up: Tensor, up_scale: Tensor | None, down: Tensor, down_scale: Tensor | None, dtype: torch.dtype
) -> Tensor:
    y = F.linear(x, gate_up.float())
    gate, up = (y if up_scale is None else y * up_scale).chunk(2, dim=-1)
    out = F.linear((F.silu(gate) * up).to(dtype).float(), down.float())
    return out if down_scale is None else out * down_scale
