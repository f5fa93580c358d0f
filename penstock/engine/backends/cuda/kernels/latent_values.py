"""What heads saw of latents, taken out of the latents' space by each head's value matrix."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.backends.cuda.kernels.common import (
    ceil_div,
    launch,
    launch_successor,
    next_power_of_2,
    wait_for_inputs,
)
from penstock.engine.backends.cuda.kernels.latent_tile import precision
from penstock.engine.backends.interface import LatentLayout, LatentWeights


@triton.jit(do_not_specialize=["tokens", "tiles"])
def _values_kernel(
    seen_ptr: tl.tensor,
    up_ptr: tl.tensor,
    out_ptr: tl.tensor,
    tokens: tl.tensor,
    tiles: tl.tensor,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    PLAIN: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    t = tl.program_id(0) % tiles * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(0) // tiles
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    k = tl.arange(0, BLOCK_K)
    launch_successor(PDL)
    wait_for_inputs(PDL)
    row = t.to(tl.int64) * HEADS + head
    x_at = seen_ptr + (row * LATENT)[:, None] + k[None, :]
    w_at = up_ptr + ((head.to(tl.int64) * (PLAIN + VALUE) + PLAIN + v) * LATENT)[:, None] + k[None, :]
    in_t, in_v = (t < tokens)[:, None], (v < VALUE)[:, None]
    acc = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)
    for start in range(0, LATENT, BLOCK_K):
        in_k = (start + k < LATENT)[None, :]
        x = tl.load(x_at + start, mask=in_t & in_k, other=0.0)
        w = tl.load(w_at + start, mask=in_v & in_k, other=0.0)
        acc = tl.dot(x, tl.trans(w), acc, input_precision=PRECISION)
    to = out_ptr + (row * VALUE)[:, None] + v[None, :]
    tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=in_t & (v < VALUE)[None, :])


def values_of(
    seen: Tensor, layout: LatentLayout, weights: LatentWeights, out: Tensor, *, fixed: bool = False, pdl: bool = False
) -> None:
    """Every head's sums of latents [T, heads, latent] times its value matrix, into `out` [T, heads * value]. `fixed`:
    sums of a token do not depend on how many there are."""
    tokens = seen.shape[0]
    block_t = 16 if tokens <= 16 or fixed else 32 if tokens <= 256 else 64
    block_v = max(16, min(64, next_power_of_2(layout.value)))
    tiles = ceil_div(tokens, block_t)
    launch(
        _values_kernel,
        (tiles * layout.heads, ceil_div(layout.value, block_v)),
        seen,
        weights.up,
        out,
        tokens,
        tiles,
        HEADS=layout.heads,
        LATENT=layout.latent,
        PLAIN=layout.plain,
        VALUE=layout.value,
        BLOCK_T=block_t,
        BLOCK_V=block_v,
        BLOCK_K=max(16, min(32 if seen.element_size() == 4 else 128, next_power_of_2(layout.latent))),
        PRECISION=precision(seen),
        num_warps=4,
        num_stages=3,
        pdl=pdl,
    )
