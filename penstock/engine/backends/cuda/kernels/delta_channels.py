"""Delta nets in which every channel of a key has a decay of its own (KDA), prompts in chunks of tokens.

What two tokens of a chunk mean to each other is a sum over channels, each of which has decayed by another amount
between them. As a matrix product this would need factors that overflow where channels decay fast, so each token of a
chunk is compared with those behind it, one after the other (`_chunk_kernel`, all chunks at once). Between chunks there
are matrix products again (`_scan_kernel`): decays to the end of a chunk, or from its beginning, are at most one."""

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
from penstock.engine.backends.cuda.kernels.delta_layout import LEAST_SIDE, head_shape, log_decay
from penstock.engine.backends.cuda.kernels.delta_prompt import DIAGONAL_SIDE, inverted, squarings, unit_rows
from penstock.engine.backends.interface import AttentionBatch, DeltaLayout, DeltaWeights, StateBatch

_CHUNK = 32
"""Tokens: work inside of a chunk grows with its square, and every state passes each chunk."""


@triton.jit(do_not_specialize=["begin"])
def _chunk_kernel(
    mixed_ptr: tl.tensor,
    gates_ptr: tl.tensor,
    decay_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    u_ptr: tl.tensor,
    w_ptr: tl.tensor,
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    whole_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    begin: tl.tensor,
    gates_stride: tl.tensor,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    LOWEST: tl.constexpr,
    CHUNK: tl.constexpr,
    DIAGONAL: tl.constexpr,
    SQUARINGS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """With G_i the sums of a channel's log decays up to token i of the chunk, and sums over channels in brackets:
    A[i, j] = beta_i (k_i . exp(G_i - G_j) k_j) below the diagonal, scores[i, j] = (q_i . exp(G_i - G_j) k_j) up to it.
    Stores u = (I + A)^-1 (beta v), w = (I + A)^-1 (beta exp(G) k), scores, q exp(G), k exp(G_end - G), exp(G_end)."""
    seq = tl.program_id(0)
    head = tl.program_id(2)
    CHANNELS: tl.constexpr = 2 * K_HEADS * K_DIM + V_HEADS * V_DIM
    RATIO: tl.constexpr = V_HEADS // K_HEADS
    launch_successor(PDL)
    wait_for_inputs(PDL)
    first = tl.load(starts_ptr + begin + seq) + tl.program_id(1) * CHUNK
    end = tl.load(starts_ptr + begin + seq + 1)
    if first < end:
        rows = tl.arange(0, CHUNK)
        tokens = first + rows
        valid = tokens < end
        ks = tl.arange(0, BLOCK_K)
        vs = tl.arange(0, BLOCK_V)
        k_mask = ks < K_DIM
        tile = valid[:, None] & k_mask[None, :]
        local = (tokens - begin).to(tl.int64)
        q_at = mixed_ptr + local[:, None] * CHANNELS + ((head // RATIO) * K_DIM + ks)[None, :]
        q = unit_rows(tl.load(q_at, mask=tile, other=0.0).to(tl.float32)) * (K_DIM**-0.5)
        k = unit_rows(tl.load(q_at + K_HEADS * K_DIM, mask=tile, other=0.0).to(tl.float32))
        b = tl.load(gates_ptr + tokens * gates_stride + head, mask=valid, other=0.0).to(tl.float32)
        beta = tl.where(valid, 1.0 / (1.0 + tl.exp(-b)), 0.0)
        a_at = gates_ptr + tokens[:, None] * gates_stride + (V_HEADS + head * K_DIM + ks)[None, :]
        a = tl.load(a_at, mask=tile, other=0.0).to(tl.float32)
        bias = tl.load(bias_ptr + head * K_DIM + ks, mask=k_mask, other=0.0)
        g = tl.where(tile, log_decay(tl.load(decay_ptr + head), a + bias[None, :], LOWEST), 0.0)
        total = tl.cumsum(g, axis=0)
        scaled = k * beta[:, None]
        system = tl.zeros((CHUNK, CHUNK), tl.float32)
        scores = tl.zeros((CHUNK, CHUNK), tl.float32)
        for j in range(CHUNK):
            one = rows == j
            of_one = tl.sum(tl.where(one[:, None], total, 0.0), axis=0)
            key = tl.sum(tl.where(one[:, None], k, 0.0), axis=0)
            # Before that token the difference may be as large as it likes: nothing of it is used.
            late = key[None, :] * tl.exp(tl.minimum(total - of_one[None, :], 0.0))
            system = tl.where(one[None, :], tl.sum(scaled * late, axis=1)[:, None], system)
            scores = tl.where(one[None, :], tl.sum(q * late, axis=1)[:, None], scores)
        system = tl.where(rows[:, None] > rows[None, :], system, 0.0)
        scores = tl.where(rows[:, None] >= rows[None, :], scores, 0.0)
        inverse = inverted(system, rows, CHUNK, DIAGONAL, SQUARINGS, PRECISION)
        grown = tl.exp(total)
        ending = tl.minimum(CHUNK, end - first) - 1
        whole = tl.sum(tl.where((rows == ending)[:, None], total, 0.0), axis=0)
        of_head = local * V_HEADS + head
        k_out = of_head[:, None] * K_DIM + ks[None, :]
        w = tl.dot(inverse, scaled * grown, input_precision=PRECISION)
        tl.store(w_ptr + k_out, w.to(w_ptr.dtype.element_ty), mask=tile)
        tl.store(q_ptr + k_out, (q * grown).to(q_ptr.dtype.element_ty), mask=tile)
        left = k * tl.exp(whole[None, :] - total)
        tl.store(k_ptr + k_out, left.to(k_ptr.dtype.element_ty), mask=tile)
        tl.store(scores_ptr + of_head[:, None] * CHUNK + rows[None, :], scores, mask=valid[:, None])
        # Sequences begin anywhere: counting them too, no two chunks have one number.
        chunk = ((first - begin) // CHUNK + seq).to(tl.int64)
        tl.store(whole_ptr + (chunk * V_HEADS + head) * K_DIM + ks, tl.exp(whole), mask=k_mask)
        v_mask = valid[:, None] & (vs < V_DIM)[None, :]
        v_at = mixed_ptr + local[:, None] * CHANNELS + (2 * K_HEADS * K_DIM + head * V_DIM + vs)[None, :]
        v = tl.load(v_at, mask=v_mask, other=0.0).to(tl.float32)
        u = tl.dot(inverse, v * beta[:, None], input_precision=PRECISION)
        tl.store(u_ptr + of_head[:, None] * V_DIM + vs[None, :], u.to(u_ptr.dtype.element_ty), mask=v_mask)


@triton.jit(do_not_specialize=["begin"])
def _scan_kernel(
    u_ptr: tl.tensor,
    w_ptr: tl.tensor,
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    whole_ptr: tl.tensor,
    state_ptr: tl.tensor,
    out_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    reads_ptr: tl.tensor,
    writes_ptr: tl.tensor,
    begin: tl.tensor,
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
        inside = ks[:, None] * V_DIM + vs[None, :]
        tile = k_mask[:, None] & v_mask[None, :]
        source = state_ptr + (read.to(tl.int64) * V_HEADS + head) * SIZE
        state = tl.load(source + inside, mask=tile & (read > 0), other=0.0)
        for first in range(start, end, CHUNK):
            of_head = (first + rows - begin).to(tl.int64) * V_HEADS + head
            valid = first + rows < end
            k_tile = valid[:, None] & k_mask[None, :]
            v_tile = valid[:, None] & v_mask[None, :]
            k_at = of_head[:, None] * K_DIM + ks[None, :]
            w = tl.load(w_ptr + k_at, mask=k_tile, other=0.0).to(tl.float32)
            q = tl.load(q_ptr + k_at, mask=k_tile, other=0.0).to(tl.float32)
            k = tl.load(k_ptr + k_at, mask=k_tile, other=0.0).to(tl.float32)
            u = tl.load(u_ptr + of_head[:, None] * V_DIM + vs[None, :], mask=v_tile, other=0.0).to(tl.float32)
            scores = tl.load(scores_ptr + of_head[:, None] * CHUNK + rows[None, :], mask=valid[:, None], other=0.0)
            chunk = ((first - begin) // CHUNK + seq).to(tl.int64)
            whole = tl.load(whole_ptr + (chunk * V_HEADS + head) * K_DIM + ks, mask=k_mask, other=0.0)
            values = u - tl.dot(w, state, input_precision=PRECISION)
            o = tl.dot(q, state, input_precision=PRECISION) + tl.dot(scores, values, input_precision=PRECISION)
            out_at = (first + rows).to(tl.int64)[:, None] * V_HEADS + head
            tl.store(out_ptr + out_at * V_DIM + vs[None, :], o, mask=v_tile)
            state = state * whole[:, None] + tl.dot(tl.trans(k), values, input_precision=PRECISION)
        if write > 0:
            tl.store(state_ptr + (write.to(tl.int64) * V_HEADS + head) * SIZE + inside, state, mask=tile)


def channel_prompts(
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
    """See `delta_prompt.prompts`."""
    begin, device, dtype, heads = batch.num_decodes, projected.device, projected.dtype, layout.v_heads
    tokens = projected.shape[0] - begin
    sequences = batch.context_lens.shape[0] - begin
    starts, shape = batch.query_starts, head_shape(layout)
    mixed = convolve(projected, layout, weights.conv, batch, states, conv_cache, decodes=False, pdl=pdl)
    block_k, block_v = (max(LEAST_SIDE, next_power_of_2(dim)) for dim in (layout.k_dim, layout.v_dim))
    precision = "ieee" if dtype == torch.float32 else "tf32"
    u = torch.empty((tokens, heads, layout.v_dim), dtype=dtype, device=device)
    w, q, k = (torch.empty((tokens, heads, layout.k_dim), dtype=dtype, device=device) for _ in range(3))
    scores = torch.empty((tokens, heads, _CHUNK), dtype=torch.float32, device=device)
    whole = torch.empty((ceil_div(tokens, _CHUNK) + sequences, heads, layout.k_dim), dtype=torch.float32, device=device)
    launch(
        _chunk_kernel, (sequences, ceil_div(batch.max_query, _CHUNK), heads),
        mixed, gates, weights.decay, weights.decay_bias, u, w, q, k, scores, whole, starts, begin, gates.stride(0),
        **shape, LOWEST=layout.lowest, CHUNK=_CHUNK, DIAGONAL=DIAGONAL_SIDE,
        SQUARINGS=squarings(_CHUNK // DIAGONAL_SIDE), BLOCK_K=block_k, BLOCK_V=block_v, PRECISION=precision,
        num_warps=8, pdl=pdl,
    )  # fmt: skip
    columns = min(block_v, 32)
    launch(
        _scan_kernel, (sequences, heads, ceil_div(layout.v_dim, columns)),
        u, w, q, k, scores, whole, state_cache, out, starts, states.reads, states.writes, begin,
        V_HEADS=heads, K_DIM=layout.k_dim, V_DIM=layout.v_dim, CHUNK=_CHUNK, BLOCK_K=block_k, BLOCK_V=columns,
        PRECISION=precision, num_warps=8, num_stages=2, pdl=pdl,
    )  # fmt: skip
    keep_inputs(projected, layout, batch, states, conv_cache, sequences, by_token=False, pdl=pdl)
