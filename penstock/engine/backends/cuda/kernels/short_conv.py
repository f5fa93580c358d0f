"""Gated short convolutions (`Ops.short_conv`): one launch for gate, convolution, output gate and new states.

A program computes some channels of a few consecutive tokens, decoded or of prompts. The first tokens of a run see
inputs that were kept before it, and a run may be written where it was read: so one program computes all tokens of a run
that read what was kept, and then keeps what replaces it. Programs therefore have a few rows more than tokens of their
own. Every token's sum is added up in the same order, wherever a run is cut.
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
from penstock.engine.backends.cuda.kernels.delta_conv import kept_at
from penstock.engine.backends.interface import AttentionBatch, ShortConvWeights

_PROMPT_ROWS = 16


@triton.jit
def _gated(
    x_ptr: tl.tensor,
    token: tl.tensor,
    channel: tl.tensor,
    mask: tl.tensor,
    x_stride: tl.tensor,
    CHANNELS: tl.constexpr,
) -> tl.tensor:
    """Inputs times their gates, rounded as they are kept; zeros where masked."""
    at = x_ptr + token.to(tl.int64)[:, None] * x_stride + channel[None, :]
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(at + 2 * CHANNELS, mask=mask, other=0.0).to(tl.float32)
    return (gate * x).to(x_ptr.dtype.element_ty).to(tl.float32)


@triton.jit(do_not_specialize=["tokens"])
def _short_conv_kernel(
    x_ptr: tl.tensor,
    ring_ptr: tl.tensor,
    taps_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    first_ptr: tl.tensor,
    last_ptr: tl.tensor,
    reads_ptr: tl.tensor,
    writes_ptr: tl.tensor,
    tokens: tl.tensor,
    x_stride: tl.tensor,
    CHANNELS: tl.constexpr,
    CONV: tl.constexpr,
    OWN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    begin = tl.program_id(0) * OWN
    token = begin + tl.arange(0, ROWS)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = (channel < CHANNELS)[None, :]
    launch_successor(PDL)
    # Before the inputs are there: what no launch of this step has written. Kept inputs are those of an earlier step,
    # which has ended: every step begins with an operation of PyTorch's.
    there = token < tokens
    first = tl.load(first_ptr + token, mask=there, other=0)
    last = tl.load(last_ptr + token, mask=there, other=0)
    read = tl.load(reads_ptr + token, mask=there, other=0)
    write = tl.load(writes_ptr + token, mask=there, other=0)
    position = tl.load(positions_ptr + token, mask=there, other=0)
    real = token <= last
    early = real & (token - first < CONV - 1)
    own = there & tl.where(early, (first >= begin) & (first < begin + OWN), token < begin + OWN)
    real = own & real
    weights = ()
    for back in tl.static_range(CONV):
        weight = tl.load(taps_ptr + (CONV - 1 - back) * CHANNELS + channel, mask=channel < CHANNELS, other=0.0)
        weights = weights + (weight,)  # type: ignore[assignment]
    kept = ()
    for back in tl.static_range(1, CONV):
        known = real & (token - back < first) & (read > 0) & (position >= back)
        at = kept_at(ring_ptr, read[:, None], position[:, None], back, channel[None, :], CHANNELS, CONV)
        kept = kept + (tl.load(at, mask=known[:, None] & column, other=0.0).to(tl.float32),)  # type: ignore[assignment]
    bias = tl.load(bias_ptr + channel, mask=channel < CHANNELS, other=0.0)
    # A run that is written where it was read: behind its early tokens its first one's program does it.
    leads = real & (token == first) & (last - first >= CONV - 1)
    end_write = tl.load(writes_ptr + last, mask=leads, other=0)
    leads = leads & (end_write > 0) & (end_write == read)
    wait_for_inputs(PDL)
    gate_at = x_ptr + token.to(tl.int64)[:, None] * x_stride + CHANNELS + channel[None, :]
    gate = tl.load(gate_at, mask=real[:, None] & column, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, BLOCK), tl.float32) + bias[None, :]
    inputs = ()
    for back in tl.static_range(CONV):
        inside = (real & (token - back >= first))[:, None] & column
        x = _gated(x_ptr, token - back, channel, inside, x_stride, CHANNELS)
        if back > 0:
            x = tl.where(inside, x, kept[back - 1])
        total += weights[back][None, :] * x
        inputs = inputs + (x,)  # type: ignore[assignment]
    out_at = out_ptr + token.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
    tl.store(out_at, (gate * total).to(out_ptr.dtype.element_ty), mask=own[:, None] & column)  # padding: zeros
    tl.debug_barrier()  # all threads have read what was kept
    keeps = real & (write > 0) & ((write != read) | (token - first < CONV - 1))
    for back in tl.static_range(CONV - 1):
        at = kept_at(ring_ptr, write[:, None], position[:, None], back, channel[None, :], CHANNELS, CONV)
        tl.store(at, inputs[back].to(ring_ptr.dtype.element_ty), mask=keeps[:, None] & column)
    if tl.max(leads.to(tl.int32), axis=0) > 0:
        end = position + (last - first)
        mask = leads[:, None] & column
        for back in tl.static_range(CONV - 1):
            x = _gated(x_ptr, last - back, channel, mask, x_stride, CHANNELS)
            at = kept_at(ring_ptr, end_write[:, None], end[:, None], back, channel[None, :], CHANNELS, CONV)
            tl.store(at, x.to(ring_ptr.dtype.element_ty), mask=mask)


def short_conv(
    projected: Tensor, weights: ShortConvWeights, batch: AttentionBatch, conv_cache: Tensor, *, pdl: bool = False
) -> Tensor:
    states = batch.states
    assert states is not None, "a recurrent layer needs to know where its states are"
    width, channels = weights.taps.shape
    tokens = projected.shape[0]
    out = torch.empty((tokens, channels), dtype=projected.dtype, device=projected.device)
    if not tokens:
        return out
    # Behind the last token of its own a program may have to compute the rest of a run's early tokens.
    further = max(0, width - 2)
    if batch.num_decodes < tokens:
        rows, block = max(_PROMPT_ROWS, next_power_of_2(2 * further)), 128
        own = rows - further
    else:
        rows, block, own = next_power_of_2(1 + further), 256, 1
    block = min(block, next_power_of_2(channels))
    launch(
        _short_conv_kernel, (ceil_div(tokens, own), ceil_div(channels, block)),
        projected, conv_cache, weights.taps, weights.bias, out, batch.positions, states.first, states.last,
        states.reads, states.writes, tokens, projected.stride(0), CHANNELS=channels, CONV=width, OWN=own, ROWS=rows,
        BLOCK=block, num_warps=4, pdl=pdl,
    )  # fmt: skip
    return out
