"""Linear layers of a few tokens, y = x W^T: bound by reading the weights once, so built to keep reads in flight.

Two kernels. `rows`, for one token: each program owns a few weight rows and multiplies them in ordinary arithmetic,
with many independent wide loads in flight. `tiles`, for more: ordinary arithmetic would be the limit, so weight rows
are the tall side of a tensor-core product whose narrow side is the batch, fed by an asynchronous copy pipeline.

What follows the linear in a decoder layer can be folded in, which saves launches: adapters, the residual, and the SiLU
gate. So can the RMS norm before small weights of one token. Elsewhere that is a launch of its own: folded in, every
program reads the gains and squares the input again, which costs more than the launch.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from penstock.engine.backends.cuda.kernels import common
from penstock.engine.backends.cuda.kernels.activation import silu_mul, to_half
from penstock.engine.backends.cuda.kernels.common import ceil_div, launch, launch_successor, wait_for_inputs
from penstock.engine.backends.cuda.kernels.epilogue import epilogue
from penstock.engine.backends.cuda.kernels.gemv_shapes import GemvConfig, choose, folds_norm, vendor_wins
from penstock.engine.backends.cuda.kernels.inline_lora import (
    COPIES,
    TILE_ROWS,
    InlineLora,
    expand,
    look,
    part_of,
    shrink_row,
    shrink_tile,
    slots_and_ranks,
    up_rows,
)
from penstock.engine.backends.cuda.kernels.norm import rms_norm
from penstock.engine.backends.cuda.kernels.norm_shrink import rms_norm_shrink

MAX_BATCH = 8
"""Above this cuBLAS is the better choice."""


@triton.jit
def _sums(parts: tl.tensor, FIRST: tl.constexpr, COUNT: tl.constexpr) -> tl.tensor:
    """Sums of `COUNT` of the vectors `parts`, in one reduction; four come in the order 0, 2, 1, 3."""
    if COUNT == 1:
        total = tl.sum(parts[FIRST], axis=0) + tl.zeros([1], tl.float32)
    elif COUNT == 2:
        total = tl.sum(tl.join(parts[FIRST], parts[FIRST + 1]), axis=0)
    else:
        low = tl.join(parts[FIRST], parts[FIRST + 1])
        high = tl.join(parts[FIRST + 2], parts[FIRST + 3])
        total = tl.reshape(tl.sum(tl.join(low, high), axis=0), [4])
    return total


@triton.jit
def _weights(
    weight_ptr: tl.tensor,
    first: tl.tensor,
    r: tl.constexpr,
    at: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """Columns `at` of a program's r-th weight row. Rows past the end read the last row: their sums are not stored."""
    row = tl.minimum(first + r % BLOCK_N, N - 1).to(tl.int64) + r // BLOCK_N * N
    return tl.load(weight_ptr + row * K + at, mask=at < K, other=0.0, eviction_policy="evict_first")


