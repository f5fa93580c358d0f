"""Gated delta nets (`Ops.delta_net`).

Decodes: one launch for convolution, update and read-out of the state; with many sequences also the gated norm, with few
the columns of a state are split between programs and the norm is a launch of its own. A program goes through the tokens
of a run one after the other, so draft tokens are computed as they would be without speculation.

Prompts, in chunks of tokens: the convolution of all tokens; within all chunks at once the triangular system that turns
the updates of a chunk into one (`_system_kernel`); then the chunks of a sequence in order, all by matrix products
(`_scan_kernel`).
"""

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
from penstock.engine.backends.interface import AttentionBatch, DeltaLayout, DeltaWeights, StateBatch

_LEAST = 16
"""Smallest side of a matrix product."""
_DIAGONAL = 16
"""Side of the blocks that are inverted row by row."""


@triton.jit
def _columns(
    head: tl.tensor,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    GROUPED: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """First columns of a value head's query, key, value and output gate in a row of projections, and of its update rate
    and decay in a row of gates."""
    RATIO: tl.constexpr = V_HEADS // K_HEADS
    group = head // RATIO
    inner = head % RATIO
    if GROUPED:
        q = group * (2 * K_DIM + 2 * RATIO * V_DIM)
        k = q + K_DIM
        v = q + 2 * K_DIM + inner * V_DIM
        z = v + RATIO * V_DIM
        b = group * 2 * RATIO + inner
        a = b + RATIO
    else:
        q = group * K_DIM
        k = K_HEADS * K_DIM + group * K_DIM
        v = 2 * K_HEADS * K_DIM + head * V_DIM
        z = v + V_HEADS * V_DIM
        b = head
        a = head + V_HEADS
    return q, k, v, z, b, a


@triton.jit
def _column_of(
    channel: tl.tensor,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    GROUPED: tl.constexpr,
) -> tl.tensor:
    """Where a channel of the convolution stands in a row of projections."""
    if not GROUPED:
        return channel
    RATIO: tl.constexpr = V_HEADS // K_HEADS
    KEYS: tl.constexpr = K_HEADS * K_DIM
    WIDTH: tl.constexpr = 2 * K_DIM + 2 * RATIO * V_DIM
    of_value = channel - 2 * KEYS
    inside = channel % KEYS
    key = (inside // K_DIM) * WIDTH + (channel // KEYS) * K_DIM + inside % K_DIM
    value = (of_value // (RATIO * V_DIM)) * WIDTH + 2 * K_DIM + of_value % (RATIO * V_DIM)
    return tl.where(channel < 2 * KEYS, key, value)


@triton.jit
def _input(
    x_ptr: tl.tensor,
    ring_ptr: tl.tensor,
    column: tl.tensor,
    channel: tl.tensor,
    mask: tl.tensor,
    token: tl.tensor,
    first: tl.tensor,
    position: tl.tensor,
    read: tl.tensor,
    back: tl.tensor,
    x_stride: tl.tensor,
    CHANNELS: tl.constexpr,
    CONV: tl.constexpr,
) -> tl.tensor:
    """The convolution's input `back` tokens before `token`: of its run, or kept with the state before it."""
    inside = token - back >= first
    here = tl.load(x_ptr + (token - back) * x_stride + column, mask=mask & inside, other=0.0).to(tl.float32)
    known = (read > 0) & (position >= back) & (inside == 0)
    place = (position + CONV - back) % CONV
    kept = ring_ptr + (read.to(tl.int64) * CONV + place) * CHANNELS + channel
    return here + tl.load(kept, mask=mask & known, other=0.0).to(tl.float32)


@triton.jit
def _convolved(
    x_ptr: tl.tensor,
    ring_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    column: tl.tensor,
    channel: tl.tensor,
    mask: tl.tensor,
    token: tl.tensor,
    first: tl.tensor,
    position: tl.tensor,
    read: tl.tensor,
    x_stride: tl.tensor,
    CHANNELS: tl.constexpr,
    CONV: tl.constexpr,
) -> tl.tensor:
    """Convolution and silu of one token's channels."""
    total = tl.zeros(channel.shape, tl.float32)
    for back in tl.static_range(CONV):
        weight = tl.load(weight_ptr + channel * CONV + (CONV - 1 - back), mask=mask, other=0.0)
        x = _input(x_ptr, ring_ptr, column, channel, mask, token, first, position, read, back, x_stride, CHANNELS, CONV)
        total += weight * x
    return total / (1.0 + tl.exp(-total))


@triton.jit
def _keep(
    x_ptr: tl.tensor,
    ring_ptr: tl.tensor,
    column: tl.tensor,
    channel: tl.tensor,
    mask: tl.tensor,
    token: tl.tensor,
    first: tl.tensor,
    position: tl.tensor,
    read: tl.tensor,
    write: tl.tensor,
    x_stride: tl.tensor,
    CHANNELS: tl.constexpr,
    CONV: tl.constexpr,
) -> None:
    """Keep the inputs that the tokens behind `token` need."""
    for back in tl.static_range(CONV - 1):
        x = _input(x_ptr, ring_ptr, column, channel, mask, token, first, position, read, back, x_stride, CHANNELS, CONV)
        place = (position + CONV - back) % CONV
        at = ring_ptr + (write.to(tl.int64) * CONV + place) * CHANNELS + channel
        tl.store(at, x.to(ring_ptr.dtype.element_ty), mask=mask & (position >= back))


@triton.jit
def _softplus(x: tl.tensor) -> tl.tensor:
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(x)))


@triton.jit
def _gated_norm(o: tl.tensor, z: tl.tensor, norm: tl.tensor, V_DIM: tl.constexpr, eps: tl.tensor) -> tl.tensor:
    """RMS norm over the last axis, times silu of the gate."""
    normed = o * tl.rsqrt(tl.sum(o * o, axis=0) / V_DIM + eps) * norm
    return normed * z / (1.0 + tl.exp(-z))


@triton.jit
def _decode_kernel(
    x_ptr: tl.tensor,
    gates_ptr: tl.tensor,
    ring_ptr: tl.tensor,
    state_ptr: tl.tensor,
    conv_ptr: tl.tensor,
    decay_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    out_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    first_ptr: tl.tensor,
    last_ptr: tl.tensor,
    reads_ptr: tl.tensor,
    writes_ptr: tl.tensor,
    x_stride: tl.tensor,
    gates_stride: tl.tensor,
    eps: tl.tensor,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    CONV: tl.constexpr,
    GROUPED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    token0 = tl.program_id(0)
    head = tl.program_id(1)
    part = tl.program_id(2)
    CHANNELS: tl.constexpr = 2 * K_HEADS * K_DIM + V_HEADS * V_DIM
    RATIO: tl.constexpr = V_HEADS // K_HEADS
    launch_successor(PDL)
    decay = tl.load(decay_ptr + head)
    bias = tl.load(bias_ptr + head)
    wait_for_inputs(PDL)
    last = tl.load(last_ptr + token0)
    vs = part * BLOCK_V + tl.arange(0, BLOCK_V)
    v_mask = vs < V_DIM
    if last < token0:  # padding
        nothing = tl.zeros((BLOCK_V,), out_ptr.dtype.element_ty)
        tl.store(out_ptr + (token0 * V_HEADS + head) * V_DIM + vs, nothing, mask=v_mask)
    if tl.load(first_ptr + token0) == token0:
        read = tl.load(reads_ptr + token0)
        ks = tl.arange(0, BLOCK_K)
        k_mask = ks < K_DIM
        q_col, k_col, v_col, z_col, b_col, a_col = _columns(head, K_HEADS, V_HEADS, K_DIM, V_DIM, GROUPED)
        group = head // RATIO
        q_chan = group * K_DIM + ks
        k_chan = K_HEADS * K_DIM + group * K_DIM + ks
        v_chan = 2 * K_HEADS * K_DIM + head * V_DIM + vs
        inside = ks[:, None] * V_DIM + vs[None, :]
        tile = k_mask[:, None] & v_mask[None, :]
        SIZE: tl.constexpr = K_DIM * V_DIM
        source = state_ptr + (read.to(tl.int64) * V_HEADS + head) * SIZE
        state = tl.load(source + inside, mask=tile & (read > 0), other=0.0)
        for token in range(token0, last + 1):
            position = tl.load(positions_ptr + token)
            write = tl.load(writes_ptr + token)
            q = _convolved(x_ptr, ring_ptr, conv_ptr, q_col + ks, q_chan, k_mask, token, token0, position, read,
                           x_stride, CHANNELS, CONV)  # fmt: skip
            k = _convolved(x_ptr, ring_ptr, conv_ptr, k_col + ks, k_chan, k_mask, token, token0, position, read,
                           x_stride, CHANNELS, CONV)  # fmt: skip
            v = _convolved(x_ptr, ring_ptr, conv_ptr, v_col + vs, v_chan, v_mask, token, token0, position, read,
                           x_stride, CHANNELS, CONV)  # fmt: skip
            q = q * (tl.rsqrt(tl.sum(q * q, axis=0) + 1e-6) * (K_DIM**-0.5))
            k = k * tl.rsqrt(tl.sum(k * k, axis=0) + 1e-6)
            b = tl.load(gates_ptr + token * gates_stride + b_col).to(tl.float32)
            a = tl.load(gates_ptr + token * gates_stride + a_col).to(tl.float32)
            state = state * tl.exp(decay * _softplus(a + bias))
            change = (v - tl.sum(state * k[:, None], axis=0)) / (1.0 + tl.exp(-b))
            state = state + k[:, None] * change[None, :]
            o = tl.sum(state * q[:, None], axis=0)
            if NORM:
                z = tl.load(x_ptr + token * x_stride + z_col + vs, mask=v_mask, other=0.0).to(tl.float32)
                norm = tl.load(norm_ptr + vs, mask=v_mask, other=0.0)
                o = _gated_norm(o, z, norm, V_DIM, eps)
            out = out_ptr + (token * V_HEADS + head) * V_DIM + vs
            tl.store(out, o.to(out_ptr.dtype.element_ty), mask=v_mask)
            if write > 0:
                target = state_ptr + (write.to(tl.int64) * V_HEADS + head) * SIZE
                tl.store(target + inside, state, mask=tile)
                # Behind later tokens of a run that is written where it was read, `_keep_kernel` does it.
                if (token == token0) | (write != read):
                    _keep(x_ptr, ring_ptr, v_col + vs, v_chan, v_mask, token, token0, position, read, write,
                          x_stride, CHANNELS, CONV)  # fmt: skip
                    if (head % RATIO == 0) & (part == 0):
                        _keep(x_ptr, ring_ptr, q_col + ks, q_chan, k_mask, token, token0, position, read, write,
                              x_stride, CHANNELS, CONV)  # fmt: skip
                        _keep(x_ptr, ring_ptr, k_col + ks, k_chan, k_mask, token, token0, position, read, write,
                              x_stride, CHANNELS, CONV)  # fmt: skip


@triton.jit
def _keep_kernel(
    x_ptr: tl.tensor,
    ring_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    first_ptr: tl.tensor,
    last_ptr: tl.tensor,
    reads_ptr: tl.tensor,
    writes_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    x_stride: tl.tensor,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    CONV: tl.constexpr,
    GROUPED: tl.constexpr,
    BLOCK: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """The inputs behind the last token of each run: of the sequences from `starts`, or of each token's run."""
    index = tl.program_id(0)
    CHANNELS: tl.constexpr = 2 * K_HEADS * K_DIM + V_HEADS * V_DIM
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = channel < CHANNELS
    column = _column_of(channel, K_HEADS, V_HEADS, K_DIM, V_DIM, GROUPED)
    launch_successor(PDL)
    wait_for_inputs(PDL)
    if BY_TOKEN:
        token = index
        first = tl.load(first_ptr + token)
        # Single tokens and those in slots of their own are kept where they are computed.
        due = (tl.load(last_ptr + token) == token) & (first < token)
        due = due & (tl.load(writes_ptr + token) == tl.load(reads_ptr + token))
    else:
        first = tl.load(starts_ptr + index)
        token = tl.load(starts_ptr + index + 1) - 1
        due = token >= first
    if due:
        write = tl.load(writes_ptr + token)
        if write > 0:
            position = tl.load(positions_ptr + token)
            read = tl.load(reads_ptr + token)
            _keep(x_ptr, ring_ptr, column, channel, mask, token, first, position, read, write, x_stride, CHANNELS,
                  CONV)  # fmt: skip


@triton.jit
def _conv_kernel(
    x_ptr: tl.tensor,
    ring_ptr: tl.tensor,
    conv_ptr: tl.tensor,
    mixed_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    first_ptr: tl.tensor,
    reads_ptr: tl.tensor,
    begin: tl.tensor,
    x_stride: tl.tensor,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    CONV: tl.constexpr,
    GROUPED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    token = begin + tl.program_id(0)
    CHANNELS: tl.constexpr = 2 * K_HEADS * K_DIM + V_HEADS * V_DIM
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = channel < CHANNELS
    column = _column_of(channel, K_HEADS, V_HEADS, K_DIM, V_DIM, GROUPED)
    launch_successor(PDL)
    wait_for_inputs(PDL)
    first = tl.load(first_ptr + token)
    read = tl.load(reads_ptr + token)
    position = tl.load(positions_ptr + token)
    mixed = _convolved(x_ptr, ring_ptr, conv_ptr, column, channel, mask, token, first, position, read, x_stride,
                       CHANNELS, CONV)  # fmt: skip
    at = mixed_ptr + tl.program_id(0).to(tl.int64) * CHANNELS + channel
    tl.store(at, mixed.to(mixed_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _unit_rows(x: tl.tensor) -> tl.tensor:
    return x * tl.rsqrt(tl.sum(x * x, axis=1) + 1e-6)[:, None]


@triton.jit
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
    first = tl.load(starts_ptr + seq) + chunk * CHUNK
    end = tl.load(starts_ptr + seq + 1)
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
        k = _unit_rows(k)
        _, _, _, _, b_col, a_col = _columns(head, K_HEADS, V_HEADS, K_DIM, V_DIM, GROUPED)
        b = tl.load(gates_ptr + tokens * gates_stride + b_col, mask=valid, other=0.0).to(tl.float32)
        a = tl.load(gates_ptr + tokens * gates_stride + a_col, mask=valid, other=0.0).to(tl.float32)
        beta = tl.where(valid, 1.0 / (1.0 + tl.exp(-b)), 0.0)
        g = tl.where(valid, tl.load(decay_ptr + head) * _softplus(a + tl.load(bias_ptr + head)), 0.0)
        total = tl.cumsum(g, axis=0)
        below = rows[:, None] > rows[None, :]
        # The difference is masked before it is raised: above the diagonal it may be as large as it likes.
        lag = tl.exp(tl.where(below, total[:, None] - total[None, :], 0.0))
        system = tl.dot(k * beta[:, None], tl.trans(k), input_precision=PRECISION) * lag
        system = tl.where(below, system, 0.0)
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


@triton.jit
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
    start = tl.load(starts_ptr + seq)
    end = tl.load(starts_ptr + seq + 1)
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
            q = _unit_rows(q) * (K_DIM**-0.5)
            k = _unit_rows(k)
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


@triton.jit
def _norm_kernel(
    o_ptr: tl.tensor,
    x_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_stride: tl.tensor,
    eps: tl.tensor,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    GROUPED: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    vs = tl.arange(0, BLOCK_V)
    mask = vs < V_DIM
    _, _, _, z_col, _, _ = _columns(head, K_HEADS, V_HEADS, K_DIM, V_DIM, GROUPED)
    norm = tl.load(norm_ptr + vs, mask=mask, other=0.0)
    launch_successor(PDL)
    wait_for_inputs(PDL)
    at = (token * V_HEADS + head) * V_DIM + vs
    o = tl.load(o_ptr + at, mask=mask, other=0.0)
    z = tl.load(x_ptr + token * x_stride + z_col + vs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, _gated_norm(o, z, norm, V_DIM, eps).to(out_ptr.dtype.element_ty), mask=mask)


def _squarings(blocks: int) -> int:
    """Squarings until a matrix of so many blocks, all below the diagonal, is zero."""
    return max(0, (blocks - 1).bit_length() - 1)


def delta_net(
    projected: Tensor,
    gates: Tensor,
    layout: DeltaLayout,
    weights: DeltaWeights,
    batch: AttentionBatch,
    conv_cache: Tensor,
    state_cache: Tensor,
    *,
    processors: int,
    in_place_runs: bool = False,
    pdl: bool = False,
) -> Tensor:
    """`in_place_runs`: whether runs of several single tokens may be written where they were read."""
    states = batch.states
    assert states is not None, "a recurrent layer needs to know where its states are"
    tokens, decodes = projected.shape[0], batch.num_decodes
    shape = {
        "K_HEADS": layout.k_heads,
        "V_HEADS": layout.v_heads,
        "K_DIM": layout.k_dim,
        "V_DIM": layout.v_dim,
    }
    out = torch.empty((tokens, layout.v_heads * layout.v_dim), dtype=projected.dtype, device=projected.device)
    block_v = max(_LEAST, next_power_of_2(layout.v_dim))
    parts = _decode_parts(decodes, layout, block_v, processors)
    fused = parts == 1 and decodes == tokens
    raw = out if fused else torch.empty(out.shape, dtype=torch.float32, device=out.device)
    if decodes:
        launch(
            _decode_kernel, (decodes, layout.v_heads, parts),
            projected, gates, conv_cache, state_cache, weights.conv, weights.decay, weights.decay_bias, weights.norm,
            raw, batch.positions, states.first, states.last, states.reads, states.writes,
            projected.stride(0), gates.stride(0), weights.eps,
            **shape, CONV=layout.conv, GROUPED=layout.grouped, BLOCK_K=max(_LEAST, next_power_of_2(layout.k_dim)),
            BLOCK_V=block_v // parts, NORM=fused, num_warps=_warps(layout.k_dim * block_v // parts), pdl=pdl,
        )  # fmt: skip
        if in_place_runs:
            _keep_inputs(projected, layout, batch, states, conv_cache, shape, decodes, by_token=True, pdl=pdl)
    if tokens > decodes:
        _prompts(projected, gates, layout, weights, batch, states, conv_cache, state_cache, raw, shape, pdl=pdl)
    if not fused:
        launch(
            _norm_kernel, (tokens, layout.v_heads), raw, projected, weights.norm, out, projected.stride(0),
            weights.eps, **shape, GROUPED=layout.grouped, BLOCK_V=block_v, num_warps=1, pdl=pdl,
        )  # fmt: skip
    return out


def _decode_parts(decodes: int, layout: DeltaLayout, block_v: int, processors: int) -> int:
    """Programs that share a head's state, so that few sequences occupy the device too."""
    parts = 1
    while parts * 2 * _LEAST <= block_v and decodes * layout.v_heads * parts < processors:
        parts *= 2
    return parts


def _warps(numbers: int) -> int:
    """For a program that holds so many numbers in its registers."""
    return 4 if numbers <= 4096 else 8 if numbers <= 8192 else 16


def _keep_inputs(
    projected: Tensor,
    layout: DeltaLayout,
    batch: AttentionBatch,
    states: StateBatch,
    conv_cache: Tensor,
    shape: dict[str, int],
    count: int,
    *,
    by_token: bool,
    pdl: bool,
) -> None:
    block = 512
    starts = batch.query_starts if by_token else batch.query_starts[batch.num_decodes :]
    launch(
        _keep_kernel, (count, ceil_div(layout.channels, block)),
        projected, conv_cache, batch.positions, states.first, states.last, states.reads, states.writes, starts,
        projected.stride(0), **shape, CONV=layout.conv, GROUPED=layout.grouped, BLOCK=block, BY_TOKEN=by_token,
        num_warps=4, pdl=pdl,
    )  # fmt: skip


def _prompts(
    projected: Tensor,
    gates: Tensor,
    layout: DeltaLayout,
    weights: DeltaWeights,
    batch: AttentionBatch,
    states: StateBatch,
    conv_cache: Tensor,
    state_cache: Tensor,
    out: Tensor,
    shape: dict[str, int],
    *,
    pdl: bool,
) -> None:
    """Chunks of prompts, which come behind the decodes; float32 before the norm into `out`."""
    begin, device, dtype = batch.num_decodes, projected.device, projected.dtype
    tokens = projected.shape[0] - begin
    sequences = batch.context_lens.shape[0] - begin
    starts = batch.query_starts[begin:]
    block = min(1024, next_power_of_2(layout.channels))
    mixed = torch.empty((tokens, layout.channels), dtype=dtype, device=device)
    launch(
        _conv_kernel, (tokens, ceil_div(layout.channels, block)),
        projected, conv_cache, weights.conv, mixed, batch.positions, states.first, states.reads, begin,
        projected.stride(0), **shape, CONV=layout.conv, GROUPED=layout.grouped, BLOCK=block, num_warps=4, pdl=pdl,
    )  # fmt: skip
    block_k, block_v = (max(_LEAST, next_power_of_2(dim)) for dim in (layout.k_dim, layout.v_dim))
    exact = dtype == torch.float32
    chunk = 32 if exact or max(block_k, block_v) > 128 else 64
    precision = "ieee" if exact else "tf32"
    u = torch.empty((tokens, layout.v_heads, layout.v_dim), dtype=dtype, device=device)
    w = torch.empty((tokens, layout.v_heads, layout.k_dim), dtype=dtype, device=device)
    total = torch.empty((tokens, layout.v_heads), dtype=torch.float32, device=device)
    launch(
        _system_kernel, (sequences, ceil_div(batch.max_query, chunk), layout.v_heads),
        mixed, gates, weights.decay, weights.decay_bias, u, w, total, starts, begin, gates.stride(0),
        **shape, GROUPED=layout.grouped, CHUNK=chunk, DIAGONAL=_DIAGONAL, SQUARINGS=_squarings(chunk // _DIAGONAL),
        BLOCK_K=block_k, BLOCK_V=block_v,
        PRECISION=precision, num_warps=8, pdl=pdl,
    )  # fmt: skip
    columns = min(block_v, 32)
    launch(
        _scan_kernel, (sequences, layout.v_heads, ceil_div(layout.v_dim, columns)),
        mixed, u, w, total, state_cache, out, starts, states.reads, states.writes, begin,
        **shape, CHUNK=chunk, BLOCK_K=block_k, BLOCK_V=columns, PRECISION=precision, num_warps=8,
        num_stages=2, pdl=pdl,
    )  # fmt: skip
    _keep_inputs(projected, layout, batch, states, conv_cache, shape, sequences, by_token=False, pdl=pdl)
