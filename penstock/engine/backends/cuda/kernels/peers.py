"""Collectives over peer memory: every rank has a region that all ranks of its group can read and write.

A region is `PROGRAMS` parts, one per program of a launch; a program meets only the program of the same number on the
other ranks. An exchange: write what the others need into the own region, raise a flag in every region, wait for
everyone's flag in the own region, read. Flags are numbers that only grow (epochs, counted in device memory), so a
launch needs nothing from the host and a CUDA graph of launches can be replayed. Exchanges alternate between two slots:
whoever has finished one knows that all ranks have finished the one before it, so a slot is free when its turn comes.

All ranks must launch the same exchanges of the same shapes in the same order, on one stream.

A sum adds the ranks' numbers in the order of the ranks, in float32, and rounds once: it is the same on every rank,
whatever else is in the launch, and in either form. One-shot: everyone reads all contributions. Two-shot: row by row one
rank reads them, and the others read its sum; less to move between many ranks, one more wait.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.backends.cuda.kernels.addends import Addends, parts, second
from penstock.engine.backends.cuda.kernels.common import FP8_MAX, INTERPRETED, launch, next_power_of_2

PROGRAMS = 64
"""Most programs of a launch."""
SHARED_PROGRAMS = 96
"""Most programs that wait on one GPU at the same time, for all ranks on it: a GPU has more processors than that, so one
is always left for the kernels that the others wait for."""
PIECE = 32 << 10
"""Bytes that a program exchanges at once: a row of activations fits."""
MOST_RANKS = 32
_LOOKS_PER_S = 3_000_000
"""A look at flags in the device's own memory takes about a third of a microsecond."""
_PHASES = 2
_FLAG_BYTES = PROGRAMS * _PHASES * MOST_RANKS * 4
REGION_BYTES = _FLAG_BYTES + PROGRAMS * 2 * _PHASES * PIECE
"""Flags, then per program, slot and phase one piece."""

_LANES = tl.constexpr(MOST_RANKS)
_FLAGS = tl.constexpr(_FLAG_BYTES)
_PIECE = tl.constexpr(PIECE)