@triton.jit
def _rows_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    bank_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    slot_stride: tl.tensor,
    start: tl.tensor,
    norm_ptr: tl.tensor,
    eps: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
    R: tl.constexpr = 0,
    PARTS: tl.constexpr = 0,
    END_0: tl.constexpr = 0,
    END_1: tl.constexpr = 0,
    REPLICAS: tl.constexpr = 1,
    SHRINKS: tl.constexpr = 0,
    ADAPTED: tl.constexpr = False,
    NORM: tl.constexpr = False,
) -> None:
    READY: tl.constexpr = SHRINKS == 0
    program = tl.program_id(0)
    if not READY:  # noqa: SIM102 - known when compiled; the other is not
        if program < SHRINKS:
            shrink_row(
                program, x_ptr, bank_ptr, ranks_ptr, slots_ptr, sums_ptr, slot_stride, start,
                K, BLOCK_K, R, PARTS, REPLICAS, PDL,
            )  # fmt: skip
            return
    # One vector of partial sums per weight row (gate rows, then up rows), each laid out over the threads as x is.
    ROWS: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    EARLY: tl.constexpr = min(STEPS, max(1, 8 // ROWS))
    first = (program - SHRINKS) * BLOCK_N
    k = tl.arange(0, BLOCK_K)
    acc = ()
    for _r in tl.static_range(ROWS):
        acc = acc + (tl.zeros([BLOCK_K], tl.float32),)  # type: ignore[assignment]
    launch_successor(PDL)
    one = tl.arange(0, 1)
    if ADAPTED:
        slots, ranks = slots_and_ranks(slots_ptr, ranks_ptr, one, 1)
    # Weights are constants: their first loads may be under way before the input is there.
    early = ()
    for step in tl.static_range(EARLY):
        at = step * BLOCK_K + k
        for r in tl.static_range(ROWS):
            early = early + (_weights(weight_ptr, first, r, at, N, K, BLOCK_N),)  # type: ignore[assignment]
    gains = ()
    square = tl.zeros([BLOCK_K], tl.float32)
    if NORM:
        for step in tl.static_range(STEPS):
            at = step * BLOCK_K + k
            gain = tl.load(norm_ptr + at, mask=at < K, other=0.0, eviction_policy="evict_last")
            gains = gains + (gain,)  # type: ignore[assignment]
    i = tl.arange(0, BLOCK_N)
    n = first + (i // 2 + 2 * (i % 2) if BLOCK_N == 4 else i)
    if ADAPTED:
        # So are the adapter's, and its products may be there already.
        in_n = n < N
        if REPLICAS > 1:
            sums_ptr += program % REPLICAS * (PARTS * R)
        part = part_of(first, PARTS, END_0, END_1)
        b_rows = up_rows(bank_ptr, slots, ranks, n, in_n, slot_stride, start, 0, K, PARTS)
        if GATED:
            b_up = up_rows(bank_ptr, slots, ranks, N + n, in_n, slot_stride, start, 0, K, PARTS)
    # What the sums are finished with is on its way early, too: loaded in the end, every program would wait for it.
    kept = n < N
    scale = 1.0
    up_scale = 1.0
    bias = 0.0
    up_bias = 0.0
    before = 0.0
    if SCALED:
        scale = tl.load(scale_ptr + n, mask=kept, other=0.0)[None, :]
        if GATED:
            up_scale = tl.load(scale_ptr + N + n, mask=kept, other=0.0)[None, :]
    if BIAS:
        bias = tl.load(bias_ptr + n, mask=kept, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up_bias = tl.load(bias_ptr + N + n, mask=kept, other=0.0).to(tl.float32)[None, :]
    wait_for_inputs(PDL)
    if RESIDUAL:
        before = tl.load(residual_ptr + n, mask=kept, other=0.0).to(tl.float32)[None, :]
    if ADAPTED:
        at_sums, seen = look(sums_ptr, one, ranks, part, 0, PARTS * R, READY)
        if GATED:
            at_up, seen_up = look(sums_ptr, one, ranks, 1, 0, PARTS * R, READY)
    for step in tl.static_range(STEPS):
        at = step * BLOCK_K + k
        in_k = at < K
        x = tl.load(x_ptr + at, mask=in_k, other=0.0, eviction_policy="evict_last").to(tl.float32)
        if NORM:
            square += x * x
            x *= gains[step].to(tl.float32)
        new = ()
        for r in tl.static_range(ROWS):
            if step >= EARLY:
                w = _weights(weight_ptr, first, r, at, N, K, BLOCK_N)
            else:
                w = early[step * ROWS + r]
            new = new + (acc[r] + w.to(tl.float32) * x,)  # type: ignore[assignment]
        acc = new
    y = _sums(acc, 0, BLOCK_N)[None, :]
    up = _sums(acc, BLOCK_N, BLOCK_N)[None, :] if GATED else y
    if NORM:
        inverse = tl.rsqrt(tl.sum(square, axis=0) / K + eps)
        y *= inverse
        up *= inverse
    delta = 0.0
    up_delta = 0.0
    if ADAPTED:
        delta = expand(
            at_sums, seen, b_rows, bank_ptr, sums_ptr, one, slots, ranks, n, in_n, part, slot_stride, start,
            K, PARTS, R, READY,
        )  # fmt: skip
        if GATED:
            up_delta = expand(
                at_up, seen_up, b_up, bank_ptr, sums_ptr, one, slots, ranks, N + n, in_n, 1, slot_stride, start,
                K, PARTS, R, READY,
            )  # fmt: skip
    y = y * scale + bias + delta
    if GATED:
        up = up * up_scale + up_bias + up_delta
        y = y / (1.0 + tl.exp(-y)) * up
    y += before
    tl.store(out_ptr + n[None, :], y.to(out_ptr.dtype.element_ty), mask=kept[None, :])


@triton.jit(do_not_specialize=["batch"])
def _tiles_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    bank_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    slot_stride: tl.tensor,
    start: tl.tensor,
    x_stride: tl.tensor,
    batch: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    BATCH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
    R: tl.constexpr = 0,
    PARTS: tl.constexpr = 0,
    END_0: tl.constexpr = 0,
    END_1: tl.constexpr = 0,
    REPLICAS: tl.constexpr = 1,
    SHRINKS: tl.constexpr = 0,
    ADAPTED: tl.constexpr = False,
) -> None:
    READY: tl.constexpr = SHRINKS == 0
    program = tl.program_id(0)
    b = tl.arange(0, BATCH)
    if ADAPTED:
        slots, ranks = slots_and_ranks(slots_ptr, ranks_ptr, b, batch)
    if not READY:
        if program < SHRINKS * batch:
            shrink_tile(
                program, x_ptr, x_stride, batch, slots, ranks, bank_ptr, sums_ptr, slot_stride, start,
                K, BATCH, BLOCK_K, R, PARTS, PRECISION, PDL,
            )  # fmt: skip
            return
        program -= SHRINKS * batch
    n = program * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Rows past the end read the last row: their sums are not stored, and loads need no mask along n.
    rows = weight_ptr + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K + k[None, :]
    acc = tl.zeros([BLOCK_N, BATCH], tl.float32)
    up = tl.zeros([BLOCK_N, BATCH], tl.float32)
    launch_successor(PDL)
    if ADAPTED:
        # On its way while the weights stream; registers are plenty here.
        in_n = n < N
        part = part_of(program * BLOCK_N, PARTS, END_0, END_1)
        b_rows = up_rows(bank_ptr, slots, ranks, n, in_n, slot_stride, start, 0, K, PARTS)
        if GATED:
            b_up = up_rows(bank_ptr, slots, ranks, N + n, in_n, slot_stride, start, 0, K, PARTS)
    wait_for_inputs(PDL)
    for offset in range(0, K, BLOCK_K):
        x_mask = (b < batch)[:, None]
        if K % BLOCK_K != 0:
            in_k = offset + k < K
            x_mask = x_mask & in_k[None, :]
            w = tl.load(rows + offset, mask=in_k[None, :], other=0.0)
        else:
            w = tl.load(rows + offset)
        x = tl.load(x_ptr + b[:, None] * x_stride + (offset + k)[None, :], mask=x_mask, other=0.0)
        acc = tl.dot(w.to(x.dtype), tl.trans(x), acc, input_precision=PRECISION)
        if GATED:
            if K % BLOCK_K != 0:
                u = tl.load(rows + N * K + offset, mask=(offset + k < K)[None, :], other=0.0)
            else:
                u = tl.load(rows + N * K + offset)
            up = tl.dot(u.to(x.dtype), tl.trans(x), up, input_precision=PRECISION)
    delta = 0.0
    up_delta = 0.0
    if ADAPTED:
        at_sums, seen = look(sums_ptr, b, ranks, part, 0, PARTS * R, READY)
        delta = expand(
            at_sums, seen, b_rows, bank_ptr, sums_ptr, b, slots, ranks, n, in_n, part, slot_stride, start,
            K, PARTS, R, READY,
        )  # fmt: skip
        if GATED:
            at_up, seen_up = look(sums_ptr, b, ranks, 1, 0, PARTS * R, READY)
            up_delta = expand(
                at_up, seen_up, b_up, bank_ptr, sums_ptr, b, slots, ranks, N + n, in_n, 1, slot_stride, start,
                K, PARTS, R, READY,
            )  # fmt: skip
    epilogue(
        tl.trans(acc), tl.trans(up), n, b, batch, out_ptr, bias_ptr, scale_ptr, residual_ptr,
        N, BIAS, SCALED, RESIDUAL, GATED, delta, up_delta, ADAPTED,
    )  # fmt: skip


def linear(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    weight_scale: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    gated: bool = False,
    out: Tensor | None = None,
    config: GemvConfig | None = None,
    lora: InlineLora | None = None,
    pdl: bool = False,
) -> Tensor:
    """`x` [B, K] times the transpose of `weight` [N, K], for B up to `MAX_BATCH`.

    `weight_scale`: float32 [N], with an e4m3 weight. `norm`, `eps`: x is RMS-normalized first (mostly one more launch).
    `gated`: the weight is [2 * N, K], gate rows then up rows, and the result is silu(gate) * up. `residual` [B, N] is
    added last. `out` may be `residual`, never `x`. `lora`: each token's adapter is added in the same launches.
    """
    batch, k = x.shape
    if batch > MAX_BATCH:
        raise ValueError(f"linear of {batch} tokens: this kernel is for up to {MAX_BATCH}")
    if residual is None and out is None and lora is None and vendor_wins(weight.shape[0], batch, weight.element_size()):
        if norm is not None:
            x = rms_norm(x, norm, eps, pdl=pdl)
        y = F.linear(x, weight, bias)
        return silu_mul(y, pdl=pdl) if gated else y
    if out is None:
        out = torch.empty((batch, weight.shape[0] // 2 if gated else weight.shape[0]), dtype=x.dtype, device=x.device)
    # In a product an fp8 weight widens to float16, in one instruction and exactly; so must the input.
    half = batch > 1 and weight.dtype == torch.float8_e4m3fn
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    shape = config or choose(n, k, batch, weight.element_size(), gated, lora is not None)
    folds = norm is not None and lora is None and shape.kernel == "rows" and folds_norm(n, k, weight.element_size())
    gain = norm
    if folds:
        norm = None
    if norm is not None and lora is not None:
        x = rms_norm_shrink(x, norm, eps, lora, dtype=torch.float16 if half else None, pdl=pdl)
    elif norm is not None:
        x = rms_norm(x, norm, eps, dtype=torch.float16 if half else None, pdl=pdl)
    elif half:
        x = to_half(x, pdl=pdl)
    pointers = (
        x,
        weight,
        out,
        x if bias is None else bias,
        x if weight_scale is None else weight_scale,
        x if residual is None else residual,
        *((x, x, x, x, 0, 0) if lora is None else lora.pointers),
    )
    flags: dict[str, int] = {
        "BIAS": bias is not None,
        "SCALED": weight_scale is not None,
        "RESIDUAL": residual is not None,
        "GATED": gated,
    }
    shrinks = 0
    if lora is not None:
        if any(end % shape.block_n for end in lora.ends):
            shape = replace(shape, block_n=TILE_ROWS, num_warps=1)  # a program's rows lie in one part
        flags |= {**lora.options, "ADAPTED": True}
        if norm is None:
            shrinks = lora.shrinks(shape.kernel == "rows")
            flags |= {"SHRINKS": shrinks, "REPLICAS": COPIES}
    if batch > 1 and shape.kernel == "rows":
        raise ValueError(f"linear of {batch} tokens: the rows kernel is for one")
    programs = ceil_div(n, shape.block_n)
    if shape.kernel == "rows":
        launch(
            _rows_kernel,
            (shrinks + programs,),
            *pointers,
            x if gain is None else gain,
            eps,
            N=n,
            K=k,
            BLOCK_N=shape.block_n,
            BLOCK_K=shape.block_k,
            NORM=folds,
            **flags,
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
            pdl=pdl,
            branches=shrinks + programs > common.MOST_OVERLAPPED,
        )
    else:
        launch(
            _tiles_kernel,
            (shrinks * batch + programs,),
            *pointers,
            x.stride(0),
            batch,
            N=n,
            K=k,
            BATCH=MAX_BATCH,
            BLOCK_N=shape.block_n,
            BLOCK_K=max(16, shape.block_k),
            **flags,
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
            pdl=pdl,
        )
    return out
