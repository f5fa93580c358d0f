"""A backend on the CPU that computes chains of products, in plain PyTorch: for what a model does with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.engine.backends.backend import WeightPlan
from penstock.engine.backends.interface import FP8, FP8_MAX, Link, apply_links
from penstock.engine.backends.reference.backend import ReferenceBackend
from penstock.engine.backends.reference.ops import ReferenceOps
from penstock.engine.startup import part


class Chain:
    """See `LinkedProducts`."""

    def __init__(self, links: Sequence[Link], lengths: list[int]) -> None:
        self.links = tuple(links)
        self._lengths = lengths

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor | None:
        assert len(x) == len(residual) == 1
        self._lengths.append(len(self.links))
        return apply_links(self.links, x, residual)


class ChainOps(ReferenceOps):
    """With chains of up to `longest` products."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.lengths: list[int] = []
        """Of the chains that were computed."""

    def chain(self, links: Sequence[Link]) -> Chain | None:  # type: ignore[override]
        return Chain(links, self.lengths) if len(links) <= self.longest else None


class ChainLinear:
    """See `ChainedLinear`. In e4m3 with a scale per row where `few_bits`."""

    takes_adapters = True

    def __init__(self, weight: Tensor, bias: Tensor | None, few_bits: bool) -> None:
        self.weight, self.bias = weight, bias
        self.scale: Tensor | None = None
        if few_bits:
            self.scale = weight.abs().amax(dim=1).clamp(min=1e-12) / FP8_MAX
            self.weight = (weight / self.scale[:, None]).to(FP8)
        self.weight_bytes = self.weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        weight = self.weight.float() if self.scale is None else self.weight.float() * self.scale[:, None]
        return F.linear(x, weight, self.bias)

    def fused(
        self,
        x: Tensor,
        *,
        norm: Tensor | None = None,
        eps: float = 0.0,
        residual: Tensor | None = None,
        gated: bool = False,
        lora: Any = None,
    ) -> Tensor:
        y = self(x if norm is None else F.rms_norm(x, norm.shape, norm, eps))
        if gated:
            gate, up = y.chunk(2, dim=-1)
            y = F.silu(gate) * up
        return y if residual is None else residual.add_(y)

    def link(
        self, *, norm: Tensor | None = None, eps: float = 0.0, residual: bool = False, gated: bool = False
    ) -> Link:
        return Link(self.weight, self.scale, self.bias, norm, eps, gated, residual)


class ChainBackend(ReferenceBackend):
    """See `Backend`."""

    calibrates = False

    def __init__(self, longest: int, few_bits: bool) -> None:
        super().__init__()
        self.ops: ChainOps = ChainOps(longest)  # type: ignore[mutable-override]
        self._few_bits = few_bits

    def plan_weights(self, *args: Any) -> WeightPlan:
        return WeightPlan(fused_up_to=8)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> ChainLinear:
        return ChainLinear(weight, bias, self._few_bits and weight.dtype == torch.float32)


def use_chains(monkeypatch: pytest.MonkeyPatch, longest: int = 4, few_bits: bool = False) -> ChainOps:
    """Engines that are made from now on compute chains of up to `longest` products. Returns their operations."""
    backend = ChainBackend(longest, few_bits)
    monkeypatch.setattr(part, "pick_backend", lambda device, threads: backend)
    return backend.ops
