"""RMS normalization of all queries of a token together, and of all its keys, where they lie: families that normalize
whole rows before the heads are told apart.

One program owns one token's queries or its keys, and holds them in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.backends.cuda.kernels.addends import Addends
from penstock.engine.backends.cuda.kernels.common import launch, launch_successor, next_power_of_2, wait_for_inputs
from penstock.engine.backends.interface import HeadLayout, OverRanks


@triton.jit
def _row_norm_kernel(
    qkv_ptr: tl.tensor,
    q_norm_ptr: tl.tensor,
    k_norm_ptr: tl.tensor,
    means_ptr: tl.tensor,
    qkv_stride: tl.tensor,
    eps: tl.tensor,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    MEANS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    is_key = tl.program_id(1) == 1
    cols = tl.arange(0, BLOCK)
    size = tl.where(is_key, KEYS, QUERIES)
    mask = cols < size
    launch_successor(PDL)
    gain = tl.load(q_norm_ptr + cols, mask=mask & (not is_key), other=0.0).to(tl.float32)
    gain += tl.load(k_norm_ptr + cols, mask=mask & is_key, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    at = qkv_ptr + token * qkv_stride + tl.where(is_key, QUERIES, 0) + cols
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if MEANS:
        mean = tl.load(means_ptr + 2 * token + tl.where(is_key, 1, 0))
    else:
        mean = tl.sum(x * x, axis=0) / size
    tl.store(at, (x * tl.rsqrt(mean + eps) * gain).to(qkv_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _row_means_kernel(
    qkv_ptr: tl.tensor,
    means_ptr: tl.tensor,
    qkv_stride: tl.tensor,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    is_key = tl.program_id(1) == 1
    cols = tl.arange(0, BLOCK)
    size = tl.where(is_key, KEYS, QUERIES)
    launch_successor(PDL)
    wait_for_inputs(PDL)
    at = qkv_ptr + token * qkv_stride + tl.where(is_key, QUERIES, 0) + cols
    x = tl.load(at, mask=cols < size, other=0.0).to(tl.float32)
    tl.store(means_ptr + 2 * token + tl.where(is_key, 1, 0), tl.sum(x * x, axis=0) / size)


def norm_rows(
    x: Tensor | Addends,
    layout: HeadLayout,
    q_norm: Tensor,
    k_norm: Tensor,
    eps: float,
    over_ranks: OverRanks | None = None,
    *,
    pdl: bool = False,
) -> Tensor:
    """See `Ops.norm_rows`; `x` is what that calls `qkv`."""
    qkv = x if isinstance(x, Tensor) else x.base + torch.where(x.ranks.unsqueeze(1) > 0, x.delta, 0.0)
    tokens = qkv.shape[0]
    if tokens == 0:
        return qkv
    queries, keys = layout.heads * layout.head_dim, layout.kv_heads * layout.head_dim
    block = next_power_of_2(max(queries, keys))
    means: Tensor | None = None
    if over_ranks is not None:
        means = torch.empty((tokens, 2), dtype=torch.float32, device=qkv.device)
        launch(
            _row_means_kernel,
            (tokens, 2),
            qkv,
            means,
            qkv.stride(0),
            QUERIES=queries,
            KEYS=keys,
            BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
            pdl=pdl,
        )
        means = over_ranks(means)
    launch(
        _row_norm_kernel,
        (tokens, 2),
        qkv,
        q_norm,
        k_norm,
        q_norm if means is None else means,
        qkv.stride(0),
        eps,
        QUERIES=queries,
        KEYS=keys,
        BLOCK=block,
        MEANS=means is not None,
        num_warps=min(16, max(1, block // 512)),
        pdl=pdl,
    )
    return qkv
