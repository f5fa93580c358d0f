"""The grouped product of `moe` on experts in MXFP4, read as stored: 4-bit floats and a power of two for 32 of them.

`mxfp4_fragments` says how they lie in memory. With bfloat16 activations, from Hopper on, `mxfp4_stream` multiplies
where there are few tokens, `mxfp4_staged` where an expert has about ten, and where it has many `mxfp4_prompt` on
Hopper, `mxfp4_stream` on later devices; one token has a kernel for both products (`mxfp4_one`). The kernel of this file
is for all else: earlier devices, other activations, route weights that meet the inputs, and Triton's interpreter; it
takes weights out of their words in plain operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.backends.cuda.kernels import mxfp4_prompt, mxfp4_staged, mxfp4_stream
from penstock.engine.backends.cuda.kernels.activation import gate_options, gated
from penstock.engine.backends.cuda.kernels.common import (
    INTERPRETED,
    ceil_div,
    launch,
    launch_successor,
    next_power_of_2,
    wait_for_inputs,
)
from penstock.engine.backends.cuda.kernels.moe_plan import (
    GROUP,
    FewPairs,
    Plan,
    add_up,
    few_tile,
    place_of,
    planned_tile,
)
from penstock.engine.backends.cuda.kernels.mxfp4_fragments import Mxfp4Fragments
from penstock.engine.backends.cuda.kernels.mxfp4_prompt import PromptConfig
from penstock.engine.backends.cuda.kernels.mxfp4_staged import StagedConfig
from penstock.engine.backends.cuda.kernels.mxfp4_stream import StreamConfig
from penstock.engine.backends.interface import Activation


@dataclass(frozen=True, slots=True)
class PlainConfig:
    """Shape of the launch of the kernel of this file."""

    block_m: int = 16
    block_n: int = 32
    num_warps: int = 4


@triton.jit
def _half(word: tl.tensor, ROTATION: tl.constexpr, HIGH: tl.constexpr) -> tl.tensor:
    """Half of a word that is rotated to the left."""
    if ROTATION > 0:
        word = (word << ROTATION) | ((word >> (32 - ROTATION)) & ((1 << ROTATION) - 1))
    return word >> 16 if HIGH else word


@triton.jit
def _value(first: tl.tensor, second: tl.tensor, power: tl.tensor, PAIR: tl.constexpr, HIGH: tl.constexpr) -> tl.tensor:
    """Input 2 * PAIR + HIGH of the sixteen in two words, in float32; see `mxfp4_fragments._PLACES`."""
    if PAIR == 0:
        bits = _half(first, 6, HIGH) & 0x81C0
    elif PAIR == 1:
        bits = _half(first, 2, HIGH) & 0x81C0
    elif PAIR == 2:
        bits = _half(first, 12, HIGH) & 0x81C0
    elif PAIR == 3:
        bits = _half(second, 4, HIGH) & 0x81C0
    elif PAIR == 4:
        bits = _half(second, 0, HIGH) & 0x81C0
    elif PAIR == 5:
        bits = _half(second, 10, HIGH) & 0x81C0
    elif PAIR == 6:
        bits = (_half(first, 1, HIGH) & 0x8100) | (_half(second, 29, HIGH) & 0xC0)
    else:
        bits = (_half(first, 0, HIGH) & 0x8100) | (_half(second, 6, HIGH) & 0xC0)
    return (bits << 16).to(tl.float32, bitcast=True) * (power << 23).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["tiles"])
def _plain_kernel(
    x_ptr: tl.tensor,
    word_ptr: tl.tensor,
    exponent_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    order_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    route_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    counter_ptr: tl.tensor,
    tiles: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    PAIR_BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAIRED: tl.constexpr,
    GATED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    GATE: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BIASED: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    COLUMNS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    WIDE: tl.constexpr = 2 * N if GATED else N
    ROWS: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    ROW_TILES: tl.constexpr = (WIDE // 2 + 7) // 8 if PAIRED else (WIDE + 15) // 16
    STEPS: tl.constexpr = (K + 63) // 64
    SPANS: tl.constexpr = (STEPS + 3) // 4
    tile, block = place_of(tl.program_id(0), tiles, COLUMNS, GROUP)
    launch_successor(PDL)
    wait_for_inputs(PDL)
    if PAIR_BLOCK > 0:
        present, expert, m, in_m, pair, here = few_tile(order_ptr, tile, tiles, EXPERTS, PAIR_BLOCK, BLOCK_M)
    else:
        present, expert, m, in_m, pair = planned_tile(order_ptr, starts_ptr, tile, EXPERTS, EXPERT_BLOCK, BLOCK_M)
    if not present:
        return
    source = pair // TOP_K if GATED else tl.where(in_m, m, 0)
    j = tl.arange(0, 16)
    x_rows = x_ptr + source.to(tl.int64)[:, None] * K + (j // 4 * 16 + j % 4)[None, :]
    if WEIGHTED:
        route = tl.load(route_ptr + pair, mask=in_m, other=0.0)
    # Gate rows, then up rows. Those past the end read the last one: their sums are not stored.
    r = tl.arange(0, ROWS)
    row = tl.minimum(block * BLOCK_N + r % BLOCK_N, N - 1) + r // BLOCK_N * N
    if PAIRED:
        within = row % (WIDE // 2)
        row_tile, g, half = within // 8, within % 8, row // (WIDE // 2)
    else:
        row_tile, g, half = row // 16, row % 8, row // 8 % 2
    t = tl.arange(0, 4)
    words = (
        word_ptr + expert.to(tl.int64) * (ROW_TILES * STEPS * 128)
        + (row_tile * (STEPS * 128) + g * 16 + half * 2)[:, None] + t[None, :] * 4
    )  # fmt: skip
    exponents = (
        exponent_ptr + expert.to(tl.int64) * (ROW_TILES * SPANS * 32)
        + (row_tile * (SPANS * 32) + g * 4 + half)[:, None] + t[None, :] // 2 * 2
    )  # fmt: skip
    acc = tl.zeros([ROWS, BLOCK_M], tl.float32)
    for step in range(STEPS):
        first, second = tl.load(words + step * 128), tl.load(words + step * 128 + 1)
        power = (tl.load(exponents + step // 4 * 32) >> (step % 4 * 8)) & 255
        for i in tl.static_range(4):
            even = tl.join(_value(first, second, power, 2 * i, False), _value(first, second, power, 2 * i, True))
            odd = tl.join(_value(first, second, power, 2 * i + 1, False), _value(first, second, power, 2 * i + 1, True))
            w = tl.reshape(tl.permute(tl.join(even, odd), [0, 1, 3, 2]), [ROWS, 16])
            mask = in_m[:, None]
            if K % 64 != 0:
                mask = mask & (step * 64 + (j // 4 * 16)[None, :] < K)
            x = tl.load(x_rows + step * 64 + i * 4, mask=mask, other=0.0)
            if WEIGHTED and GATED:
                x = (x.to(tl.float32) * route[:, None]).to(x.dtype)
            acc = tl.dot(w.to(x.dtype), tl.trans(x), acc, input_precision=PRECISION)
    acc *= tl.load(scale_ptr + expert * WIDE + row)[:, None]
    if BIASED:
        acc += tl.load(bias_ptr + expert * WIDE + row).to(tl.float32)[:, None]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(acc, [2, BLOCK_N, BLOCK_M]), [1, 2, 0]))
        acc = gated(gate, up, GATE, ALPHA, LIMIT)
    elif WEIGHTED:
        acc *= route[None, :]
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    if PAIR_BLOCK > 0 and not GATED:
        add_up(
            tl.trans(acc), pair, in_m, n, block, here, tiles, sums_ptr, counter_ptr, out_ptr, N, TOP_K, BLOCK_M,
        )  # fmt: skip
    else:
        out = out_ptr + (m if GATED else pair).to(tl.int64)[None, :] * N + n[:, None]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=in_m[None, :] & (n < N)[:, None])


def choose(
    pairs: int, experts: int, wide: bool, few: int = 0, *, hopper: bool = True
) -> StreamConfig | StagedConfig | PromptConfig:
    """Launch shape for bfloat16 from host values; see `moe.choose`. `wide`: with two products in a program. `few`:
    tokens, where there are few. `hopper`: no other device has the instructions of `mxfp4_prompt`."""
    if few == 1:
        return StreamConfig(8, 1, 4, ahead=8) if wide else StreamConfig(8, 1, 4, ahead=4, split=4)
    if 0 < few <= 8:
        return StreamConfig(8, 2, 2, ahead=4) if wide else StreamConfig(8, 1, 4, ahead=4, split=2)
    if few:
        return StreamConfig(16, 2, 4, ahead=2, registers=128)  # 16 warps to a multiprocessor
    share = pairs / experts
    if share <= 12:
        # Half as many rows to a program of down, or the last of them would have the device to themselves.
        return StagedConfig(16, 2, 4, ahead=4) if wide else StagedConfig(16, 1, 4, ahead=4, registers=80)
    if share <= 24 or not hopper:
        return StreamConfig(32, 2, 4, ahead=1, registers=128)
    return PromptConfig(64 if share <= 128 else 128, 2, 8)


@cache
def _generation(device: torch.device) -> int:
    """The major number of its compute capability; 9 (Hopper) where kernels are only built."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9


