"""What a chain of products computes, by the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.engine.backends.interface import Link, apply_links

EPS = 1e-5


def linear64(x: Tensor, link: Link) -> Tensor:
    weight = link.weight.float().double()
    y = x.double() @ (weight if link.scale is None else weight * link.scale.double()[:, None]).T
    return y if link.bias is None else y + link.bias.double()


def norm64(x: Tensor, gain: Tensor) -> Tensor:
    return x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + EPS) * gain.double()


@pytest.mark.parametrize("stream", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_layer_between_two_attentions(dtype: torch.dtype, stream: torch.dtype) -> None:
    torch.manual_seed(1)
    attended, hidden, ffn, wide = 48, 40, 88, 64

    def weight(n: int, k: int) -> tuple[Tensor, Tensor | None]:
        values = (torch.randn(n, k) / k**0.5).to(dtype)
        return values, torch.rand(n) + 0.5 if dtype == torch.float8_e4m3fn else None

    o, gate_up, down, qkv = weight(hidden, attended), weight(2 * ffn, hidden), weight(hidden, ffn), weight(wide, hidden)
    gains = torch.rand(2, hidden).bfloat16() + 0.5
    links = [
        Link(*o, residual=True),
        Link(*gate_up, norm=gains[0], eps=EPS, gated=True),
        Link(*down, residual=True),
        Link(*qkv, bias=torch.randn(wide).bfloat16(), norm=gains[1], eps=EPS),
    ]
    x, start = torch.randn(1, attended).bfloat16(), torch.randn(1, hidden).to(stream)
    want = start.double() + linear64(x, links[0])
    gate, up = linear64(norm64(want, gains[0]), links[1]).chunk(2, dim=-1)
    want = want + linear64(torch.nn.functional.silu(gate) * up, links[2])
    residual = start.clone()
    out = apply_links(links, x, residual)
    assert out is not None and out.dtype == torch.bfloat16 and residual.dtype == stream
    assert (residual - want).norm() / want.norm() < 1e-2
    wanted = linear64(norm64(want, gains[1]), links[3])
    assert (out - wanted).norm() / wanted.norm() < 1e-2
    residual = start.clone()
    assert apply_links(links[:3], x, residual) is None
    assert (residual - want).norm() / want.norm() < 1e-2
