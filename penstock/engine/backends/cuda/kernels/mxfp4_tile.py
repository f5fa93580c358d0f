"""What the kernels on `mxfp4_fragments` share: how threads read words, make operands of them, and store sums.

A tensor-core product takes rows of weights as its tall side. Tiles of 16 rows lie in as many warps, or one behind the
other in one warp.
"""

from __future__ import annotations

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from penstock.engine.backends.cuda.kernels.activation import gated as _gated

gated = gluon.jit(_gated.fn)

# Of two words and one power: see `mxfp4_fragments._PLACES`. The power of step i of four is byte i of a word.
_UNPACK = """{
.reg .b32 m, u, v;
prmt.b32 m, $10, 0, 0x4%d4%d;
shl.b32 m, m, 7;
shl.b32 u, $8, 6;
and.b32 u, u, 0x81C081C0;
mul.bf16x2 $0, u, m;
shl.b32 u, $8, 2;
and.b32 u, u, 0x81C081C0;
mul.bf16x2 $1, u, m;
shf.l.wrap.b32 u, $8, $8, 12;
and.b32 u, u, 0x81C081C0;
mul.bf16x2 $2, u, m;
shl.b32 u, $9, 4;
and.b32 u, u, 0x81C081C0;
mul.bf16x2 $3, u, m;
and.b32 u, $9, 0x81C081C0;
mul.bf16x2 $4, u, m;
shf.l.wrap.b32 u, $9, $9, 10;
and.b32 u, u, 0x81C081C0;
mul.bf16x2 $5, u, m;
shl.b32 u, $8, 1;
and.b32 u, u, 0x81008100;
shr.b32 v, $9, 3;
lop3.b32 u, v, 0x00C000C0, u, 0xEA;
mul.bf16x2 $6, u, m;
and.b32 u, $8, 0x81008100;
shl.b32 v, $9, 6;
lop3.b32 u, v, 0x00C000C0, u, 0xEA;
mul.bf16x2 $7, u, m;
}"""


@constexpr_function
def _unpack_code(number: int) -> str:
    return _UNPACK % (number, number)


@constexpr_function
def bits(count: int, first: int, rank: int, axis: int) -> list[list[int]]:
    """Bases of a linear layout along an axis: `first`, twice that, ..., below `first * count`."""
    bases = []
    step = first
    while step < first * count:
        bases.append([step if i == axis else 0 for i in range(rank)])
        step *= 2
    return bases


@constexpr_function
def word_layout(warps: int, rows: int) -> gl.DistributedLinearLayout:
    """Of words [tiles of 16 rows, 8, 4, 4]."""
    return gl.DistributedLinearLayout(
        bits(4, 1, 4, 3) + bits(rows, warps, 4, 0),
        bits(4, 1, 4, 2) + bits(8, 1, 4, 1),
        bits(warps, 1, 4, 0),
        [],
        [warps * rows, 8, 4, 4],
    )


@constexpr_function
def half_layout(warps: int, rows: int) -> gl.DistributedLinearLayout:
    """The same with the last axis split into rows g and g + 8, and the two words of a row."""
    return gl.DistributedLinearLayout(
        bits(2, 1, 5, 4) + bits(2, 1, 5, 3) + bits(rows, warps, 5, 0),
        bits(4, 1, 5, 2) + bits(8, 1, 5, 1),
        bits(warps, 1, 5, 0),
        [],
        [warps * rows, 8, 4, 2, 2],
    )