def grouped_linear(
    x: Tensor,
    stack: Mxfp4Fragments,
    bias: Tensor | None,
    schedule: Plan | FewPairs,
    top_k: int,
    *,
    gated: bool,
    route_weights: Tensor | None = None,
    activation: Activation = "silu",
    counters: Tensor | None = None,
    config: PlainConfig | StreamConfig | StagedConfig | PromptConfig | None = None,
    fixed: bool = False,
    pdl: bool = False,
) -> Tensor:
    """As `moe.grouped_linear`; `stack` of a gated product is `paired`. `fixed`: in the one launch shape of
    deterministic mode, in which a token's sums do not depend on the others."""
    if config is None:
        few = len(schedule.chosen) if isinstance(schedule, FewPairs) else 0
        generation = _generation(x.device)
        plain = x.dtype != torch.bfloat16 or INTERPRETED.value or generation < 9
        if plain or (gated and route_weights is not None):
            config = PlainConfig()
        elif fixed:
            config = choose(1, 1, gated)
        else:
            config = choose(schedule.pairs, stack.scale.shape[0], gated, few, hopper=generation == 9)
    if isinstance(config, StreamConfig):
        return mxfp4_stream.grouped_linear(
            x, stack, bias, schedule, top_k, gated=gated, route_weights=route_weights, activation=activation,
            counters=counters, config=config, pdl=pdl,
        )  # fmt: skip
    if isinstance(config, StagedConfig):
        assert isinstance(schedule, Plan)
        return mxfp4_staged.grouped_linear(
            x, stack, bias, schedule, top_k, gated=gated, route_weights=route_weights, activation=activation,
            config=config, pdl=pdl,
        )  # fmt: skip
    if isinstance(config, PromptConfig):
        assert isinstance(schedule, Plan)
        return mxfp4_prompt.grouped_linear(
            x, stack, bias, schedule, top_k, gated=gated, route_weights=route_weights, activation=activation,
            config=config, pdl=pdl,
        )  # fmt: skip
    return _plain(
        x, stack, bias, schedule, top_k, gated=gated, route_weights=route_weights, activation=activation,
        counters=counters, config=config, pdl=pdl,
    )  # fmt: skip


