"""What a launch costs that waits for the one before it, and what programs pay that wait for each other instead: the
least that a step of many small kernels takes, whatever they compute."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from gpu_harness import DEVICE, MODE, Row, check_equal, time_us
from torch import Tensor

from penstock.engine.backends.cuda.kernels.common import launch, launch_successor, wait_for_inputs

CELLS = 32


@triton.jit
def _link_kernel(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    PROGRAMS: tl.constexpr,
    CELLS: tl.constexpr,
    EMPTY: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One more than what another program of the launch before has written."""
    pid = tl.program_id(0)
    at = tl.arange(0, CELLS)
    launch_successor(PDL)
    wait_for_inputs(PDL)
    if not EMPTY:
        tl.store(out_ptr + pid * CELLS + at, tl.load(x_ptr + (pid + 1) % PROGRAMS * CELLS + at) + 1)


@triton.jit
def _rounds_kernel(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    counter_ptr: tl.tensor,
    ROUNDS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    CELLS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """The same, round after round in one launch whose programs wait for each other."""
    pid = tl.program_id(0)
    at = tl.arange(0, CELLS)
    for turn in range(ROUNDS):
        found = tl.load(x_ptr + (pid + 1) % PROGRAMS * CELLS + at, cache_modifier=".cg")
        tl.store(out_ptr + pid * CELLS + at, found + 1)
        tl.debug_barrier()
        tl.atomic_add(counter_ptr, 1, sem="release", scope="gpu")
        while tl.atomic_add(counter_ptr, 0, sem="acquire", scope="gpu") < (turn + 1) * PROGRAMS:
            pass
        x_ptr, out_ptr = out_ptr, x_ptr


def link(buffers: list[Tensor], count: int, programs: int, warps: int, pdl: bool, empty: bool = False) -> None:
    for i in range(count):
        launch(
            _link_kernel, (programs,), buffers[i % 2], buffers[1 - i % 2],
            PROGRAMS=programs, CELLS=CELLS, EMPTY=empty, num_warps=warps, pdl=pdl,
        )  # fmt: skip


def buffers_of(programs: int) -> list[Tensor]:
    return [torch.zeros(programs * CELLS, dtype=torch.int32, device=DEVICE) for _ in range(2)]


def test_every_link_reads_what_the_one_before_wrote() -> None:
    for pdl in (False, True) if MODE != "interpret" else (False,):
        for programs in (1, 5) if MODE == "interpret" else (1, 132, 1000):
            buffers = buffers_of(programs)
            link(buffers, 9, programs, 1, pdl)
            check_equal(f"{programs} programs, pdl={pdl}", buffers[1], torch.full_like(buffers[1], 9))


def bench_launch_chain() -> Iterator[Row]:
    """Microseconds of a launch in a chain of 64."""
    count = 64
    for programs, warps in ((1, 4), (132, 4), (528, 4), (1056, 8), (4096, 2)):
        for label, pdl, empty in (
            ("in order, empty", False, True),
            ("early, empty", True, True),
            ("in order", False, False),
            ("early", True, False),
        ):
            buffers = buffers_of(programs)
            us = time_us([lambda b=buffers, p=programs, w=warps, d=pdl, e=empty: link(b, count, p, w, d, e)])
            yield f"a launch of {programs} programs of {warps} warps, {label}", us / count, ""
    if MODE == "interpret":
        return
    for programs in (132, 264):
        buffers, counter = buffers_of(programs), torch.zeros(1, dtype=torch.int32, device=DEVICE)

        def rounds(b: list[Tensor] = buffers, c: Tensor = counter, p: int = programs) -> None:
            c.zero_()
            launch(
                _rounds_kernel,
                (p,),
                *b,
                c,
                ROUNDS=count,
                PROGRAMS=p,
                CELLS=CELLS,
                in_order=True,
                num_warps=4,
                pdl=False,
            )

        yield f"a round of {programs} programs that wait for each other", time_us([rounds]) / count, ""