@constexpr_function
def token_layout(warps: int, tokens: int) -> gl.DistributedLinearLayout:
    """Of inputs [tokens, 64]: the same in every warp."""
    return gl.DistributedLinearLayout(
        bits(16, 1, 2, 1) + bits(tokens // 8, 8, 2, 0),
        bits(4, 16, 2, 1) + bits(8, 1, 2, 0),
        [[0, 0] for _ in bits(warps, 1, 2, 0)],
        [],
        [tokens, 64],
    )


@gluon.jit
def weights_of(
    words: gl.tensor,
    powers: gl.tensor,
    STEP: gl.constexpr,
    HALVES: gl.constexpr,
    OPERAND: gl.constexpr,
    SHAPE: gl.constexpr,
) -> gl.tensor:
    """Operand [rows, 64] or [tiles, 16, 64] of words [tiles, 8, 4, 4] and powers [tiles, 8, 4, 2] of four steps."""
    TILES: gl.constexpr = words.shape[0]
    split = gl.convert_layout(gl.reshape(words, [TILES, 8, 4, 2, 2]), HALVES, assert_trivial=True)
    p0, p1, p2, p3, p4, p5, p6, p7 = gl.inline_asm_elementwise(
        _unpack_code(STEP),
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r",
        [split, gl.expand_dims(powers, 4)],
        dtype=(
            gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16,
        ),
        is_pure=True,
        pack=2,
    )  # fmt: skip
    low = gl.join(gl.join(p0, p1), gl.join(p2, p3))
    high = gl.join(gl.join(p4, p5), gl.join(p6, p7))
    every = gl.join(low, high)  # tile, g, t, half, e, and the three bits of r, lowest first
    every = gl.permute(every, (0, 3, 1, 7, 6, 5, 2, 4))
    return gl.convert_layout(gl.reshape(every, SHAPE), OPERAND, assert_trivial=True)


@gluon.jit
def inputs_of(x: gl.tensor, OPERAND: gl.constexpr) -> gl.tensor:
    """Operand [64, tokens] of inputs [tokens, 64], in the order of `weights_of`."""
    TOKENS: gl.constexpr = x.shape[0]
    split = gl.permute(gl.reshape(x, [TOKENS, 4, 2, 2, 2, 2]), (2, 3, 4, 1, 5, 0))
    return gl.convert_layout(gl.reshape(split, [64, TOKENS]), OPERAND, assert_trivial=True)


@gluon.jit
def in_order(WARPS: gl.constexpr) -> None:
    """Keep the loads before this point there: the assembler would move all of a loop to its end, where nothing is left
    to do while they are under way."""
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.b32 $0, $1;",
        "=r,r",
        [gl.arange(0, 32 * WARPS, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def tiles_of(block: gl.tensor, ROW_TILES: gl.constexpr, HEIGHT: gl.constexpr, LAYOUT: gl.constexpr) -> gl.tensor:
    """Tiles of 16 rows of a block [HEIGHT]; those past the end are the last one: their sums are not stored."""
    tile = gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))
    return gl.minimum(block * HEIGHT + tile, ROW_TILES - 1)


@gluon.jit
def at_words(words_ptr: gl.tensor, start: gl.tensor, LAYOUT: gl.constexpr) -> gl.tensor:
    """Where the words [tiles, 8, 4, 4] of a step lie, of tiles that begin at `start`."""
    g = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))
    t = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT))))
    w = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))))
    within = g[None, :, None, None] * 16 + t[None, None, :, None] * 4 + w[None, None, None, :]
    return words_ptr + start[:, None, None, None] + within


@gluon.jit
def at_powers(exponents_ptr: gl.tensor, start: gl.tensor, LAYOUT: gl.constexpr) -> gl.tensor:
    """The same of the powers [tiles, 8, 4, 2] of four steps."""
    g = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))
    t = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT))))
    h = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))))
    within = g[None, :, None, None] * 4 + (t // 2)[None, None, :, None] * 2 + h[None, None, None, :]
    return exponents_ptr + start[:, None, None, None] + within


@gluon.jit
def load_inputs(rows: gl.tensor, k: gl.tensor, step: gl.tensor, K: gl.constexpr) -> gl.tensor:
    """Of the rows of tokens, those of a step; zeros past the last."""
    if K % 64 != 0:
        x = gl.load(rows + step * 64, mask=(step * 64 + k < K)[None, :], other=0.0)
    else:
        x = gl.load(rows + step * 64)
    return x


@gluon.jit
def rows_of(row: gl.tensor, WIDE: gl.constexpr, PAIRED: gl.constexpr) -> tuple[gl.tensor, gl.tensor]:
    """Rows of the matrix at places of tiles, and which of them exist; the others are some that do."""
    in_row = row < WIDE
    if PAIRED:
        within = row // 16 * 8 + row % 8
        in_row = within < WIDE // 2
        row = gl.minimum(within, WIDE // 2 - 1) + row // 8 % 2 * (WIDE // 2)
    return gl.minimum(row, WIDE - 1), in_row


@gluon.jit
def store_gated(
    acc: gl.tensor,
    out_ptr: gl.tensor,
    m: gl.tensor,
    in_m: gl.tensor,
    block: gl.tensor,
    N: gl.constexpr,
    GATE: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
) -> None:
    """The gates and ups of `paired` tiles [rows, tokens], gated, into rows `m` of `out_ptr`."""
    ROWS: gl.constexpr = acc.shape[0] // 2
    TOKENS: gl.constexpr = acc.shape[1]
    both = gl.permute(gl.reshape(acc, [ROWS // 8, 2, 8, TOKENS]), (0, 2, 3, 1))
    gate, up = gl.split(both)
    y = gl.reshape(gated(gate, up, GATE, ALPHA, LIMIT), [ROWS, TOKENS])
    n = gl.arange(0, ROWS, layout=gl.SliceLayout(1, y.type.layout)) + block * ROWS
    m_y = gl.convert_layout(m, gl.SliceLayout(0, y.type.layout)).to(gl.int64)
    in_y = gl.convert_layout(in_m, gl.SliceLayout(0, y.type.layout))[None, :] & (n < N)[:, None]
    gl.store(out_ptr + m_y[None, :] * N + n[:, None], y.to(out_ptr.dtype.element_ty), mask=in_y)
