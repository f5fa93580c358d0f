"""Choosing tokens from logits [rows, vocab]: argmax and Gumbel-max draws.

A draw is the argmax of logits / temperature plus noise that depends on the row's key and the index alone
(`reference.noise` defines it; the hash is computed here, so only the logits are read). A row is cut into shares of
a few thousand entries, one per program, all of whose loads are under way at once; a second, tiny kernel takes the best
of them, the first of equals.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.backends.cuda.kernels.common import (
    INTERPRETED,
    ceil_div,
    launch,
    launch_successor,
    next_power_of_2,
    wait_for_inputs,
)

_TILE = 1024
_TILES = 4


@triton.jit
def _fast_log(x: tl.tensor) -> tl.tensor:
    """Natural logarithm from the hardware's base-2 one: absolute error 2^-22 near one, relative 2^-22 elsewhere."""
    if INTERPRETED:
        y = tl.log2(x)
    else:
        y = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return y * 0.6931471805599453


@triton.jit
def gumbel_noise(key: tl.tensor, index: tl.tensor) -> tl.tensor:
    """Noise of `index` (int64) under `key` (int64, the bits of an unsigned word); see `reference.noise.gumbel`."""
    x = (key + index * -0x61C8864680B583EB).to(tl.uint64, bitcast=True)
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    bits = (x >> 41).to(tl.int32)
    u = (bits.to(tl.float32) + 0.5) * 1.1920928955078125e-07
    # Near one, log(u) is small and its error is not: there, with the exact complement v = 1 - u, use the series
    # -log(1 - v) = v + v^2/2 + v^3/3 + ...
    v = ((8388607 - bits).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    near_one = v * (1.0 + v * (0.5 + v * (0.3333333333 + v * (0.25 + v * 0.2))))
    return -_fast_log(tl.where(v < 0.015625, near_one, -_fast_log(u)))


@triton.jit
def _entries(row_ptr: tl.tensor, index: tl.tensor, VOCAB: tl.constexpr) -> tl.tensor:
    return tl.load(row_ptr + index, mask=index < VOCAB, other=float("-inf"))


@triton.jit
def _partial_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    key_ptr: tl.tensor,
    threshold_ptr: tl.tensor,
    value_ptr: tl.tensor,
    index_ptr: tl.tensor,
    stride: tl.tensor,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    RANDOM: tl.constexpr,
    FILTERED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * (TILES * TILE)
    lane = tl.arange(0, TILE)
    launch_successor(PDL)
    wait_for_inputs(PDL)
    entries = logits_ptr + row * stride
    scores = (_entries(entries, begin + lane, VOCAB),)
    for i in tl.static_range(1, TILES):
        scores = scores + (_entries(entries, begin + i * TILE + lane, VOCAB),)  # type: ignore[assignment]
    best = tl.full([TILE], float("-inf"), tl.float32)
    where = begin + tl.zeros([TILE], tl.int32)
    temperature = 0.0
    inverse = 0.0
    key = tl.full([], 0, tl.int64)
    threshold = float("-inf")
    if RANDOM:
        temperature = tl.load(temperature_ptr + row)
        inverse = 1.0 / tl.where(temperature > 0.0, temperature, 1.0)
        key = tl.load(key_ptr + row)
        if FILTERED:
            threshold = tl.load(threshold_ptr + row)
    for i in tl.static_range(TILES):
        index = begin + i * TILE + lane
        score = scores[i].to(tl.float32)
        if RANDOM:  # noqa: SIM102 (one is known when the kernel is built, the other when it runs)
            if temperature > 0.0:
                if FILTERED:
                    # Rounded as in the threshold's own computation, or a token on the cut could fall out.
                    score = tl.div_rn(score, tl.zeros([TILE], tl.float32) + temperature)
                    score = tl.where(score >= threshold, score, float("-inf"))
                else:
                    score *= inverse
                score += gumbel_noise(key, index.to(tl.int64))
        better = score > best
        best = tl.where(better, score, best)
        where = tl.where(better, index, where)
    top = tl.max(best, axis=0)
    at = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(value_ptr + at, top)
    tl.store(index_ptr + at, tl.min(tl.where(best == top, where, VOCAB), axis=0))


@triton.jit
def _final_kernel(
    value_ptr: tl.tensor,
    index_ptr: tl.tensor,
    out_ptr: tl.tensor,
    VOCAB: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, SPLIT_BLOCK)
    launch_successor(PDL)
    wait_for_inputs(PDL)
    value = tl.load(value_ptr + row * SPLITS + s, mask=s < SPLITS, other=float("-inf"))
    index = tl.load(index_ptr + row * SPLITS + s, mask=s < SPLITS, other=VOCAB)
    top = tl.max(value, axis=0)
    token = tl.min(tl.where(value == top, index, VOCAB), axis=0)
    # A row of NaN has no largest entry; its token must still be one of the vocabulary.
    tl.store(out_ptr + row, tl.minimum(token, VOCAB - 1).to(tl.int64))


def _best(
    logits: Tensor,
    temperatures: Tensor | None,
    keys: Tensor | None,
    thresholds: Tensor | None,
    pdl: bool,
) -> Tensor:
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return out
    splits = ceil_div(vocab, _TILE * _TILES)
    value = torch.empty((rows, splits), dtype=torch.float32, device=logits.device)
    index = torch.empty((rows, splits), dtype=torch.int32, device=logits.device)
    launch(
        _partial_kernel,
        (rows, splits),
        logits,
        logits if temperatures is None else temperatures,
        logits if keys is None else keys,
        logits if thresholds is None else thresholds,
        value,
        index,
        logits.stride(0),
        VOCAB=vocab,
        TILE=_TILE,
        TILES=_TILES,
        RANDOM=temperatures is not None,
        FILTERED=thresholds is not None,
        num_warps=4,
        pdl=pdl,
    )
    launch(
        _final_kernel,
        (rows,),
        value,
        index,
        out,
        VOCAB=vocab,
        SPLITS=splits,
        SPLIT_BLOCK=next_power_of_2(splits),
        num_warps=1,
        pdl=pdl,
    )
    return out


def argmax(logits: Tensor, *, pdl: bool = False) -> Tensor:
    """int64 [rows]: index of the largest entry of each row; the first of equals."""
    return _best(logits, None, None, None, pdl)


def gumbel_argmax(
    logits: Tensor,
    temperatures: Tensor,
    keys: Tensor,
    thresholds: Tensor | None = None,
    *,
    pdl: bool = False,
) -> Tensor:
    """int64 [rows]: a draw from softmax(logits / temperature) of each row; temperature 0 means argmax.

    `thresholds`, from `filters.thresholds`, leaves out what the filters exclude.
    """
    return _best(logits, temperatures, keys, thresholds, pdl)
