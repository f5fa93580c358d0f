"""What every kernel here shares: how it is launched and built, powers of two, the fp8 range.

Launch order: with `PDL` a kernel may be scheduled while its predecessor still runs (programmatic dependent launch,
compute capability 9.0). It must then call `wait_for_inputs` before it touches anything an earlier kernel wrote *or
reads*, in every program and before any early return: a grid that finishes without waiting would let its successor
overtake its predecessor. Before the wait it may read what no kernel of the same step writes: weights, what describes
the step (positions, slots, rows, context lengths, block tables), which is copied or made by PyTorch, and the states
that an earlier step left. Nobody overtakes a kernel of PyTorch's or a copy, and every step, also each of several in one
graph, begins with one: its inputs are sent, its tokens looked up in the embedding. The residual stream, activations and
counters are written by kernels of the step: they are read behind the wait, or as a guess that is checked behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.machine import usable_cores

FP8_MAX = tl.constexpr(448.0)
"""Largest finite float8_e4m3fn."""
INT8_MAX = tl.constexpr(127.0)
LOG2E = tl.constexpr(1.4426950408889634)
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Running in Triton's interpreter, which knows no machine instructions."""


@triton.jit
def launch_successor(PDL: tl.constexpr) -> None:
    """Let the next kernel start being scheduled; it still waits for all of this one before it reads."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_inputs(PDL: tl.constexpr) -> None:
    """Wait until every earlier kernel has finished and its writes are visible."""
    if PDL:
        gdc_wait()


@triton.jit
def ask_for(at: tl.tensor, SIZE: tl.constexpr, PDL: tl.constexpr) -> None:
    """Bring `SIZE` bytes at each address into the L2 cache: what will be read once the inputs are there. Of up to 32
    addresses all warps have copies, and the first one asks. For addresses that are multiples of 16; other sizes than
    those are left alone. For what lies scattered and is small: weights asked for ahead made every step longer."""
    if PDL and SIZE % 16 == 0:
        tl.inline_asm_elementwise(
            "{ .reg .pred first; .reg .b32 thread; mov.u32 thread, %tid.x; setp.lt.u32 first, thread, 32;"
            " @first cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }"
            if at.numel <= 32
            else "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;",
            "=r,l,r",
            [at.to(tl.int64), tl.full(at.shape, SIZE, tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def split_fp8(pairs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Two e4m3 values in each int16 as float16: those of the low bytes, and those of the high bytes."""
    if INTERPRETED:
        low = (pairs & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        high = ((pairs >> 8) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        low, high = tl.inline_asm_elementwise(
            "{ .reg .b32 both; cvt.rn.f16x2.e4m3x2 both, $2; mov.b32 {$0, $1}, both; }",
            "=h,=h,h",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=1,
        )
    return low, high


@triton.jit
def soft_cap(scores: tl.tensor, CAP: tl.constexpr) -> tl.tensor:
    """cap * tanh(s / cap) of scores that are in units of log 2, as base-2 softmaxes want them; CAP 0 changes nothing.

    tanh(z) = 1 - 2 / (exp(2z) + 1), which overflows into the right limits."""
    if CAP > 0.0:  # not an early return: what follows one is built all the same
        limit = CAP * LOG2E
        scores = limit - 2.0 * limit / (tl.exp2(scores * (2.0 / CAP)) + 1.0)
    return scores


@triton.jit
def oldest_visible(position: tl.tensor, WINDOW: tl.constexpr, CHUNKED: tl.constexpr) -> tl.tensor:
    """The first position that the token at `position` sees; may be negative where windows slide."""
    if CHUNKED:
        oldest = position // WINDOW * WINDOW
    else:
        oldest = position - WINDOW + 1
    return oldest


@triton.jit
def sink_factor(sinks: tl.tensor, mask: tl.tensor, peak: tl.tensor, total: tl.tensor) -> tl.tensor:
    """One over the total of each row's softmax, in which the row's sink takes part: a score that stands for no key.
    `peak` is in units of log 2, and `total` relative to it."""
    sink = tl.load(sinks, mask=mask, other=0.0) * LOG2E
    top = tl.maximum(peak, sink)
    keep = tl.exp2(peak - top)
    return keep / (total * keep + tl.exp2(sink - top))


@triton.jit
def widen(x: tl.tensor, like: tl.tensor) -> tl.tensor:
    """Cached numbers as operands beside `like`: int8 takes the way through float32, which every backend has."""
    if x.dtype == tl.int8:
        x = x.to(tl.float32)
    return x.to(like.dtype)


MOST_OVERLAPPED = 4096
"""Waiting costs each program a little: of a grid that depends on the weights alone and is larger than this, starting
early gains less than it pays; what follows it does start early. Other grids must not decide by their size: a kernel
would have two forms, of which only one is built in advance."""
_building: ContextVar[bool] = ContextVar("building", default=False)
_overlapping = False
"""Whether kernels start early in this process, asked for or not."""


def overlap_launches(on: bool) -> None:
    """Have every kernel start early that can, in the whole process: for devices of compute capability 9.0 and later."""
    global _overlapping
    _overlapping = on


def overlaps() -> bool:
    """Whether every kernel starts early that can."""
    return _overlapping


def is_building() -> bool:
    """Whether kernels are only built, so that none writes what it returns."""
    return _building.get()


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    pdl: bool,
    in_order: int = False,
    branches: int = False,
    **options: Any,
) -> None:
    """Run `kernel` on the current stream, or only build it inside `building_kernels`. `in_order`: neither does it start
    early, nor what follows: for kernels that do not wait for their inputs, whose results are read without a wait, or
    that lie where streams meet. `branches`: it is the first on a stream that leaves another; what follows may start
    early, it may not."""
    early = (pdl or _overlapping) and not in_order
    options |= {"PDL": early, "launch_pdl": early and not branches}
    if _building.get():
        _settle(kernel.warmup(*args, grid=grid, **options))
    else:
        kernel[grid](*args, **options)


def _settle(kernel: Any) -> None:
    """Have Triton know a kernel once it is built. It would otherwise when all are, and until then look for it anew each
    time that it is asked for, which takes most of a millisecond."""
    future = getattr(kernel, "future", None)
    if future is not None and future.done():
        kernel.result(ignore_errors=True)


class _Builders(ThreadPoolExecutor):
    """Build kernels as long as they are wanted."""

    def __init__(self, wanted: Callable[[], bool]) -> None:
        super().__init__(usable_cores())
        self._wanted = wanted

    def submit(self, build: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        def build_if_wanted() -> Any:
            if not self._wanted():
                raise CancelledError
            return build(*args, **named)

        return super().submit(build_if_wanted)


@contextmanager
def building_kernels(wanted: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Inside, launches build their kernels instead of running them, several at a time; done when the block ends. Once
    they are not `wanted` any more, none is begun.

    A kernel is otherwise built when it is first launched, one after another, which is most of a cold start. The calls
    inside must be those of later use (shapes, dtypes, flags); what they return has no meaning.
    """
    # A kernel that cannot be built says so when it is launched; raising here would leave Triton in this mode for good.
    with _Builders(wanted) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        token = _building.set(True)
        try:
            yield
        finally:
            _building.reset(token)


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
