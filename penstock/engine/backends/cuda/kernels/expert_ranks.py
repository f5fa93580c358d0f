"""Which experts a token visits, in kernels that find that out in every program themselves.

The same choice as that of `moe_route`, which has a launch of its own. All warps of a program compute the same.
"""

from __future__ import annotations

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from penstock.engine.backends.cuda.kernels.mxfp4_tile import bits


@constexpr_function
def _lanes(count: int, rank: int, axis: int) -> list[list[int]]:
    """Bases of the threads of a warp along an axis; those that are too many have what others have."""
    found: list[list[int]] = bits(min(32, count), 1, rank, axis)
    return found + [[0] * rank for _ in range(5 - len(found))]


@constexpr_function
def _rank_layout(warps: int, block: int) -> gl.DistributedLinearLayout:
    """Of pairs of experts: the same in every warp, and all seconds of a first in one thread."""
    return gl.DistributedLinearLayout(
        bits(block, 1, 2, 1) + (bits(block // 32, 32, 2, 0) if block > 32 else []),
        _lanes(block, 2, 0),
        [[0, 0] for _ in bits(warps, 1, 2, 0)],
        [],
        [block, block],
    )


@gluon.jit
def ranked(
    logits_ptr: gl.tensor, EXPERTS: gl.constexpr, BLOCK_E: gl.constexpr, WARPS: gl.constexpr
) -> tuple[gl.tensor, gl.tensor, gl.tensor]:
    """All experts, their scores, and their places in the order of these."""
    PAIRS: gl.constexpr = _rank_layout(WARPS, BLOCK_E)
    e = gl.arange(0, BLOCK_E, layout=gl.SliceLayout(1, PAIRS))
    other = gl.arange(0, BLOCK_E, layout=gl.SliceLayout(0, PAIRS))
    x = gl.load(logits_ptr + e, mask=e < EXPERTS, other=float("-inf"))
    y = gl.load(logits_ptr + other, mask=other < EXPERTS, other=float("-inf"))
    before = (y[None, :] > x[:, None]) | ((y[None, :] == x[:, None]) & (other[None, :] < e[:, None]))
    return e, x, gl.sum(before.to(gl.int32), axis=1)


@gluon.jit
def totals(
    x: gl.tensor,
    place: gl.tensor,
    TOP_K: gl.constexpr,
    ADDED: gl.constexpr,
    SIGMOID: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor]:
    """What the weights of experts are in proportion to, and what they are divided by; see `moe_route`."""
    if SIGMOID:
        p = 1.0 / (1.0 + gl.exp(-x))
        total = 1.0
    else:
        p = gl.exp(x - gl.max(x, axis=0))
        total = gl.sum(p, axis=0)
    if ADDED is not None:
        total = gl.sum(gl.where(place < TOP_K, p, 0.0), axis=0) + ADDED
    return p, total


@gluon.jit
def of_visit(found: gl.tensor, visit: gl.tensor, TOP_K: gl.constexpr) -> gl.tensor:
    """Of a tuple with one number for each visit, the one at each `visit`."""
    value = visit * 0 + found[0]
    for i in gl.static_range(1, TOP_K):
        value = gl.where(visit == i, found[i], value)
    return value