def _plain(
    x: Tensor,
    stack: Mxfp4Fragments,
    bias: Tensor | None,
    schedule: Plan | FewPairs,
    top_k: int,
    *,
    gated: bool,
    route_weights: Tensor | None,
    activation: Activation,
    counters: Tensor | None,
    config: PlainConfig,
    pdl: bool,
) -> Tensor:
    experts, outputs = stack.scale.shape
    n, pairs = outputs // 2 if gated else outputs, schedule.pairs
    few = isinstance(schedule, FewPairs)
    summed = few and not gated
    out = torch.empty((pairs // top_k if summed else pairs, n), dtype=x.dtype, device=x.device)
    if pairs == 0:
        return out
    tiles = schedule.tiles(config.block_m)
    launch(
        _plain_kernel,
        (tiles * ceil_div(n, config.block_n),),
        x,
        *stack.tensors,
        x if bias is None else bias,
        out,
        *schedule.pointers,
        x if route_weights is None else route_weights,
        torch.empty((pairs, n), dtype=torch.float32, device=x.device) if summed else x,
        x if counters is None else counters,
        tiles,
        N=n,
        K=x.shape[1],
        EXPERTS=experts,
        EXPERT_BLOCK=next_power_of_2(experts),
        PAIR_BLOCK=next_power_of_2(pairs) if few else 0,
        TOP_K=top_k,
        GROUP=GROUP,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        PAIRED=stack.paired,
        GATED=gated,
        WEIGHTED=route_weights is not None,
        **gate_options(activation),
        BIASED=bias is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=config.num_warps,
        pdl=pdl,
    )
    return out
