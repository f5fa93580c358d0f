"""Products of a medium number of tokens, y = x W^T: bound by reading the weights once, on tensor cores (Hopper).

The weights are cut into units, a tile of outputs times a slice of inputs, and every program takes as many successive
ones as any other, so that all multiprocessors read to the end. A tile that several programs share is added up by the
last of them to finish, in the order of the programs: the same bits in every run. Weight rows are the tall side of the
product and tokens the narrow one. Before a program waits for its inputs it asks for its first weights, which are then
in the L2 cache.

Invariant: the counters are all zero between launches. One stream at a time may use them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from penstock.engine.backends.cuda.kernels.common import (
    ask_for,
    ceil_div,
    launch,
    launch_successor,
    next_power_of_2,
    wait_for_inputs,
)


@dataclass(frozen=True, slots=True)
class StreamConfig:
    """Shape of the launch: outputs and bytes of inputs per unit, programs per multiprocessor."""

    block_n: int
    block_bytes: int
    per_processor: int
    num_warps: int
    num_stages: int
    ahead: int
    """Units that are asked for before the inputs are there."""


@triton.jit
def _owner(unit: tl.tensor, PROGRAMS: tl.constexpr, UNITS: tl.constexpr) -> tl.tensor:
    return ((unit + 1) * PROGRAMS - 1) // UNITS


@triton.jit
def _finish(
    acc: tl.tensor,
    tile: tl.tensor,
    batch: tl.tensor,
    out_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    weight_scale_ptr: tl.tensor,
    x_scale_ptr: tl.tensor,
    N: tl.constexpr,
    BATCH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BIAS: tl.constexpr,
    SCALED: tl.constexpr,
) -> None:
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    b = tl.arange(0, BATCH)
    in_n, in_b = n < N, b < batch
    if SCALED:
        acc *= tl.load(weight_scale_ptr + n, mask=in_n, other=0.0)[:, None]
        acc *= tl.load(x_scale_ptr + b, mask=in_b, other=0.0)[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=in_n, other=0.0).to(tl.float32)[:, None]
    mask = in_n[:, None] & in_b[None, :]
    tl.store(out_ptr + b[None, :] * N + n[:, None], acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["batch"])
def _stream_kernel(
    weights: tl.tensor,
    inputs: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    weight_scale_ptr: tl.tensor,
    x_scale_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    counter_ptr: tl.tensor,
    batch: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    BATCH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PROGRAMS: tl.constexpr,
    AHEAD: tl.constexpr,
    BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    CHUNKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    UNITS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N * CHUNKS
    program = tl.program_id(0)
    begin = program * UNITS // PROGRAMS
    end = (program + 1) * UNITS // PROGRAMS
    launch_successor(PDL)
    if PDL and AHEAD > 0:
        row = begin // CHUNKS * BLOCK_N + tl.arange(0, BLOCK_N)
        first = tl.minimum(begin % CHUNKS * BLOCK_K, max(0, K - AHEAD * BLOCK_K))
        at = weight_ptr + tl.minimum(row, N - 1).to(tl.int64) * K + first
        ask_for(at, min(AHEAD * BLOCK_K, K) * weight_ptr.dtype.element_ty.primitive_bitwidth // 8, PDL)
    wait_for_inputs(PDL)
    inside = tl.arange(0, BLOCK_N)[:, None] * BATCH + tl.arange(0, BATCH)[None, :]
    present = (tl.arange(0, BATCH) < batch)[None, :] & (tl.arange(0, BLOCK_N) >= 0)[:, None]
    for tile in range(begin // CHUNKS, (end - 1) // CHUNKS + 1):
        low = tile * CHUNKS
        from_chunk = tl.maximum(begin - low, 0)
        to_chunk = tl.minimum(end - low, CHUNKS)
        acc = tl.zeros([BLOCK_N, BATCH], tl.float32)
        for chunk in range(from_chunk, to_chunk):
            w = weights.load([tile * BLOCK_N, chunk * BLOCK_K])
            x = inputs.load([0, chunk * BLOCK_K])
            acc = tl.dot(w, x.T, acc)
        if to_chunk - from_chunk == CHUNKS:
            _finish(
                acc, tile, batch, out_ptr, bias_ptr, weight_scale_ptr, x_scale_ptr,
                N, BATCH, BLOCK_N, BIAS, SCALED,
            )  # fmt: skip
        else:
            # The first program of a tile leaves its sums in its second place, all others in their first.
            leader = _owner(low, PROGRAMS, UNITS)
            last = _owner(low + CHUNKS - 1, PROGRAMS, UNITS)
            place = 2 * program + (program == leader).to(tl.int32)
            tl.store(partial_ptr + place.to(tl.int64) * (BLOCK_N * BATCH) + inside, acc, mask=present)
            # All threads' stores happen before the barrier, and thread 0's release makes them visible to the chip.
            tl.debug_barrier()
            arrived = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel", scope="gpu")
            if arrived == last - leader:
                tl.store(counter_ptr + tile, 0)
                total = tl.zeros([BLOCK_N, BATCH], tl.float32)
                for other in range(leader, last + 1):
                    theirs = 2 * other + (other == leader).to(tl.int32)
                    part = partial_ptr + theirs.to(tl.int64) * (BLOCK_N * BATCH) + inside
                    total += tl.load(part, mask=present, other=0.0, cache_modifier=".cg")
                _finish(
                    total, tile, batch, out_ptr, bias_ptr, weight_scale_ptr, x_scale_ptr,
                    N, BATCH, BLOCK_N, BIAS, SCALED,
                )  # fmt: skip


MOST = 128
"""Tokens."""
_SHARED = 220_000
"""Bytes of shared memory for weights and inputs on their way."""


def choose(batch: int) -> StreamConfig:
    """Launch shape (measured on an H200)."""
    wide = max(16, next_power_of_2(batch))
    if wide <= 64:
        return StreamConfig(128, 128, 2, 8, 4, 4)
    return StreamConfig(128, 128, 1, 8, min(8, _SHARED // (128 * (128 + wide))), 8)


@cache
def _counters(device: torch.device) -> Tensor:
    """Kept for good: captured graphs hold their address."""
    return torch.zeros(65536, dtype=torch.int32, device=device)


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def linear(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    weight_scale: Tensor | None = None,
    x_scale: Tensor | None = None,
    config: StreamConfig | None = None,
    processors: int | None = None,
    pdl: bool = False,
) -> Tensor:
    """`x` [B, K] times the transpose of `weight` [N, K], both of 16 bits, or both e4m3 with `weight_scale` [N] and
    `x_scale` [B, 1]; then bfloat16. Rows are multiples of 16 bytes, and B is at most `MOST`."""
    batch, k = x.shape
    n = weight.shape[0]
    wide = max(16, next_power_of_2(batch))
    config, processors = config or choose(batch), processors or _processors(x.device)
    block_k = config.block_bytes // weight.element_size()
    programs = min(processors * config.per_processor, ceil_div(n, config.block_n) * ceil_div(k, block_k))
    out = torch.empty((batch, n), dtype=torch.bfloat16 if weight_scale is not None else x.dtype, device=x.device)
    partial = torch.empty((2 * programs, config.block_n, wide), dtype=torch.float32, device=x.device)
    launch(
        _stream_kernel,
        (programs,),
        TensorDescriptor.from_tensor(weight, [config.block_n, block_k]),
        TensorDescriptor.from_tensor(x, [wide, block_k]),
        weight,
        out,
        out if bias is None else bias,
        partial if weight_scale is None else weight_scale,
        partial if x_scale is None else x_scale,
        partial,
        _counters(x.device),
        batch,
        N=n,
        K=k,
        BATCH=wide,
        BLOCK_N=config.block_n,
        BLOCK_K=block_k,
        PROGRAMS=programs,
        AHEAD=config.ahead,
        BIAS=bias is not None,
        SCALED=weight_scale is not None,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=min(255, 65536 // (32 * config.num_warps * config.per_processor)),
        pdl=pdl,
    )
    return out
