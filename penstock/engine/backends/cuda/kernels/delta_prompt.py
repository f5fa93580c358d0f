"""Gated delta nets, prompts in chunks of tokens, by matrix products.

The convolution of all tokens; within all chunks at once the triangular system that turns the updates of a chunk into
one (`_system_kernel`); then the chunks of a sequence in order (`_scan_kernel`)."""

from __future__ import annotations

import torch
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
from penstock.engine.backends.cuda.kernels.delta_conv import convolve, keep_inputs
from penstock.engine.backends.cuda.kernels.delta_layout import LEAST_SIDE, columns, head_shape, softplus
from penstock.engine.backends.interface import AttentionBatch, DeltaLayout, DeltaWeights, StateBatch

DIAGONAL_SIDE = 16
"""Side of the blocks that are inverted row by row."""


@triton.jit
def unit_rows(x: tl.tensor) -> tl.tensor:
    return x * tl.rsqrt(tl.sum(x * x, axis=1) + 1e-6)[:, None]


@triton.jit
def inverted(
    system: tl.tensor,
    rows: tl.tensor,
    CHUNK: tl.constexpr,
    DIAGONAL: tl.constexpr,
    SQUARINGS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """(I + system)^-1, where the system is zero on the diagonal and above it; see `squarings`."""
    # Blocks on the diagonal are inverted row by row, all of them at once.
    same = (rows // DIAGONAL)[:, None] == (rows // DIAGONAL)[None, :]
    inverse = tl.where(same, -system, 0.0)
    for i in range(1, DIAGONAL):
        now = (rows % DIAGONAL == i)[:, None] & same
        row = tl.sum(tl.where(now, inverse, 0.0), axis=0)
        row = row + tl.sum(row[:, None] * inverse, axis=0)
        inverse = tl.where(now, row[None, :], inverse)
    identity = tl.where(rows[:, None] == rows[None, :], 1.0, 0.0)
    inverse = inverse + identity
    if CHUNK > DIAGONAL:
        # What is below them: with n = inverse * rest, (1 + n)^-1 = (1 - n)(1 + n^2)(1 + n^4)..., which ends.
        n = tl.dot(inverse, tl.where(same, 0.0, system), input_precision=PRECISION)
        merged = identity - n
        for _ in tl.static_range(SQUARINGS):
            n = tl.dot(n, n, input_precision=PRECISION)
            merged = merged + tl.dot(merged, n, input_precision=PRECISION)
        inverse = tl.dot(merged, inverse, input_precision=PRECISION)
    return inverse


@triton.jit(do_not_specialize=["begin"])
def _system_kernel(
    mixed_ptr: tl.tensor,
    gates_ptr: tl.tensor,
    decay_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    u_ptr: tl.tensor,
    w_ptr: tl.tensor,
    total_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    begin: tl.tensor,
    gates_stride: tl.tensor,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    GROUPED: tl.constexpr,
    CHUNK: tl.constexpr,
    DIAGONAL: tl.constexpr,
    SQUARINGS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """With A[i, j] = beta_i (k_i . k_j) exp(G_i - G_j) below the diagonal, and G the sums of log decays in the chunk:
    u = (I + A)^-1 (beta v), w = (I + A)^-1 (beta exp(G) k)."""
    seq = tl.program_id(0)
    chunk = tl.program_id(1)
    head = tl.program_id(2)
    CHANNELS: tl.constexpr = 2 * K_HEADS * K_DIM + V_HEADS * V_DIM
    RATIO: tl.constexpr = V_HEADS // K_HEADS
    launch_successor(PDL)
    wait_for_inputs(PDL)
    first = tl.load(starts_ptr + begin + seq) + chunk * CHUNK
    end = tl.load(starts_ptr + begin + seq + 1)
    if first < end:
        rows = tl.arange(0, CHUNK)
        tokens = first + rows
        valid = tokens < end
        ks = tl.arange(0, BLOCK_K)
        vs = tl.arange(0, BLOCK_V)
        group = head // RATIO
        local = (tokens - begin).to(tl.int64)
        k_at = mixed_ptr + local[:, None] * CHANNELS + (K_HEADS * K_DIM + group * K_DIM + ks)[None, :]
        k = tl.load(k_at, mask=valid[:, None] & (ks < K_DIM)[None, :], other=0.0).to(tl.float32)
        k = unit_rows(k)
        _, _, _, _, b_col, a_col = columns(head, K_HEADS, V_HEADS, K_DIM, V_DIM, GROUPED)
        b = tl.load(gates_ptr + tokens * gates_stride + b_col, mask=valid, other=0.0).to(tl.float32)
        a = tl.load(gates_ptr + tokens * gates_stride + a_col, mask=valid, other=0.0).to(tl.float32)
        beta = tl.where(valid, 1.0 / (1.0 + tl.exp(-b)), 0.0)
        g = tl.where(valid, tl.load(decay_ptr + head) * softplus(a + tl.load(bias_ptr + head)), 0.0)
        total = tl.cumsum(g, axis=0)
        below = rows[:, None] > rows[None, :]
        # The difference is masked before it is raised: above the diagonal it may be as large as it likes.
        lag = tl.exp(tl.where(below, total[:, None] - total[None, :], 0.0))
        system = tl.dot(k * beta[:, None], tl.trans(k), input_precision=PRECISION) * lag
        system = tl.where(below, system, 0.0)
        inverse = inverted(system, rows, CHUNK, DIAGONAL, SQUARINGS, PRECISION)
        out = tokens.to(tl.int64) - begin
        scaled = k * (beta * tl.exp(total))[:, None]
        w = tl.dot(inverse, scaled, input_precision=PRECISION)
        w_at = w_ptr + (out[:, None] * V_HEADS + head) * K_DIM + ks[None, :]
        tl.store(w_at, w.to(w_ptr.dtype.element_ty), mask=valid[:, None] & (ks < K_DIM)[None, :])
        v_at = mixed_ptr + local[:, None] * CHANNELS + (2 * K_HEADS * K_DIM + head * V_DIM + vs)[None, :]
        v_mask = valid[:, None] & (vs < V_DIM)[None, :]
        v = tl.load(v_at, mask=v_mask, other=0.0).to(tl.float32)
        u = tl.dot(inverse, v * beta[:, None], input_precision=PRECISION)
        u_at = u_ptr + (out[:, None] * V_HEADS + head) * V_DIM + vs[None, :]
        tl.store(u_at, u.to(u_ptr.dtype.element_ty), mask=v_mask)
        tl.store(total_ptr + out * V_HEADS + head, total, mask=valid)


@triton.jit(do_not_specialize=["begin"])
def _scan_kernel(
    mixed_ptr: tl.tensor,
    u_ptr: tl.tensor,
    w_ptr: tl.tensor,
    total_ptr: tl.tensor,
    state_ptr: tl.tensor,
    out_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    reads_ptr: tl.tensor,
    writes_ptr: tl.tensor,
    begin: tl.tensor,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """The chunks of one sequence in order, for some columns of one head's state."""
    seq = tl.program_id(0)
    head = tl.program_id(1)
    CHANNELS: tl.constexpr = 2 * K_HEADS * K_DIM + V_HEADS * V_DIM
    RATIO: tl.constexpr = V_HEADS // K_HEADS
    SIZE: tl.constexpr = K_DIM * V_DIM
    launch_successor(PDL)
    wait_for_inputs(PDL)
    start = tl.load(starts_ptr + begin + seq)
    end = tl.load(starts_ptr + begin + seq + 1)
    if start < end:
        read = tl.load(reads_ptr + start)
        write = tl.load(writes_ptr + end - 1)
        rows = tl.arange(0, CHUNK)
        ks = tl.arange(0, BLOCK_K)
        vs = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
        k_mask, v_mask = ks < K_DIM, vs < V_DIM
        group = head // RATIO
        inside = ks[:, None] * V_DIM + vs[None, :]
        tile = k_mask[:, None] & v_mask[None, :]
        source = state_ptr + (read.to(tl.int64) * V_HEADS + head) * SIZE
        state = tl.load(source + inside, mask=tile & (read > 0), other=0.0)
        seen = rows[:, None] >= rows[None, :]
        for first in range(start, end, CHUNK):
            local = (first + rows - begin).to(tl.int64)
            valid = first + rows < end
            k_tile = valid[:, None] & k_mask[None, :]
            v_tile = valid[:, None] & v_mask[None, :]
            total = tl.load(total_ptr + local * V_HEADS + head, mask=valid, other=0.0)
            ending = tl.minimum(first + CHUNK, end) - 1 - begin
            whole = tl.load(total_ptr + ending.to(tl.int64) * V_HEADS + head)
            q_at = mixed_ptr + local[:, None] * CHANNELS + (group * K_DIM + ks)[None, :]
            q = tl.load(q_at, mask=k_tile, other=0.0).to(tl.float32)
            k = tl.load(q_at + K_HEADS * K_DIM, mask=k_tile, other=0.0).to(tl.float32)
            q = unit_rows(q) * (K_DIM**-0.5)
            k = unit_rows(k)
            w = tl.load(w_ptr + (local[:, None] * V_HEADS + head) * K_DIM + ks[None, :], mask=k_tile, other=0.0)
            u = tl.load(u_ptr + (local[:, None] * V_HEADS + head) * V_DIM + vs[None, :], mask=v_tile, other=0.0)
            values = u.to(tl.float32) - tl.dot(w.to(tl.float32), state, input_precision=PRECISION)
            lag = tl.exp(tl.where(seen, total[:, None] - total[None, :], 0.0))
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * lag
            scores = tl.where(seen, scores, 0.0)
            o = tl.dot(q * tl.exp(total)[:, None], state, input_precision=PRECISION)
            o += tl.dot(scores, values, input_precision=PRECISION)
            tl.store(out_ptr + ((first + rows).to(tl.int64)[:, None] * V_HEADS + head) * V_DIM + vs[None, :], o,
                     mask=v_tile)  # fmt: skip
            late = tl.where(valid, tl.exp(whole - total), 0.0)
            update = tl.dot(tl.trans(k * late[:, None]), values, input_precision=PRECISION)
            state = state * tl.exp(whole) + update
        if write > 0:
            tl.store(state_ptr + (write.to(tl.int64) * V_HEADS + head) * SIZE + inside, state, mask=tile)


def squarings(blocks: int) -> int:
    """Squarings until a matrix of so many blocks, all below the diagonal, is zero."""
    return max(0, (blocks - 1).bit_length() - 1)


def prompts(
    projected: Tensor,
    gates: Tensor,
    layout: DeltaLayout,
    weights: DeltaWeights,
    batch: AttentionBatch,
    states: StateBatch,
    conv_cache: Tensor,
    state_cache: Tensor,
    out: Tensor,
    *,
    pdl: bool,
) -> None:
    """Chunks of prompts, which come behind the decodes; float32 before the norm into `out`."""
    begin, device, dtype = batch.num_decodes, projected.device, projected.dtype
    tokens = projected.shape[0] - begin
    sequences = batch.context_lens.shape[0] - begin
    starts, shape = batch.query_starts, head_shape(layout)
    mixed = convolve(projected, layout, weights.conv, batch, states, conv_cache, decodes=False, pdl=pdl)
    block_k, block_v = (max(LEAST_SIDE, next_power_of_2(dim)) for dim in (layout.k_dim, layout.v_dim))
    exact = dtype == torch.float32
    chunk = 32 if exact or max(block_k, block_v) > 128 else 64
    precision = "ieee" if exact else "tf32"
    u = torch.empty((tokens, layout.v_heads, layout.v_dim), dtype=dtype, device=device)
    w = torch.empty((tokens, layout.v_heads, layout.k_dim), dtype=dtype, device=device)
    total = torch.empty((tokens, layout.v_heads), dtype=torch.float32, device=device)
    launch(
        _system_kernel, (sequences, ceil_div(batch.max_query, chunk), layout.v_heads),
        mixed, gates, weights.decay, weights.decay_bias, u, w, total, starts, begin, gates.stride(0),
        **shape, GROUPED=layout.grouped, CHUNK=chunk, DIAGONAL=DIAGONAL_SIDE,
        SQUARINGS=squarings(chunk // DIAGONAL_SIDE), BLOCK_K=block_k, BLOCK_V=block_v,
        PRECISION=precision, num_warps=8, pdl=pdl,
    )  # fmt: skip
    columns = min(block_v, 32)
    launch(
        _scan_kernel, (sequences, layout.v_heads, ceil_div(layout.v_dim, columns)),
        mixed, u, w, total, state_cache, out, starts, states.reads, states.writes, begin,
        **shape, CHUNK=chunk, BLOCK_K=block_k, BLOCK_V=columns, PRECISION=precision, num_warps=8,
        num_stages=2, pdl=pdl,
    )  # fmt: skip
    keep_inputs(projected, layout, batch, states, conv_cache, sequences, by_token=False, pdl=pdl)