@triton.jit
def _give_up() -> None:
    """End this kernel, and with it the process's use of the device, with an error."""
    if not INTERPRETED:
        tl.inline_asm_elementwise("trap; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _fence() -> None:
    """What others wrote before the flags that were just read is read from now on."""
    if not INTERPRETED:
        tl.inline_asm_elementwise("fence.acq_rel.sys; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _piece(
    region: tl.tensor, program: tl.tensor, epoch: tl.tensor, PHASE: tl.constexpr, like: tl.constexpr
) -> tl.tensor:
    """A program's piece of a region, in the slot of `epoch`."""
    at = region + _FLAGS + ((program * 2 + (epoch & 1)) * 2 + PHASE).to(tl.int64) * _PIECE
    return tl.multiple_of(tl.multiple_of(at, 16).to(tl.pointer_type(like)), 16)


@triton.jit
def _raise(
    regions_ptr: tl.tensor,
    program: tl.tensor,
    rank: tl.tensor,
    epoch: tl.tensor,
    SIZE: tl.constexpr,
    PHASE: tl.constexpr,
) -> None:
    """Tell every rank that this one has written its piece."""
    tl.debug_barrier()
    lanes = tl.arange(0, _LANES)
    regions = tl.load(regions_ptr + lanes, mask=lanes < SIZE, other=0)
    flags = (regions + ((program * 2 + PHASE) * _LANES + rank).to(tl.int64) * 4).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(flags, tl.zeros([_LANES], tl.int32) + epoch, mask=lanes < SIZE, sem="release", scope="sys")


@triton.jit
def _await(
    region: tl.tensor,
    program: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    epoch: tl.tensor,
    patience: tl.tensor,
    PHASE: tl.constexpr,
) -> None:
    """Wait for the flags of the ranks from `first` up to `last`, looking at most `patience` times."""
    lanes = tl.arange(0, _LANES)
    flags = (region + (program * 2 + PHASE).to(tl.int64) * (_LANES * 4)).to(tl.pointer_type(tl.int32)) + lanes
    wanted = (lanes >= first) & (lanes < last)
    # The difference, not the numbers: they may wrap around.
    looks = 0
    behind = tl.min(tl.where(wanted, tl.load(flags, volatile=True) - epoch, 0), axis=0)
    while (behind < 0) & (looks < patience):
        looks += 1
        behind = tl.min(tl.where(wanted, tl.load(flags, volatile=True) - epoch, 0), axis=0)
    if behind < 0:
        _give_up()
    _fence()
    tl.debug_barrier()


@triton.jit(do_not_specialize=["rank", "rows", "patience"])
def _sum_kernel(
    x_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    delta_ranks_ptr: tl.tensor,
    out_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    x_weight_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    regions_ptr: tl.tensor,
    epochs_ptr: tl.tensor,
    rank: tl.tensor,
    patience: tl.tensor,
    rows: tl.tensor,
    total: tl.tensor,
    x_stride: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK: tl.constexpr,
    TWO_SHOT: tl.constexpr,
    NORM: tl.constexpr,
    X_NORM: tl.constexpr,
    QUANTIZE: tl.constexpr,
    DELTA: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    kind: tl.constexpr = x_ptr.dtype.element_ty
    cols = tl.arange(0, BLOCK)
    mine = tl.load(regions_ptr + rank)
    epoch = tl.load(epochs_ptr + program)
    for row in range(program, rows, tl.num_programs(0)):
        epoch += 1
        at = row * COLS + cols
        mask = (cols < COLS) & (at < total)
        part = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0)
        if DELTA:
            part = (part.to(tl.float32) + second(delta_ptr + at, mask, tl.load(delta_ranks_ptr + row))).to(kind)
        tl.store(_piece(mine, program, epoch, 0, kind) + cols, part, mask=mask)
        _raise(regions_ptr, program, rank, epoch, SIZE, 0)
        x = tl.zeros([BLOCK], tl.float32)
        owner = row % SIZE
        if TWO_SHOT:
            if owner == rank:
                _await(mine, program, 0, SIZE, epoch, patience, 0)
                for other in tl.static_range(SIZE):
                    piece = _piece(tl.load(regions_ptr + other), program, epoch, 0, kind)
                    x += tl.load(piece + cols, mask=mask, other=0.0, volatile=True).to(tl.float32)
                tl.store(_piece(mine, program, epoch, 1, kind) + cols, x.to(kind), mask=mask)
                _raise(regions_ptr, program, rank, epoch, SIZE, 1)
            _await(mine, program, owner, owner + 1, epoch, patience, 1)
            piece = _piece(tl.load(regions_ptr + owner), program, epoch, 1, kind)
            x = tl.load(piece + cols, mask=mask, other=0.0, volatile=True).to(tl.float32)
        else:
            _await(mine, program, 0, SIZE, epoch, patience, 0)
            for other in tl.static_range(SIZE):
                piece = _piece(tl.load(regions_ptr + other), program, epoch, 0, kind)
                x += tl.load(piece + cols, mask=mask, other=0.0, volatile=True).to(tl.float32)
            x = x.to(kind).to(tl.float32)
        if NORM:
            if X_NORM:
                x_weight = tl.load(x_weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
                x = x * tl.rsqrt(tl.sum(x * x, axis=0) / COLS + eps) * x_weight
            x += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
            stream = x.to(residual_ptr.dtype.element_ty)
            tl.store(residual_ptr + at, stream, mask=mask)
            x = stream.to(tl.float32)
            weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
            x = x * tl.rsqrt(tl.sum(x * x, axis=0) / COLS + eps) * weight
            if QUANTIZE:
                scale = tl.maximum(tl.max(tl.abs(x), axis=0), 1e-12) / FP8_MAX
                x = tl.clamp(x / scale, -FP8_MAX, FP8_MAX)
                tl.store(scale_ptr + row, scale)
        tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=mask)
    tl.debug_barrier()
    tl.store(epochs_ptr + program, epoch)


@triton.jit(do_not_specialize=["rank", "rows", "patience"])
def _gather_kernel(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    regions_ptr: tl.tensor,
    epochs_ptr: tl.tensor,
    rank: tl.tensor,
    patience: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    outputs: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    FIRST_ONLY: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    kind: tl.constexpr = x_ptr.dtype.element_ty
    lanes = tl.arange(0, BLOCK)
    mine = tl.load(regions_ptr + rank)
    epoch = tl.load(epochs_ptr + program)
    pieces = tl.cdiv(cols, BLOCK)
    for item in range(program, rows * pieces, tl.num_programs(0)):
        epoch += 1
        row = item // pieces
        at = item % pieces * BLOCK + lanes
        mask = at < cols
        if not FIRST_ONLY or rank == 0:
            part = tl.load(x_ptr + row * cols + at, mask=mask)
            tl.store(_piece(mine, program, epoch, 0, kind) + lanes, part, mask=mask)
        _raise(regions_ptr, program, rank, epoch, SIZE, 0)
        _await(mine, program, 0, SIZE, epoch, patience, 0)
        for other in tl.static_range(SIZE):
            if other == 0 or not FIRST_ONLY:
                piece = _piece(tl.load(regions_ptr + other), program, epoch, 0, kind)
                part = tl.load(piece + lanes, mask=mask, volatile=True)
                to = other * cols + at
                tl.store(out_ptr + row * outputs + to, part, mask=mask & (to < outputs))
    tl.debug_barrier()
    tl.store(epochs_ptr + program, epoch)


class Peers:
    """What launches need of a group: every rank's region as this rank addresses it, and how far its programs are."""

    def __init__(
        self,
        regions: list[int],
        rank: int,
        device: torch.device,
        timeout_s: float = 60.0,
        ranks_per_device: int = 1,
    ) -> None:
        """`timeout_s`: about how long a launch waits for the other ranks before it fails. `ranks_per_device`: the most
        that share one; the same on all ranks."""
        self.programs = max(1, min(PROGRAMS, SHARED_PROGRAMS // ranks_per_device))
        self.rank = rank
        self.patience = int(timeout_s * _LOOKS_PER_S)
        self.size = len(regions)
        self.regions = torch.tensor(regions, dtype=torch.int64, device=device)
        self.epochs = torch.zeros(PROGRAMS, dtype=torch.int32, device=device)


def _sum(
    peers: Peers,
    x: Tensor | Addends,
    out: Tensor,
    cols: int,
    two_shot: bool,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    eps: float = 0.0,
    x_weight: Tensor | None = None,
    scale: Tensor | None = None,
) -> None:
    x, delta, options = parts(x)
    rows = -(-x.numel() // cols)
    if rows == 0:
        return
    block = next_power_of_2(cols)
    launch(
        _sum_kernel,
        (min(rows, peers.programs),),
        x,
        *delta,
        out,
        x if residual is None else residual,
        x if weight is None else weight,
        x if x_weight is None else x_weight,
        x if scale is None else scale,
        peers.regions,
        peers.epochs,
        peers.rank,
        peers.patience,
        rows,
        x.numel(),
        cols if weight is None else x.stride(0),
        eps,
        SIZE=peers.size,
        COLS=cols,
        BLOCK=block,
        TWO_SHOT=two_shot,
        NORM=weight is not None,
        X_NORM=x_weight is not None,
        QUANTIZE=scale is not None,
        **options,
        num_warps=min(16, max(1, block // 512)),
        num_stages=1,
        pdl=False,
        in_order=True,
    )


def all_reduce(peers: Peers, x: Tensor | Addends, *, two_shot: bool = False) -> Tensor:
    """The sum over all ranks; a new tensor, or `x` itself."""
    base = x if isinstance(x, Tensor) else x.base
    assert base.is_contiguous()
    _sum(peers, x, base, base.shape[-1] if fits_norm(base) else PIECE // base.element_size(), two_shot)
    return base


def fits_norm(x: Tensor) -> bool:
    """Whether a row of `x` [T, hidden] is one piece."""
    return x.shape[-1] * x.element_size() <= PIECE


def all_reduce_add_norm(
    peers: Peers,
    x: Tensor | Addends,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    x_weight: Tensor | None = None,
    *,
    two_shot: bool = False,
) -> Tensor:
    """`add_rms_norm` of the sum over all ranks, in one launch."""
    out = torch.empty_like(residual)
    _sum(peers, x, out, residual.shape[1], two_shot, residual, weight, eps, x_weight)
    return out


def all_reduce_add_norm_fp8(
    peers: Peers,
    x: Tensor | Addends,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    x_weight: Tensor | None = None,
    *,
    two_shot: bool = False,
) -> tuple[Tensor, Tensor]:
    """The same into e4m3, with one float32 scale per row; see `norm.rms_norm_fp8`."""
    out = torch.empty(residual.shape, dtype=torch.float8_e4m3fn, device=residual.device)
    scale = torch.empty((residual.shape[0], 1), dtype=torch.float32, device=residual.device)
    _sum(peers, x, out, residual.shape[1], two_shot, residual, weight, eps, x_weight, scale)
    return out, scale


def _gather(peers: Peers, x: Tensor, out: Tensor, rows: int, outputs: int, first_only: bool) -> None:
    if x.numel() == 0:
        return
    cols = x.numel() // rows
    # Few sizes, because each is compiled.
    block = PIECE // x.element_size() if cols > 1024 else 1024
    launch(
        _gather_kernel,
        (min(rows * -(-cols // block), peers.programs),),
        x,
        out,
        peers.regions,
        peers.epochs,
        peers.rank,
        peers.patience,
        rows,
        cols,
        outputs,
        SIZE=peers.size,
        BLOCK=block,
        FIRST_ONLY=first_only,
        num_warps=min(16, max(1, block // 512)),
        num_stages=1,
        pdl=False,
        in_order=True,
    )


def all_gather(peers: Peers, x: Tensor, outputs: int) -> Tensor:
    """Every rank's columns of `x` [rows, columns] side by side, the first `outputs` of them."""
    out = torch.empty((x.shape[0], outputs), dtype=x.dtype, device=x.device)
    _gather(peers, x.contiguous(), out, x.shape[0], outputs, False)
    return out


def broadcast(peers: Peers, x: Tensor) -> Tensor:
    """The first rank's `x`, written over those of the others."""
    assert x.is_contiguous()
    _gather(peers, x, x, 1, x.numel(), True)
    return x
