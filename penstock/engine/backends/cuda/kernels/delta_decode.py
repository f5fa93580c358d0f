"""Gated delta nets, tokens one after the other: decodes, and draft tokens, which are computed as without speculation.

One launch for convolution, update and read-out of the state and the gated norm; with many sequences the convolution is
one of its own. The columns of a state are split between programs; the last of them to finish (an arrival counter, reset
for the next launch) applies the norm. In steps with prompts too, the norm of all tokens is a launch of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.backends.cuda.kernels.common import launch, launch_successor, next_power_of_2, wait_for_inputs
from penstock.engine.backends.cuda.kernels.delta_conv import convolve, keep, tapped, taps
from penstock.engine.backends.cuda.kernels.delta_layout import (
    LEAST_SIDE,
    columns,
    gated_norm,
    head_shape,
    log_decay,
    softplus,
)
from penstock.engine.backends.interface import AttentionBatch, DeltaLayout, DeltaWeights, StateBatch

NORM_LATER, NORM_HERE, NORM_BY_LAST = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Values of NORM."""


@triton.jit
def _decode_kernel(
    x_ptr: tl.tensor,
    mixed_ptr: tl.tensor,
    gates_ptr: tl.tensor,
    ring_ptr: tl.tensor,
    state_ptr: tl.tensor,
    conv_ptr: tl.tensor,
    decay_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    raw_ptr: tl.tensor,
    out_ptr: tl.tensor,
    counter_ptr: tl.tensor,
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
    BY_CHANNEL: tl.constexpr,
    SIGMOID: tl.constexpr,
    LOWEST: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_ROW: tl.constexpr,
    NORM: tl.constexpr,
    APART: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    token0 = tl.program_id(0)
    head = tl.program_id(1)
    part = tl.program_id(2)
    CHANNELS: tl.constexpr = 2 * K_HEADS * K_DIM + V_HEADS * V_DIM
    RATIO: tl.constexpr = V_HEADS // K_HEADS
    launch_successor(PDL)
    # Before the inputs are there: what no launch of this step has written. States and kept inputs are those of an
    # earlier step, which has ended: every step begins with an operation of PyTorch's.
    decay = tl.load(decay_ptr + head)
    last = tl.load(last_ptr + token0)
    leads = tl.load(first_ptr + token0) == token0
    read = tl.load(reads_ptr + token0)
    position0 = tl.load(positions_ptr + token0)
    ks = tl.arange(0, BLOCK_K)
    vs = part * BLOCK_V + tl.arange(0, BLOCK_V)
    k_mask, v_mask = ks < K_DIM, vs < V_DIM
    if BY_CHANNEL:
        bias = tl.load(bias_ptr + head * K_DIM + ks, mask=k_mask, other=0.0)
    else:
        bias = tl.load(bias_ptr + head)
    q_col, k_col, v_col, z_col, b_col, a_col = columns(head, K_HEADS, V_HEADS, K_DIM, V_DIM, GROUPED)
    group = head // RATIO
    q_chan = group * K_DIM + ks
    k_chan = K_HEADS * K_DIM + group * K_DIM + ks
    v_chan = 2 * K_HEADS * K_DIM + head * V_DIM + vs
    inside = ks[:, None] * V_DIM + vs[None, :]
    tile = k_mask[:, None] & v_mask[None, :]
    SIZE: tl.constexpr = K_DIM * V_DIM
    source = state_ptr + (read.to(tl.int64) * V_HEADS + head) * SIZE
    state = tl.load(source + inside, mask=tile & (read > 0) & leads, other=0.0)
    if not APART:
        q_taps = taps(ring_ptr, conv_ptr, q_chan, k_mask & leads, position0, read, CHANNELS, CONV)
        k_taps = taps(ring_ptr, conv_ptr, k_chan, k_mask & leads, position0, read, CHANNELS, CONV)
        v_taps = taps(ring_ptr, conv_ptr, v_chan, v_mask & leads, position0, read, CHANNELS, CONV)
    wait_for_inputs(PDL)
    if NORM == NORM_LATER:
        result_ptr = raw_ptr
    else:
        result_ptr = out_ptr
    if last < token0:  # padding
        nothing = tl.zeros((BLOCK_V,), result_ptr.dtype.element_ty)
        tl.store(result_ptr + (token0 * V_HEADS + head) * V_DIM + vs, nothing, mask=v_mask)
    if leads:
        for token in range(token0, last + 1):
            position = tl.load(positions_ptr + token)
            write = tl.load(writes_ptr + token)
            if APART:
                mixed = mixed_ptr + token * CHANNELS
                q = tl.load(mixed + q_chan, mask=k_mask, other=0.0)
                k = tl.load(mixed + k_chan, mask=k_mask, other=0.0)
                v = tl.load(mixed + v_chan, mask=v_mask, other=0.0)
            else:
                q = tapped(q_taps, x_ptr, ring_ptr, q_col + ks, q_chan, k_mask, token, token0, position, read,
                           x_stride, CHANNELS, CONV)  # fmt: skip
                k = tapped(k_taps, x_ptr, ring_ptr, k_col + ks, k_chan, k_mask, token, token0, position, read,
                           x_stride, CHANNELS, CONV)  # fmt: skip
                v = tapped(v_taps, x_ptr, ring_ptr, v_col + vs, v_chan, v_mask, token, token0, position, read,
                           x_stride, CHANNELS, CONV)  # fmt: skip
            q = q * (tl.rsqrt(tl.sum(q * q, axis=0) + 1e-6) * (K_DIM**-0.5))
            k = k * tl.rsqrt(tl.sum(k * k, axis=0) + 1e-6)
            b = tl.load(gates_ptr + token * gates_stride + b_col).to(tl.float32)
            if BY_CHANNEL:
                channels = V_HEADS + head * K_DIM + ks
                a = tl.load(gates_ptr + token * gates_stride + channels, mask=k_mask, other=0.0).to(tl.float32)
                state = state * tl.exp(log_decay(decay, a + bias, LOWEST))[:, None]
            else:
                a = tl.load(gates_ptr + token * gates_stride + a_col).to(tl.float32)
                state = state * tl.exp(decay * softplus(a + bias))
            change = (v - tl.sum(state * k[:, None], axis=0)) / (1.0 + tl.exp(-b))
            state = state + k[:, None] * change[None, :]
            o = tl.sum(state * q[:, None], axis=0)
            at = (token * V_HEADS + head) * V_DIM + vs
            if NORM == NORM_HERE:
                z = tl.load(x_ptr + token * x_stride + z_col + vs, mask=v_mask, other=0.0).to(tl.float32)
                norm = tl.load(norm_ptr + vs, mask=v_mask, other=0.0)
                o = gated_norm(o, z, norm, V_DIM, eps, SIGMOID)
                tl.store(out_ptr + at, o.to(out_ptr.dtype.element_ty), mask=v_mask)
            else:
                tl.store(raw_ptr + at, o, mask=v_mask)
            if write > 0:
                target = state_ptr + (write.to(tl.int64) * V_HEADS + head) * SIZE
                tl.store(target + inside, state, mask=tile)
                if not APART:  # noqa: SIM102
                    # Behind later tokens of a run that is written where it was read, `keep_inputs` does it.
                    if (token == token0) | (write != read):
                        keep(x_ptr, ring_ptr, v_col + vs, v_chan, v_mask, token, token0, position, read, write,
                              x_stride, CHANNELS, CONV)  # fmt: skip
                        if (head % RATIO == 0) & (part == 0):
                            keep(x_ptr, ring_ptr, q_col + ks, q_chan, k_mask, token, token0, position, read, write,
                                  x_stride, CHANNELS, CONV)  # fmt: skip
                            keep(x_ptr, ring_ptr, k_col + ks, k_chan, k_mask, token, token0, position, read, write,
                                  x_stride, CHANNELS, CONV)  # fmt: skip
        if NORM == NORM_BY_LAST:
            # All threads' stores happen before the barrier, and thread 0's release makes them visible to the chip.
            tl.debug_barrier()
            counter = counter_ptr + token0 * V_HEADS + head
            arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
            if arrived == tl.num_programs(2) - 1:
                tl.store(counter, 0)
                wide = tl.arange(0, BLOCK_ROW)
                all_mask = wide < V_DIM
                norm = tl.load(norm_ptr + wide, mask=all_mask, other=0.0)
                for token in range(token0, last + 1):
                    at = (token * V_HEADS + head) * V_DIM + wide
                    o = tl.load(raw_ptr + at, mask=all_mask, other=0.0)
                    z = tl.load(x_ptr + token * x_stride + z_col + wide, mask=all_mask, other=0.0).to(tl.float32)
                    o = gated_norm(o, z, norm, V_DIM, eps, SIGMOID)
                    tl.store(out_ptr + at, o.to(out_ptr.dtype.element_ty), mask=all_mask)


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """How decodes are launched."""

    parts: int
    """Programs that share a head's state."""
    apart: bool
    """Whether the convolution is a launch of its own, so that a program does little but move its state."""


def choose(decodes: int, layout: DeltaLayout, processors: int, *, fixed: bool = False) -> DecodeShape:
    """Launch shape from host values. `fixed`: the same for any number of sequences.

    A program holds 32 columns of a state, more would leave too few programs at once on a processor to hide latencies;
    with few sequences 16, so that all processors have some.
    """
    columns = max(LEAST_SIDE, next_power_of_2(layout.v_dim))
    parts, programs = max(1, columns // 32), decodes * layout.v_heads
    if fixed or programs >= 4 * processors:
        return DecodeShape(parts, apart=True)
    while 2 * parts * LEAST_SIDE <= columns and programs * parts < 2 * processors:
        parts *= 2
    return DecodeShape(parts, apart=False)


def decode(
    projected: Tensor,
    gates: Tensor,
    layout: DeltaLayout,
    weights: DeltaWeights,
    batch: AttentionBatch,
    states: StateBatch,
    conv_cache: Tensor,
    state_cache: Tensor,
    raw: Tensor,
    out: Tensor | None,
    counters: Tensor,
    shape: DecodeShape,
    *,
    pdl: bool,
) -> None:
    """The first `num_decodes` tokens, before the norm into `raw` float32, and with it into `out`; None: without it.
    `counters`: zeros, one for each token and value head; they are zeros afterwards."""
    parts = shape.parts
    norm = NORM_LATER if out is None else NORM_HERE if parts == 1 else NORM_BY_LAST
    block_v = max(LEAST_SIDE, next_power_of_2(layout.v_dim))
    mixed = projected
    if shape.apart:
        mixed = convolve(projected, layout, weights.conv, batch, states, conv_cache, decodes=True, pdl=pdl)
    launch(
        _decode_kernel, (batch.num_decodes, layout.v_heads, parts),
        projected, mixed, gates, conv_cache, state_cache, weights.conv, weights.decay, weights.decay_bias, weights.norm,
        raw, raw if out is None else out, counters, batch.positions, states.first, states.last, states.reads,
        states.writes, projected.stride(0), gates.stride(0), weights.eps,
        **head_shape(layout), CONV=layout.conv, GROUPED=layout.grouped, BY_CHANNEL=layout.by_channel,
        SIGMOID=layout.sigmoid_gate, LOWEST=layout.lowest, BLOCK_K=max(LEAST_SIDE, next_power_of_2(layout.k_dim)),
        BLOCK_V=block_v // parts, BLOCK_ROW=block_v,
        NORM=norm.value, APART=shape.apart, num_warps=_warps(layout.k_dim * block_v // parts), pdl=pdl,
    )  # fmt: skip


def _warps(numbers: int) -> int:
    """For a program that holds so many numbers in its registers."""
    return 4 if numbers <= 4096 else 8 if numbers <= 8192 else 16
