"""Mamba-2 (`Ops.mamba`).

Decodes: one launch for convolution, update and read-out of the state; the rows of a state are split between programs
where there are few sequences. A program goes through the tokens of a run one after the other, so draft tokens are
computed as they would be without speculation. Prompts: see `mamba_prompt`. Gate and norm are a launch of their own,
since the norm is over heads; without a norm the gate is part of the decode.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.backends.cuda.kernels.common import launch, launch_successor, next_power_of_2, wait_for_inputs
from penstock.engine.backends.cuda.kernels.delta_conv import keep, keep_inputs
from penstock.engine.backends.cuda.kernels.delta_layout import LEAST_SIDE
from penstock.engine.backends.cuda.kernels.mamba_layout import as_delta, biased, head_shape, time_steps
from penstock.engine.backends.cuda.kernels.mamba_prompt import prompts
from penstock.engine.backends.interface import AttentionBatch, MambaLayout, MambaWeights, StateBatch

_TILE = 8192
"""Most numbers of a state in one program."""


@triton.jit
def _decode_kernel(
    x_ptr: tl.tensor,
    ring_ptr: tl.tensor,
    state_ptr: tl.tensor,
    conv_ptr: tl.tensor,
    conv_bias_ptr: tl.tensor,
    decay_ptr: tl.tensor,
    dt_bias_ptr: tl.tensor,
    skip_ptr: tl.tensor,
    out_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    first_ptr: tl.tensor,
    last_ptr: tl.tensor,
    reads_ptr: tl.tensor,
    writes_ptr: tl.tensor,
    x_stride: tl.tensor,
    dt_low: tl.tensor,
    dt_high: tl.tensor,
    dt_scale: tl.tensor,
    gate_scale: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    GROUPS: tl.constexpr,
    STATE: tl.constexpr,
    CONV: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GATE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    token0 = tl.program_id(0)
    head = tl.program_id(1)
    part = tl.program_id(2)
    INNER: tl.constexpr = HEADS * DIM
    CHANNELS: tl.constexpr = INNER + 2 * GROUPS * STATE
    SIZE: tl.constexpr = DIM * STATE
    RATIO: tl.constexpr = HEADS // GROUPS
    launch_successor(PDL)
    decay = tl.load(decay_ptr + head)
    dt_bias = tl.load(dt_bias_ptr + head)
    skip = tl.load(skip_ptr + head)
    wait_for_inputs(PDL)
    last = tl.load(last_ptr + token0)
    ps = part * BLOCK_P + tl.arange(0, BLOCK_P)
    p_mask = ps < DIM
    if last < token0:  # padding
        nothing = tl.zeros((BLOCK_P,), out_ptr.dtype.element_ty)
        tl.store(out_ptr + token0 * INNER + head * DIM + ps, nothing, mask=p_mask)
    if tl.load(first_ptr + token0) == token0:
        read = tl.load(reads_ptr + token0)
        ns = tl.arange(0, BLOCK_N)
        n_mask = ns < STATE
        group = head // RATIO
        x_chan = head * DIM + ps
        b_chan = INNER + group * STATE + ns
        c_chan = b_chan + GROUPS * STATE
        mixed_ptr = x_ptr + INNER  # behind the gates
        inside = ps[:, None] * STATE + ns[None, :]
        tile = p_mask[:, None] & n_mask[None, :]
        source = state_ptr + (read.to(tl.int64) * HEADS + head) * SIZE
        state = tl.load(source + inside, mask=tile & (read > 0), other=0.0)
        for token in range(token0, last + 1):
            position = tl.load(positions_ptr + token)
            write = tl.load(writes_ptr + token)
            x = biased(mixed_ptr, ring_ptr, conv_ptr, conv_bias_ptr, x_chan, p_mask, token, token0, position, read,
                       x_stride, CHANNELS, CONV)  # fmt: skip
            b = biased(mixed_ptr, ring_ptr, conv_ptr, conv_bias_ptr, b_chan, n_mask, token, token0, position, read,
                       x_stride, CHANNELS, CONV)  # fmt: skip
            c = biased(mixed_ptr, ring_ptr, conv_ptr, conv_bias_ptr, c_chan, n_mask, token, token0, position, read,
                       x_stride, CHANNELS, CONV)  # fmt: skip
            raw = tl.load(x_ptr + token * x_stride + INNER + CHANNELS + head).to(tl.float32)
            dt = time_steps(raw, dt_bias, dt_scale, dt_low, dt_high)
            state = state * tl.exp(decay * dt) + (x * dt)[:, None] * b[None, :]
            y = tl.sum(state * c[None, :], axis=1) + skip * x
            if GATE:
                z = tl.load(x_ptr + token * x_stride + x_chan, mask=p_mask, other=0.0).to(tl.float32) * gate_scale
                y = y * z / (1.0 + tl.exp(-z))
            tl.store(out_ptr + token * INNER + x_chan, y.to(out_ptr.dtype.element_ty), mask=p_mask)
            if write > 0:
                target = state_ptr + (write.to(tl.int64) * HEADS + head) * SIZE
                tl.store(target + inside, state, mask=tile)
                # Behind later tokens of a run that is written where it was read, `keep_inputs` does it.
                if (token == token0) | (write != read):
                    keep(mixed_ptr, ring_ptr, x_chan, x_chan, p_mask, token, token0, position, read, write,
                         x_stride, CHANNELS, CONV)  # fmt: skip
                    if (head % RATIO == 0) & (part == 0):
                        keep(mixed_ptr, ring_ptr, b_chan, b_chan, n_mask, token, token0, position, read, write,
                             x_stride, CHANNELS, CONV)  # fmt: skip
                        keep(mixed_ptr, ring_ptr, c_chan, c_chan, n_mask, token, token0, position, read, write,
                             x_stride, CHANNELS, CONV)  # fmt: skip


@triton.jit
def _norm_kernel(
    y_ptr: tl.tensor,
    x_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_stride: tl.tensor,
    eps: tl.tensor,
    gate_scale: tl.tensor,
    INNER: tl.constexpr,
    WIDTH: tl.constexpr,
    NORM: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Gate and norm of one run of channels."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    columns = tl.program_id(1) * WIDTH + columns
    launch_successor(PDL)
    norm = tl.load(norm_ptr + columns, mask=mask, other=0.0)
    wait_for_inputs(PDL)
    y = tl.load(y_ptr + token * INNER + columns, mask=mask, other=0.0)
    z = tl.load(x_ptr + token * x_stride + columns, mask=mask, other=0.0).to(tl.float32) * gate_scale
    gate = z / (1.0 + tl.exp(-z))
    if GATE_FIRST:
        y = y * gate
    if NORM:
        y = y * tl.rsqrt(tl.sum(y * y, axis=0) / WIDTH + eps) * norm
    if not GATE_FIRST:
        y = y * gate
    tl.store(out_ptr + token * INNER + columns, y.to(out_ptr.dtype.element_ty), mask=mask)


def mamba(
    projected: Tensor,
    layout: MambaLayout,
    weights: MambaWeights,
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
    out = torch.empty((tokens, layout.inner), dtype=projected.dtype, device=projected.device)
    gated = decodes == tokens and not layout.norm_groups
    raw = out if gated else torch.empty(out.shape, dtype=torch.float32, device=out.device)
    if decodes:
        _decode(projected, layout, weights, batch, states, conv_cache, state_cache, raw, processors, gate=gated,
                pdl=pdl)  # fmt: skip
        if in_place_runs:
            mixed = projected[:, layout.inner :]
            keep_inputs(mixed, as_delta(layout), batch, states, conv_cache, decodes, by_token=True, pdl=pdl)
    if tokens > decodes:
        prompts(projected, layout, weights, batch, states, conv_cache, state_cache, raw, pdl=pdl)
    if not gated:
        runs = layout.norm_groups or layout.heads
        width = layout.inner // runs
        launch(
            _norm_kernel, (tokens, runs), raw, projected, weights.norm, out, projected.stride(0), weights.eps,
            weights.gate_scale, INNER=layout.inner, WIDTH=width, NORM=layout.norm_groups > 0,
            GATE_FIRST=layout.gate_first, BLOCK=next_power_of_2(width), num_warps=_norm_warps(width), pdl=pdl,
        )  # fmt: skip
    return out


def _decode(
    projected: Tensor,
    layout: MambaLayout,
    weights: MambaWeights,
    batch: AttentionBatch,
    states: StateBatch,
    conv_cache: Tensor,
    state_cache: Tensor,
    out: Tensor,
    processors: int,
    *,
    gate: bool,
    pdl: bool,
) -> None:
    decodes = batch.num_decodes
    block_p, block_n = (next_power_of_2(size) for size in (layout.head_dim, layout.state))
    rows = block_p
    while rows > 1 and (rows * block_n > _TILE or (rows > LEAST_SIDE and _few(decodes, layout, rows, processors))):
        rows //= 2
    launch(
        _decode_kernel, (decodes, layout.heads, -(-layout.head_dim // rows)),
        projected, conv_cache, state_cache, weights.conv, weights.conv_bias, weights.decay, weights.dt_bias,
        weights.skip, out, batch.positions, states.first, states.last, states.reads, states.writes,
        projected.stride(0), *weights.dt_range, weights.dt_scale, weights.gate_scale,
        **head_shape(layout), CONV=layout.conv, BLOCK_P=rows, BLOCK_N=block_n, GATE=gate,
        num_warps=4 if rows * block_n <= 4096 else 8, pdl=pdl,
    )  # fmt: skip


def _few(decodes: int, layout: MambaLayout, rows: int, processors: int) -> bool:
    """Whether programs with so many rows of a state each would leave processors idle."""
    return decodes * layout.heads * -(-layout.head_dim // rows) < 2 * processors


def _norm_warps(width: int) -> int:
    return 1 if width <= 256 else 4 if width <= 2048 else 8
