"""A chain of products of one token, each of which reads what the one before it wrote, and what it computes.

This is the part of a decoder between two attentions: the attention's output projection, the MLP and the projection of
the next layer. A backend may compute a chain in one launch; `apply_links` says what the result is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class Link:
    """One product of a chain. Its input is the residual stream if it has a norm, else what the link before it wrote,
    or what the chain was given."""

    weight: Tensor
    """[N, K] of a 16-bit type or e4m3; gated: [2 * N, K], gate rows then up rows."""
    scale: Tensor | None = None
    """Float32, of every row of an e4m3 weight."""
    bias: Tensor | None = None
    norm: Tensor | None = None
    """Gains [K]: the residual stream is RMS-normalized with them."""
    eps: float = 0.0
    gated: bool = False
    """The result is silu(gate) * up."""
    residual: bool = False
    """The result is added to the residual stream, in place. There is no other output."""

    @property
    def inputs(self) -> int:
        return self.weight.shape[1]

    @property
    def outputs(self) -> int:
        return self.weight.shape[0] // 2 if self.gated else self.weight.shape[0]


def apply_links(links: Sequence[Link], x: Tensor, residual: Tensor) -> Tensor | None:
    """Products of `x` [1, K] one after another; `residual` [1, hidden] is changed in place. Returns the output of the
    last link, if it has one. Sums are float32; outputs and normalized inputs are rounded to the type of `x`, the
    residual stream to its own."""
    dtype, out = x.dtype, x
    for link in links:
        if link.norm is not None:
            wide = residual.float()
            scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + link.eps)
            out = (wide * scale * link.norm.float()).to(dtype)
        y = F.linear(out.float(), link.weight.float())
        if link.scale is not None:
            y *= link.scale
        if link.bias is not None:
            y += link.bias.float()
        if link.gated:
            gate, up = y.chunk(2, dim=-1)
            y = F.silu(gate) * up
        if link.residual:
            residual.copy_(residual.float() + y)
        else:
            out = y.to(dtype)
    return None if links[-1].residual else out
