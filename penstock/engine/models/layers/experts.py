"""A mixture of experts: a router chooses a few experts for each token, and an expert sees only its tokens.

Here experts are ordinary linears, quantized ones too, computed one after another: right where a launch costs nothing
(CPU). `backends.cuda.experts` computes all of them at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine.backends.interface import Ops
from penstock.engine.models.layers.feed_forward import GatedMlp
from penstock.engine.models.layers.linear import Linear


@dataclass(frozen=True, slots=True)
class Router:
    """Scores every expert for every token and keeps the best."""

    linear: Linear
    top_k: int
    normalize: bool

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights float32 [T, top_k] and experts int64 [T, top_k], the best first."""
        weights, experts = self.linear(x).float().softmax(-1).topk(self.top_k, dim=-1)
        return (weights / weights.sum(-1, keepdim=True) if self.normalize else weights), experts


@dataclass(frozen=True, slots=True)
class ExpertMlp:
    """Experts one by one, each over its own tokens."""

    ops: Ops
    router: Router
    experts: tuple[GatedMlp, ...]

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (self.router.linear,)

    @property
    def weight_bytes(self) -> int:
        return self.router.linear.weight_bytes + sum(expert.weight_bytes for expert in self.experts)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x)
        top_k = self.router.top_k
        # Pairs of token and expert, sorted by expert: one gather before and one after, none per expert.
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=len(self.experts)).tolist()
        runs = torch.split(x[order // top_k], counts)
        outputs = torch.cat([expert.forward(run) for expert, run in zip(self.experts, runs, strict=True) if len(run)])
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=x.device)
        by_token = outputs[back].view(-1, top_k, x.shape[1])
        return (by_token * weights.to(x.dtype).unsqueeze(-1)).sum(1)
