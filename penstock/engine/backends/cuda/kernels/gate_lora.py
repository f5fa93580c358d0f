"""The gate of a feed-forward whose adapters are multiplied by B in the same launch; a trial (`trials`).

What adapters add to gate and up is wider than anything else of a layer. Made here, where it is used, it is neither
written nor read again, and one launch is gone. Programs go over the tiles of tokens that share a slot, as those of
`tiled_lora` do, so B is read once for a tile; behind them come programs for the tokens that no adapter touches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.backends.cuda.kernels.activation import gate_options, gated
from penstock.engine.backends.cuda.kernels.common import ceil_div, launch
from penstock.engine.backends.cuda.kernels.tiled_lora import rank_and_parts, up_product
from penstock.engine.backends.interface import Activation

_COLUMNS = 128
"""Of the gate, and as many of up, in one program."""


@dataclass(frozen=True, slots=True)
class UngatedSums:
    """Gate and up of a linear [T, 2 * ffn], and its adapters' products with A."""

    base: Tensor
    sums: Tensor
    """float32 [shares, entries, 2 * rank], as `shrink_kernel` leaves them."""
    bank: Tensor
    tile_slots: Tensor
    tile_ranks: Tensor
    tile_tokens: Tensor
    """Of the step's tiles; see `tiles_kernel`."""
    token_ranks: Tensor
    """int32 [T]"""
    start: int
    """Where the linear's matrices begin in a slot, divided by the rank."""
    inputs: int
    rank: int
    tiles: int
    block: int
    precision: str


@triton.jit(do_not_specialize=["entries", "tiles", "tokens"])
def _gate_lora_kernel(
    gate_up_ptr: tl.tensor,
    out_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    bank_ptr: tl.tensor,
    tile_slots_ptr: tl.tensor,
    tile_ranks_ptr: tl.tensor,
    tile_tokens_ptr: tl.tensor,
    token_ranks_ptr: tl.tensor,
    stride: tl.tensor,
    slot_stride: tl.tensor,
    start: tl.tensor,
    entries: tl.tensor,
    tiles: tl.tensor,
    tokens: tl.tensor,
    K: tl.constexpr,
    FFN: tl.constexpr,
    R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    GATE: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """`PDL` is always false: it lies where streams meet."""
    tile = tl.program_id(0)
    low = tl.program_id(1) * BLOCK_N
    m = tl.arange(0, BLOCK_M)
    n = low + tl.arange(0, BLOCK_N)
    gate_delta = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up_delta = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if tile < tiles:
        entry = tile * BLOCK_M + m
        slot = tl.load(tile_slots_ptr + tile)
        rank, touched = rank_and_parts(tile_ranks_ptr, tile)
        row = tl.load(tile_tokens_ptr + entry)
        present = (row >= 0) & (rank > 0)
        if rank > 0:
            b_ptr = bank_ptr + slot.to(tl.int64) * slot_stride + rank.to(tl.int64) * (start + 2 * K)
            if (touched & 1) != 0:
                gate_delta = up_product(
                    gate_delta, sums_ptr, b_ptr, entry, present, entries, rank, n, n < FFN, 0, 2, R, SPLITS, PRECISION
                )
            if (touched & 2) != 0:
                up_delta = up_product(
                    up_delta, sums_ptr, b_ptr, entry, present, entries, rank, FFN + n, n < FFN, 1, 2, R, SPLITS,
                    PRECISION,
                )  # fmt: skip
    else:
        row = (tile - tiles) * BLOCK_M + m
        present = (row < tokens) & (tl.load(token_ranks_ptr + row, mask=row < tokens, other=1) == 0)
    row = row.to(tl.int64)
    mask = present[:, None] & (n < FFN)[None, :]
    at = gate_up_ptr + row[:, None] * stride + n[None, :]
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32) + gate_delta
    up = tl.load(at + FFN, mask=mask, other=0.0).to(tl.float32) + up_delta
    y = gated(x, up, GATE, ALPHA, LIMIT)
    tl.store(out_ptr + row[:, None] * FFN + n[None, :], y.to(out_ptr.dtype.element_ty), mask=mask)


def gate_mul(x: UngatedSums, activation: Activation, *, pdl: bool = False) -> Tensor:
    """[T, ffn]: the gate of `x.base` plus what adapters add."""
    tokens, ffn = x.base.shape[0], x.base.shape[1] // 2
    out = torch.empty((tokens, ffn), dtype=x.base.dtype, device=x.base.device)
    splits, entries = x.sums.shape[:2]
    launch(
        _gate_lora_kernel,
        (x.tiles + ceil_div(tokens, x.block), ceil_div(ffn, _COLUMNS)),
        x.base,
        out,
        x.sums,
        x.bank,
        x.tile_slots,
        x.tile_ranks,
        x.tile_tokens,
        x.token_ranks,
        x.base.stride(0),
        x.bank.stride(0),
        x.start,
        entries,
        x.tiles,
        tokens,
        K=x.inputs,
        FFN=ffn,
        R=x.rank,
        BLOCK_M=x.block,
        BLOCK_N=_COLUMNS,
        SPLITS=splits,
        PRECISION=x.precision,
        **gate_options(activation),
        num_warps=4,
        num_stages=2,
        pdl=pdl,
        in_order=True,
    )
    return out
