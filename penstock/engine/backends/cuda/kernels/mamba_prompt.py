"""Mamba-2, prompts in chunks of tokens, by matrix products.

The convolution of all tokens; then the chunks of a sequence in order: within a chunk tokens see each other as in
attention without a softmax, and all before it through the state. Products are of the model's type, sums and states
float32.
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
from penstock.engine.backends.cuda.kernels.delta_conv import keep_inputs
from penstock.engine.backends.cuda.kernels.delta_layout import LEAST_SIDE
from penstock.engine.backends.cuda.kernels.mamba_layout import as_delta, biased, head_shape, time_steps
from penstock.engine.backends.interface import AttentionBatch, MambaLayout, MambaWeights, StateBatch

_TOKENS, _COLUMNS = 8, 128
"""What a program convolves."""


@triton.jit(do_not_specialize=["begin", "end"])
def _conv_kernel(
    x_ptr: tl.tensor,
    ring_ptr: tl.tensor,
    conv_ptr: tl.tensor,
    conv_bias_ptr: tl.tensor,
    mixed_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    first_ptr: tl.tensor,
    reads_ptr: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    x_stride: tl.tensor,
    CHANNELS: tl.constexpr,
    CONV: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Several tokens, which share the weights that they are multiplied with."""
    channel = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    token = begin + row
    here = token < end
    mask = (channel < CHANNELS) & here[:, None]
    launch_successor(PDL)
    wait_for_inputs(PDL)
    first = tl.load(first_ptr + token, mask=here, other=0)[:, None]
    read = tl.load(reads_ptr + token, mask=here, other=0)[:, None]
    position = tl.load(positions_ptr + token, mask=here, other=0)[:, None]
    mixed = biased(x_ptr, ring_ptr, conv_ptr, conv_bias_ptr, channel, mask, token[:, None], first, position, read,
                   x_stride, CHANNELS, CONV)  # fmt: skip
    at = mixed_ptr + row.to(tl.int64)[:, None] * CHANNELS + channel
    tl.store(at, mixed.to(mixed_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["begin"])
def _scan_kernel(
    mixed_ptr: tl.tensor,
    dt_ptr: tl.tensor,
    decay_ptr: tl.tensor,
    dt_bias_ptr: tl.tensor,
    skip_ptr: tl.tensor,
    state_ptr: tl.tensor,
    out_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    reads_ptr: tl.tensor,
    writes_ptr: tl.tensor,
    begin: tl.tensor,
    dt_stride: tl.tensor,
    dt_low: tl.tensor,
    dt_high: tl.tensor,
    dt_scale: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    GROUPS: tl.constexpr,
    STATE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """The chunks of one sequence in order, for some rows of one head's state."""
    TYPE: tl.constexpr = mixed_ptr.dtype.element_ty
    seq = tl.program_id(0)
    head = tl.program_id(1)
    INNER: tl.constexpr = HEADS * DIM
    CHANNELS: tl.constexpr = INNER + 2 * GROUPS * STATE
    SIZE: tl.constexpr = DIM * STATE
    launch_successor(PDL)
    decay = tl.load(decay_ptr + head)
    dt_bias = tl.load(dt_bias_ptr + head)
    skip = tl.load(skip_ptr + head)
    wait_for_inputs(PDL)
    start = tl.load(starts_ptr + begin + seq)
    end = tl.load(starts_ptr + begin + seq + 1)
    if start < end:
        read = tl.load(reads_ptr + start)
        write = tl.load(writes_ptr + end - 1)
        rows = tl.arange(0, CHUNK)
        ns = tl.arange(0, BLOCK_N)
        ps = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
        n_mask, p_mask = ns < STATE, ps < DIM
        b_col = INNER + (head // (HEADS // GROUPS)) * STATE
        # Held with the rows of B and C first, stored with those of x first.
        inside = ps[None, :] * STATE + ns[:, None]
        tile = n_mask[:, None] & p_mask[None, :]
        source = state_ptr + (read.to(tl.int64) * HEADS + head) * SIZE
        state = tl.load(source + inside, mask=tile & (read > 0), other=0.0)
        seen = rows[:, None] >= rows[None, :]
        for first in range(start, end, CHUNK):
            valid = first + rows < end
            local = (first + rows - begin).to(tl.int64)
            n_tile = valid[:, None] & n_mask[None, :]
            p_tile = valid[:, None] & p_mask[None, :]
            raw = tl.load(dt_ptr + (first + rows).to(tl.int64) * dt_stride + head, mask=valid, other=0.0)
            dt = tl.where(valid, time_steps(raw.to(tl.float32), dt_bias, dt_scale, dt_low, dt_high), 0.0)
            total = tl.cumsum(decay * dt, axis=0)
            whole = tl.sum(decay * dt, axis=0)
            b_at = mixed_ptr + local[:, None] * CHANNELS + (b_col + ns)[None, :]
            b = tl.load(b_at, mask=n_tile, other=0.0)
            c = tl.load(b_at + GROUPS * STATE, mask=n_tile, other=0.0)
            x_at = mixed_ptr + local[:, None] * CHANNELS + (head * DIM + ps)[None, :]
            x = tl.load(x_at, mask=p_tile, other=0.0).to(tl.float32)
            values = x * dt[:, None]
            # The difference is masked before it is raised: above the diagonal it may be as large as it likes.
            lag = tl.exp(tl.where(seen, total[:, None] - total[None, :], 0.0))
            scores = tl.dot(c, tl.trans(b), input_precision=PRECISION) * lag
            scores = tl.where(seen, scores, 0.0)
            y = tl.dot(c, state.to(TYPE), input_precision=PRECISION) * tl.exp(total)[:, None]
            y += tl.dot(scores.to(TYPE), values.to(TYPE), input_precision=PRECISION)
            y += skip * x
            out = out_ptr + (first + rows).to(tl.int64)[:, None] * INNER + (head * DIM + ps)[None, :]
            tl.store(out, y, mask=p_tile)
            late = tl.exp(whole - total)
            update = tl.dot(tl.trans(b), (values * late[:, None]).to(TYPE), input_precision=PRECISION)
            state = state * tl.exp(whole) + update
        if write > 0:
            tl.store(state_ptr + (write.to(tl.int64) * HEADS + head) * SIZE + inside, state, mask=tile)


def prompts(
    projected: Tensor,
    layout: MambaLayout,
    weights: MambaWeights,
    batch: AttentionBatch,
    states: StateBatch,
    conv_cache: Tensor,
    state_cache: Tensor,
    out: Tensor,
    *,
    pdl: bool,
) -> None:
    """Chunks of prompts, which come behind the decodes; float32 before gate and norm into `out`."""
    begin, dtype, channels = batch.num_decodes, projected.dtype, layout.channels
    tokens, sequences = projected.shape[0] - begin, batch.context_lens.shape[0] - begin
    inputs, dt = projected[:, layout.inner :], projected[:, layout.inner + channels :]
    mixed = torch.empty((tokens, channels), dtype=dtype, device=projected.device)
    launch(
        _conv_kernel, (ceil_div(tokens, _TOKENS), ceil_div(channels, _COLUMNS)),
        inputs, conv_cache, weights.conv, weights.conv_bias, mixed, batch.positions, states.first, states.reads, begin,
        begin + tokens, projected.stride(0), CHANNELS=channels, CONV=layout.conv, TOKENS=_TOKENS, BLOCK=_COLUMNS,
        num_warps=4, pdl=pdl,
    )  # fmt: skip
    block_p, block_n = (max(LEAST_SIDE, next_power_of_2(size)) for size in (layout.head_dim, layout.state))
    exact = dtype == torch.float32
    rows = min(block_p, 32 if exact or block_n > 128 else 64)
    launch(
        _scan_kernel, (sequences, layout.heads, ceil_div(layout.head_dim, rows)),
        mixed, dt, weights.decay, weights.dt_bias, weights.skip, state_cache, out, batch.query_starts,
        states.reads, states.writes, begin, projected.stride(0), *weights.dt_range, weights.dt_scale,
        **head_shape(layout), CHUNK=32 if exact or block_n > 128 else 64, BLOCK_P=rows, BLOCK_N=block_n,
        PRECISION="ieee" if exact else "tf32", num_warps=8, num_stages=2, pdl=pdl,
    )  # fmt: skip
    keep_inputs(inputs, as_delta(layout), batch, states, conv_cache, sequences, by_token=False, pdl=pdl)
