"""The ends of a decode step, on the device: what the next step reads is made of what the last one wrote.

Every running sequence owns a row of persistent device tensors. A step names its rows; `prepare_decode` gathers their
last tokens, lengths, blocks and sampling parameters into the step's inputs, and `finish_decode` puts the sampled
tokens back. So a step needs nothing from the host but the row numbers, and can be launched before the host has seen
the tokens of the one before. A negative row is padding: its token goes to slot 0, and it attends to nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.kernels.triton.common import ceil_div, launch, launch_successor, wait_for_inputs

_LANES = 128


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """Inputs of a decode step of B rows, at fixed addresses."""

    token_ids: Tensor
    """int64 [B]."""
    positions: Tensor
    """int64 [B]."""
    slots: Tensor
    """int64 [B]."""
    context_lens: Tensor
    """int32 [B]."""
    keys: Tensor
    """int64 [B]: noise keys of the tokens to be sampled."""
    temperatures: Tensor
    """float32 [B]."""

    @classmethod
    def empty(cls, count: int, device: torch.device) -> DecodeInputs:
        wide = [torch.empty(count, dtype=torch.int64, device=device) for _ in range(4)]
        return cls(
            token_ids=wide[0],
            positions=wide[1],
            slots=wide[2],
            context_lens=torch.empty(count, dtype=torch.int32, device=device),
            keys=wide[3],
            temperatures=torch.empty(count, dtype=torch.float32, device=device),
        )


@triton.jit(do_not_specialize=["count"])
def _prepare_kernel(
    rows_ptr: tl.tensor,
    last_token_ptr: tl.tensor,
    length_ptr: tl.tensor,
    table_ptr: tl.tensor,
    seed_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    token_ptr: tl.tensor,
    position_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    context_ptr: tl.tensor,
    key_ptr: tl.tensor,
    out_temperature_ptr: tl.tensor,
    table_stride: tl.tensor,
    temperature_stride: tl.tensor,
    count: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    LANES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    i = tl.program_id(0) * LANES + tl.arange(0, LANES)
    launch_successor(PDL)
    wait_for_inputs(PDL)
    listed = i < count
    row = tl.load(rows_ptr + i, mask=listed, other=-1).to(tl.int64)
    real = row >= 0
    token = tl.load(last_token_ptr + row, mask=real, other=0).to(tl.int64)
    position = tl.load(length_ptr + row, mask=real, other=0).to(tl.int64)
    block = tl.load(table_ptr + row * table_stride + position // BLOCK_SIZE, mask=real, other=0).to(tl.int64)
    slot = tl.where(real, block * BLOCK_SIZE + position % BLOCK_SIZE, 0)
    context = tl.where(real, position + 1, 0)
    # As kernels.noise.row_keys: the seed and the position to be sampled, through splitmix64.
    seed = tl.load(seed_ptr + row, mask=real, other=0)
    x = (seed + (position + 1) * -0x2ECBDABC217D106B).to(tl.uint64, bitcast=True)
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    temperature = tl.load(temperature_ptr + row * temperature_stride, mask=real, other=0.0)
    tl.store(token_ptr + i, token, mask=listed)
    tl.store(position_ptr + i, position, mask=listed)
    tl.store(slot_ptr + i, slot, mask=listed)
    tl.store(context_ptr + i, context.to(tl.int32), mask=listed)
    tl.store(key_ptr + i, x.to(tl.int64, bitcast=True), mask=listed)
    tl.store(out_temperature_ptr + i, temperature, mask=listed)


@triton.jit(do_not_specialize=["count"])
def _finish_kernel(
    rows_ptr: tl.tensor,
    sampled_ptr: tl.tensor,
    last_token_ptr: tl.tensor,
    length_ptr: tl.tensor,
    count: tl.tensor,
    LANES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    i = tl.program_id(0) * LANES + tl.arange(0, LANES)
    launch_successor(PDL)
    wait_for_inputs(PDL)
    row = tl.load(rows_ptr + i, mask=i < count, other=-1).to(tl.int64)
    real = row >= 0
    token = tl.load(sampled_ptr + i, mask=real, other=0)
    length = tl.load(length_ptr + row, mask=real, other=0)
    tl.store(last_token_ptr + row, token.to(last_token_ptr.dtype.element_ty), mask=real)
    tl.store(length_ptr + row, length + 1, mask=real)


def prepare_decode(
    rows: Tensor,
    last_tokens: Tensor,
    lengths: Tensor,
    block_tables: Tensor,
    seeds: Tensor,
    temperatures: Tensor,
    block_size: int,
    out: DecodeInputs,
    *,
    pdl: bool = False,
) -> None:
    """Fill `out` for `rows` (int32 or int64 [B], negative: padding).

    `last_tokens` (int64), `lengths` (int32: tokens already in the cache, that is the position of the last token),
    `seeds` (int64) and `temperatures` (float32, may be a strided column) are indexed by row; so is `block_tables`.
    """
    count = rows.shape[0]
    if count == 0:
        return
    launch(
        _prepare_kernel,
        (ceil_div(count, _LANES),),
        rows,
        last_tokens,
        lengths,
        block_tables,
        seeds,
        temperatures,
        out.token_ids,
        out.positions,
        out.slots,
        out.context_lens,
        out.keys,
        out.temperatures,
        block_tables.stride(0),
        temperatures.stride(0),
        count,
        BLOCK_SIZE=block_size,
        LANES=_LANES,
        num_warps=4,
        pdl=pdl,
    )


def finish_decode(rows: Tensor, sampled: Tensor, last_tokens: Tensor, lengths: Tensor, *, pdl: bool = False) -> None:
    """`last_tokens[rows] = sampled` and `lengths[rows] += 1`, padding left out. No row may appear twice."""
    count = rows.shape[0]
    if count == 0:
        return
    launch(
        _finish_kernel,
        (ceil_div(count, _LANES),),
        rows,
        sampled,
        last_tokens,
        lengths,
        count,
        LANES=_LANES,
        num_warps=4,
        pdl=pdl,
    )
