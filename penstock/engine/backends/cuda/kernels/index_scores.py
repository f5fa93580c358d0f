"""Scores of cached tokens: the weighted sum over an indexer's heads of what key and query give, where that is positive.

`score_tokens`: every token by itself, its context cut into shares; for decodes, which read each key once.
`score_tiles`: tiles of tokens times tiles of keys, a head at a time; for prompts, whose tokens share keys. Both are
products on tensor cores summed in float32, and write float32 [tokens, width], of which a row is defined as far as its
token sees. Tokens for which nothing has to be scored are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

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
from penstock.engine.backends.interface import AttentionBatch, IndexLayout

_SHARE = 512
"""Keys of a program of `score_tokens`, at least: fewer and its queries would be much of what it reads."""
_WAVES = 4
"""Programs per multiprocessor, about."""


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Shape of a launch of `score_tiles`."""

    tokens: int
    keys: int
    num_warps: int
    num_stages: int


@triton.jit(do_not_specialize=["splits"])
def _token_kernel(
    query_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    seen_ptr: tl.tensor,
    row_ptr: tl.tensor,
    cache_ptr: tl.tensor,
    table_ptr: tl.tensor,
    score_ptr: tl.tensor,
    table_stride: tl.tensor,
    width: tl.tensor,
    splits: tl.tensor,
    scale: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MOST: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    launch_successor(PDL)
    wait_for_inputs(PDL)
    seen = tl.load(seen_ptr + token)
    share = tl.cdiv(tl.cdiv(seen, BLOCK_N), splits) * BLOCK_N
    begin = tl.program_id(1) * share
    end = tl.minimum(begin + share, seen)
    if (seen <= MOST) | (begin >= end):
        return
    h = tl.arange(0, HEAD_BLOCK)
    d = tl.arange(0, DIM_BLOCK)
    q_at = query_ptr + ((token * HEADS + h) * DIM)[:, None] + d[None, :]
    q = tl.load(q_at, mask=(h < HEADS)[:, None] & (d < DIM)[None, :], other=0.0)
    weight = tl.load(weight_ptr + token * HEADS + h, mask=h < HEADS, other=0.0) * scale
    table = table_ptr + tl.load(row_ptr + token).to(tl.int64) * table_stride
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        inside = n < end
        block = tl.load(table + n // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        at = cache_ptr + (block * (BLOCK_SIZE * DIM) + n % BLOCK_SIZE * DIM)[:, None] + d[None, :]
        k = tl.load(at, mask=inside[:, None] & (d < DIM)[None, :], other=0.0)
        made = tl.maximum(tl.dot(q, tl.trans(k), input_precision=PRECISION), 0.0)
        tl.store(score_ptr + token * width + n, tl.sum(made * weight[:, None], axis=0), mask=inside)


@triton.jit(do_not_specialize=["first_token", "tokens"])
def _tile_kernel(
    query_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    seen_ptr: tl.tensor,
    row_ptr: tl.tensor,
    cache_ptr: tl.tensor,
    table_ptr: tl.tensor,
    score_ptr: tl.tensor,
    table_stride: tl.tensor,
    first_token: tl.tensor,
    tokens: tl.tensor,
    width: tl.tensor,
    scale: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MOST: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    t = first_token + tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    first = tl.program_id(0) * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    d = tl.arange(0, DIM_BLOCK)
    launch_successor(PDL)
    wait_for_inputs(PDL)
    seen = tl.load(seen_ptr + t, mask=t < tokens, other=0)
    row = tl.load(row_ptr + t, mask=t < tokens, other=-1)
    wanted = (seen > MOST) & (seen > first)
    q_at = query_ptr + (t.to(tl.int64) * (HEADS * DIM))[:, None] + d[None, :]
    q_mask = wanted[:, None] & (d < DIM)[None, :]
    of = tl.max(tl.where(wanted, row, -1), axis=0)
    while of >= 0:  # one sequence after the other: most often there is one
        mine = wanted & (row == of)
        inside = n < tl.max(tl.where(mine, seen, 0), axis=0)
        table = table_ptr + of.to(tl.int64) * table_stride
        block = tl.load(table + n // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        at = cache_ptr + (block * (BLOCK_SIZE * DIM) + n % BLOCK_SIZE * DIM)[:, None] + d[None, :]
        k = tl.trans(tl.load(at, mask=inside[:, None] & (d < DIM)[None, :], other=0.0))
        acc = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
        for head in range(HEADS):
            q = tl.load(q_at + head * DIM, mask=q_mask, other=0.0)
            weight = tl.load(weight_ptr + t * HEADS + head, mask=wanted, other=0.0) * scale
            made = tl.maximum(tl.dot(q, k, input_precision=PRECISION), 0.0)
            acc += made * weight[:, None]
        to = score_ptr + (t.to(tl.int64) * width)[:, None] + n[None, :]
        tl.store(to, acc, mask=mine[:, None] & (n[None, :] < seen[:, None]))
        of = tl.max(tl.where(wanted & (row < of), row, -1), axis=0)


def choose_tile(element_size: int) -> TileConfig:
    """A program reads all heads of its tokens once per tile of keys, so the tile is wide in keys."""
    if element_size == 4:
        return TileConfig(16, 32, num_warps=4, num_stages=1)
    return TileConfig(64, 256, num_warps=8, num_stages=3)


def score_tokens(
    turned: Tensor,
    weights: Tensor,
    seen: Tensor,
    rows: Tensor,
    layout: IndexLayout,
    batch: AttentionBatch,
    cache: Tensor,
    block_size: int,
    scores: Tensor,
    processors: int,
    *,
    pdl: bool = False,
) -> None:
    """Of tokens given by `index_rows.ask`, into the first rows of `scores` [.., width]."""
    tokens, width = turned.shape[0], scores.shape[1]
    block_n = 32 if turned.element_size() == 4 else 128
    splits = min(ceil_div(width, _SHARE), next_power_of_2(ceil_div(_WAVES * processors, tokens)))
    launch(
        _token_kernel,
        (tokens, splits),
        turned,
        weights,
        seen,
        rows,
        cache,
        batch.block_tables,
        scores,
        batch.block_tables.stride(0),
        width,
        splits,
        _scale(layout),
        HEADS=layout.heads,
        HEAD_BLOCK=max(16, next_power_of_2(layout.heads)),
        DIM=layout.dim,
        DIM_BLOCK=max(16, next_power_of_2(layout.dim)),
        BLOCK_SIZE=block_size,
        BLOCK_N=block_n,
        MOST=layout.most,
        PRECISION=precision(turned),
        num_warps=4,
        num_stages=3 if turned.element_size() == 2 else 1,
        pdl=pdl,
    )


def score_tiles(
    turned: Tensor,
    weights: Tensor,
    seen: Tensor,
    rows: Tensor,
    layout: IndexLayout,
    batch: AttentionBatch,
    cache: Tensor,
    block_size: int,
    scores: Tensor,
    first: int,
    config: TileConfig,
    *,
    pdl: bool = False,
) -> None:
    """The same of those from the `first` on, of which many belong to one sequence."""
    tokens, width = turned.shape[0], scores.shape[1]
    launch(
        _tile_kernel,
        (ceil_div(width, config.keys), ceil_div(tokens - first, config.tokens)),
        turned,
        weights,
        seen,
        rows,
        cache,
        batch.block_tables,
        scores,
        batch.block_tables.stride(0),
        first,
        tokens,
        width,
        _scale(layout),
        HEADS=layout.heads,
        DIM=layout.dim,
        DIM_BLOCK=max(16, next_power_of_2(layout.dim)),
        BLOCK_SIZE=block_size,
        BLOCK_T=config.tokens,
        BLOCK_N=config.keys,
        MOST=layout.most,
        PRECISION=precision(turned),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        pdl=pdl,
    )


def _scale(layout: IndexLayout) -> float:
    """Of heads and of their products; both are positive, so that they may be applied behind the cut at zero."""
    return float((layout.heads * layout.dim) ** -0.5)
