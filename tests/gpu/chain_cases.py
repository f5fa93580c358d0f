"""Chains of products of one token for the tests of their kernel: random links, and what they compute in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.engine.backends.interface import FP8, Link

BF16 = torch.bfloat16
EPS = 1e-5
TOLERANCE = 6e-3
"""Relative error of results that were rounded to bfloat16 three times on their way."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the products between two attentions."""

    hidden: int
    ffn: int
    attended: int
    qkv: int

    @property
    def weights(self) -> int:
        return self.hidden * (self.attended + 3 * self.ffn + self.qkv)


LLAMA_8B = Sizes(4096, 14336, 4096, 6144)
LLAMA_70B = Sizes(8192, 28672, 8192, 10240)
QWEN3_4B = Sizes(2560, 9728, 4096, 6144)
QWEN3_17B = Sizes(2048, 6144, 2048, 4096)
QWEN3_06B = Sizes(1024, 3072, 2048, 4096)


def make_links(
    sizes: Sizes, *, bias: bool, device: torch.device, keep: Callable[[Tensor], Tensor] = lambda x: x
) -> list[Link]:
    """Output, gate and up, down, and query, key and value of the next layer, in e4m3 with a scale for each row; `keep`
    is called on every tensor."""

    def noise(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.float32).mul_(scale)

    def link(rows: int, inputs: int, norm: bool, gated: bool = False, residual: bool = False) -> Link:
        weight = noise(rows, inputs, scale=inputs**-0.5)
        scale = weight.abs().amax(1) / 448
        return Link(
            keep((weight / scale[:, None]).to(FP8)),
            keep(scale),
            keep(noise(rows).to(BF16)) if bias else None,
            keep((1 + noise(inputs, scale=0.3)).to(BF16)) if norm else None,
            EPS if norm else 0.0,
            gated,
            residual,
        )

    return [
        link(sizes.hidden, sizes.attended, norm=False, residual=True),
        link(2 * sizes.ffn, sizes.hidden, norm=True, gated=True),
        link(sizes.hidden, sizes.ffn, norm=False, residual=True),
        link(sizes.qkv, sizes.hidden, norm=True),
    ]


def links64(links: Sequence[Link], x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """The residual stream and the last output, without any rounding."""
    out, stream = x.double(), residual.double()
    for link in links:
        if link.norm is not None:
            out = stream * torch.rsqrt(stream.square().mean(-1, keepdim=True) + link.eps) * link.norm.double()
        y = out @ link.weight.float().double().T
        if link.scale is not None:
            y = y * link.scale.double()
        if link.bias is not None:
            y = y + link.bias.double()
        if link.gated:
            gate, up = y.chunk(2, dim=-1)
            y = F.silu(gate) * up
        if link.residual:
            stream = stream + y
        else:
            out = y
    return stream, out
