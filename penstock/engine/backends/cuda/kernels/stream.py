"""FP8 products of a medium number of tokens with few outputs and many inputs, y = x W^T, as in the last matrix of a
feed-forward.

The vendor's product has one program for 128 outputs, which leaves most multiprocessors idle there. Here the weights are
cut into units, a tile of outputs times a slice of inputs, and every program takes as many successive ones as any other,
so that all multiprocessors read to the end. A tile that several programs share is added up by the last of them to
finish, in the order of the programs: the same bits in every run. Weight rows are the tall side of the product and
tokens the narrow one. Before a program waits for its inputs it asks for its first weights, which are then in the L2
cache. With more outputs, or fewer inputs, adding up costs more than it gains (measured on an H200).

Invariant: a matrix's counters are all zero between launches. One stream at a time may use them.
"""

from __future__ import annotations

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

MOST_TOKENS = 64
_LEAST_INPUTS = 8192
_BLOCK_N, _BLOCK_K = 64, 128
"""Outputs and inputs of a unit."""
_AHEAD = 8
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
) -> None:
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    b = tl.arange(0, BATCH)
    in_n, in_b = n < N, b < batch
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
    PDL: tl.constexpr,
) -> None:
    CHUNKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    UNITS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N * CHUNKS
    program = tl.program_id(0)
    begin = program * UNITS // PROGRAMS
    end = (program + 1) * UNITS // PROGRAMS
    launch_successor(PDL)
    if PDL:
        row = begin // CHUNKS * BLOCK_N + tl.arange(0, BLOCK_N)
        first = tl.minimum(begin % CHUNKS * BLOCK_K, max(0, K - AHEAD * BLOCK_K))
        ask_for(weight_ptr + tl.minimum(row, N - 1).to(tl.int64) * K + first, min(AHEAD * BLOCK_K, K), PDL)
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
                acc, tile, batch, out_ptr, bias_ptr, weight_scale_ptr, x_scale_ptr, N, BATCH, BLOCK_N, BIAS
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
                    total, tile, batch, out_ptr, bias_ptr, weight_scale_ptr, x_scale_ptr, N, BATCH, BLOCK_N, BIAS
                )  # fmt: skip


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def counters_for(weight: Tensor) -> Tensor | None:
    """Zeros for the launches of a matrix, if they are faster than the vendor's product: where that has programs for
    less than half of the multiprocessors, and a program many inputs."""
    return make_counters(weight) if _suits(weight) else None


def make_counters(weight: Tensor) -> Tensor:
    """One for each tile of outputs."""
    return torch.zeros(ceil_div(weight.shape[0], _BLOCK_N), dtype=torch.int32, device=weight.device)


def _suits(weight: Tensor) -> bool:
    """Hopper only: tensor cores and copies of its kind."""
    outputs, inputs = weight.shape
    return (
        weight.dtype == torch.float8_e4m3fn
        and inputs >= _LEAST_INPUTS
        and 2 * ceil_div(outputs, 128) <= _processors(weight.device)
        and _is_hopper(weight.device)
    )


@cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def linear(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    counters: Tensor,
    bias: Tensor | None = None,
    *,
    pdl: bool = False,
) -> Tensor:
    """`x` [B, K] times the transpose of `weight` [N, K], both e4m3, with scales [B, 1] and [N], in bfloat16. K is a
    multiple of 16, and B at most `MOST_TOKENS`."""
    batch, k = x.shape
    n = weight.shape[0]
    wide = max(16, next_power_of_2(batch))
    programs = min(2 * _processors(x.device), ceil_div(n, _BLOCK_N) * ceil_div(k, _BLOCK_K))
    out = torch.empty((batch, n), dtype=torch.bfloat16, device=x.device)
    partial = torch.empty((2 * programs, _BLOCK_N, wide), dtype=torch.float32, device=x.device)
    launch(
        _stream_kernel,
        (programs,),
        TensorDescriptor.from_tensor(weight, [_BLOCK_N, _BLOCK_K]),
        TensorDescriptor.from_tensor(x, [wide, _BLOCK_K]),
        weight,
        out,
        out if bias is None else bias,
        weight_scale,
        x_scale,
        partial,
        counters,
        batch,
        N=n,
        K=k,
        BATCH=wide,
        BLOCK_N=_BLOCK_N,
        BLOCK_K=_BLOCK_K,
        PROGRAMS=programs,
        AHEAD=_AHEAD,
        BIAS=bias is not None,
        num_warps=4,
        num_stages=6,
        pdl=pdl,
    )
    return out
