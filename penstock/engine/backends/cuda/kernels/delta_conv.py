"""The short convolution before a gated delta net.

Its inputs are those of the step and, before a run's first token, those that were kept with the state: a ring of as many
rows as the convolution is wide, where the input of position p stands in row p % width."""

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
from penstock.engine.backends.cuda.kernels.delta_layout import column_of, head_shape
from penstock.engine.backends.interface import AttentionBatch, DeltaLayout, StateBatch


@triton.jit
def kept_at(
    ring_ptr: tl.tensor,
    slot: tl.tensor,
    position: tl.tensor,
    back: tl.tensor,
    channel: tl.tensor,
    CHANNELS: tl.constexpr,
    CONV: tl.constexpr,
) -> tl.tensor:
    """Where a slot keeps the input `back` positions before `position`."""
    return ring_ptr + (slot.to(tl.int64) * CONV + (position + CONV - back) % CONV) * CHANNELS + channel


@triton.jit
def conv_input(
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
    kept = kept_at(ring_ptr, read, position, back, channel, CHANNELS, CONV)
    return here + tl.load(kept, mask=mask & known, other=0.0).to(tl.float32)


@triton.jit
def convolved(
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
        x = conv_input(
            x_ptr, ring_ptr, column, channel, mask, token, first, position, read, back, x_stride, CHANNELS, CONV
        )
        total += weight * x
    return total / (1.0 + tl.exp(-total))


@triton.jit
def taps(
    ring_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    channel: tl.tensor,
    mask: tl.tensor,
    position: tl.tensor,
    read: tl.tensor,
    CHANNELS: tl.constexpr,
    CONV: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """What the convolution at a run's first token needs beside the step's own rows, for `tapped`: its weights, those of
    the token itself first, and the inputs that were kept."""
    found = ()
    for back in tl.static_range(CONV):
        weight = tl.load(weight_ptr + channel * CONV + (CONV - 1 - back), mask=mask, other=0.0)
        found = found + (weight,)  # type: ignore[assignment]
    for back in tl.static_range(1, CONV):
        known = (read > 0) & (position >= back)
        kept = kept_at(ring_ptr, read, position, back, channel, CHANNELS, CONV)
        found = found + (tl.load(kept, mask=mask & known, other=0.0).to(tl.float32),)  # type: ignore[assignment]
    return found


@triton.jit
def tapped(
    found: tl.tensor,
    x_ptr: tl.tensor,
    ring_ptr: tl.tensor,
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
    """As `convolved`, with what `taps` found."""
    total = tl.zeros(channel.shape, tl.float32)
    later = mask & (token > first)
    for back in tl.static_range(CONV):
        if back == 0:
            x = tl.load(x_ptr + token * x_stride + column, mask=mask, other=0.0).to(tl.float32)
        else:
            x = conv_input(
                x_ptr, ring_ptr, column, channel, later, token, first, position, read, back, x_stride, CHANNELS, CONV
            )
            x = tl.where(token > first, x, found[CONV + back - 1])
        total += found[back] * x
    return total / (1.0 + tl.exp(-total))


@triton.jit
def keep(
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
        x = conv_input(
            x_ptr, ring_ptr, column, channel, mask, token, first, position, read, back, x_stride, CHANNELS, CONV
        )
        at = kept_at(ring_ptr, write, position, back, channel, CHANNELS, CONV)
        tl.store(at, x.to(ring_ptr.dtype.element_ty), mask=mask & (position >= back))


@triton.jit(do_not_specialize=["begin"])
def _keep_kernel(
    x_ptr: tl.tensor,
    ring_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    first_ptr: tl.tensor,
    last_ptr: tl.tensor,
    reads_ptr: tl.tensor,
    writes_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    begin: tl.tensor,
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
    column = column_of(channel, K_HEADS, V_HEADS, K_DIM, V_DIM, GROUPED)
    launch_successor(PDL)
    wait_for_inputs(PDL)
    if BY_TOKEN:
        token = index
        first = tl.load(first_ptr + token)
        # Single tokens and those in slots of their own are kept where they are computed.
        due = (tl.load(last_ptr + token) == token) & (first < token)
        due = due & (tl.load(writes_ptr + token) == tl.load(reads_ptr + token))
    else:
        first = tl.load(starts_ptr + begin + index)
        token = tl.load(starts_ptr + begin + index + 1) - 1
        due = token >= first
    if due:
        write = tl.load(writes_ptr + token)
        if write > 0:
            position = tl.load(positions_ptr + token)
            read = tl.load(reads_ptr + token)
            keep(x_ptr, ring_ptr, column, channel, mask, token, first, position, read, write, x_stride, CHANNELS,
                  CONV)  # fmt: skip


@triton.jit(do_not_specialize=["begin"])
def _conv_kernel(
    x_ptr: tl.tensor,
    ring_ptr: tl.tensor,
    conv_ptr: tl.tensor,
    mixed_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    first_ptr: tl.tensor,
    reads_ptr: tl.tensor,
    writes_ptr: tl.tensor,
    begin: tl.tensor,
    x_stride: tl.tensor,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    CONV: tl.constexpr,
    GROUPED: tl.constexpr,
    BLOCK: tl.constexpr,
    KEEP: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    token = begin + tl.program_id(0)
    CHANNELS: tl.constexpr = 2 * K_HEADS * K_DIM + V_HEADS * V_DIM
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = channel < CHANNELS
    column = column_of(channel, K_HEADS, V_HEADS, K_DIM, V_DIM, GROUPED)
    launch_successor(PDL)
    wait_for_inputs(PDL)
    first = tl.load(first_ptr + token)
    read = tl.load(reads_ptr + token)
    position = tl.load(positions_ptr + token)
    mixed = convolved(x_ptr, ring_ptr, conv_ptr, column, channel, mask, token, first, position, read, x_stride,
                       CHANNELS, CONV)  # fmt: skip
    at = mixed_ptr + tl.program_id(0).to(tl.int64) * CHANNELS + channel
    tl.store(at, mixed.to(mixed_ptr.dtype.element_ty), mask=mask)
    if KEEP:
        write = tl.load(writes_ptr + token)
        if (write > 0) & ((token == first) | (write != read)):
            keep(x_ptr, ring_ptr, column, channel, mask, token, first, position, read, write, x_stride, CHANNELS,
                 CONV)  # fmt: skip


def keep_inputs(
    projected: Tensor,
    layout: DeltaLayout,
    batch: AttentionBatch,
    states: StateBatch,
    ring: Tensor,
    count: int,
    *,
    by_token: bool,
    pdl: bool,
) -> None:
    """See `_keep_kernel`; `count`: tokens, or sequences."""
    block = 512
    launch(
        _keep_kernel, (count, ceil_div(layout.channels, block)),
        projected, ring, batch.positions, states.first, states.last, states.reads, states.writes,
        batch.query_starts, batch.num_decodes,
        projected.stride(0), **head_shape(layout), CONV=layout.conv, GROUPED=layout.grouped, BLOCK=block,
        BY_TOKEN=by_token, num_warps=4, pdl=pdl,
    )  # fmt: skip


def convolve(
    projected: Tensor,
    layout: DeltaLayout,
    weight: Tensor,
    batch: AttentionBatch,
    states: StateBatch,
    ring: Tensor,
    *,
    decodes: bool,
    pdl: bool,
) -> Tensor:
    """[tokens, channels]: convolution and silu of the decodes in float32, or of all tokens behind them. Of decodes also
    keeps the inputs, where `keep_inputs` need not."""
    begin = 0 if decodes else batch.num_decodes
    tokens = batch.num_decodes if decodes else projected.shape[0] - begin
    block = min(1024, next_power_of_2(layout.channels))
    dtype = torch.float32 if decodes else projected.dtype
    mixed = torch.empty((tokens, layout.channels), dtype=dtype, device=projected.device)
    launch(
        _conv_kernel, (tokens, ceil_div(layout.channels, block)),
        projected, ring, weight, mixed, batch.positions, states.first, states.reads, states.writes, begin,
        projected.stride(0), **head_shape(layout), CONV=layout.conv, GROUPED=layout.grouped, BLOCK=block, KEEP=decodes,
        num_warps=4, pdl=pdl,
    )  # fmt: skip
    return mixed
