"""CUDA C++ through NVRTC: built, loaded, launched, captured in a graph; on the CPU the same source is emulated.

`python tests/gpu/run.py --only nvrtc`, with `--interpret` for the emulation and `--compile` for registers and spills.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int32

import torch
from cuda_emulation import HERE, emulate, guarded
from gpu_harness import DEVICE, MODE, check, compiled, integers, poison_, rand
from torch import Tensor

from penstock.engine.backends.cuda import nvrtc

SOURCE = HERE / "ring_product.cu"
STAGES, CHUNK, THREADS = 3, 512, 128
SHARED = THREADS // 32 * STAGES * CHUNK


class Shape(ctypes.Structure):
    _fields_ = (("rows", c_int32), ("columns", c_int32))


def _operands(rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    weights = rand(rows, columns, scale=0.5).to(torch.float8_e4m3fn)
    return weights, rand(rows).abs() + 0.5, rand(columns)


def _want(weights: Tensor, scales: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    y = weights.double() @ x.double() * scales.double()
    return y, y / y.norm()


def test_rings_of_copies_and_a_grid_barrier() -> None:
    if MODE == "compile":
        compiled["ring_product"] = f"ring_product (NVRTC)\n{nvrtc.report(SOURCE)}"
        return
    rows, columns = (37, 1024) if MODE == "interpret" else (4099, 4096)
    weights, scales, x = _operands(rows, columns)
    counter = integers([0], torch.int32)
    want_y, want_z = _want(weights, scales, x)
    for seed in range(3):
        y = poison_(torch.empty(rows, device=DEVICE))
        z = poison_(torch.empty(rows, device=DEVICE, dtype=torch.bfloat16))
        if MODE == "interpret":
            weights, y, z = guarded(weights), guarded(y), guarded(z)
            args = [weights, scales, x, y, z, counter, Shape(rows, columns)]
            emulate(SOURCE, "ring_product").launch(3, THREADS, args, shared_bytes=SHARED, cooperative=True, seed=seed)
        else:
            made = nvrtc.kernel(DEVICE, SOURCE, "ring_product")
            args = [weights, scales, x, y, z, counter, Shape(rows, columns)]
            grid = made.resident_blocks(THREADS, SHARED)
            made.launch(grid, THREADS, args, shared_bytes=SHARED, cooperative=True)
        check("y", y, want_y, 1e-5)
        check("z", z, want_z)


def test_a_cooperative_launch_is_captured_and_replayed() -> None:
    if MODE != "device":
        return
    weights, scales, x = _operands(512, 2048)
    y, z = torch.empty(512, device=DEVICE), torch.empty(512, device=DEVICE, dtype=torch.bfloat16)
    counter = integers([0], torch.int32)
    made = nvrtc.kernel(DEVICE, SOURCE, "ring_product", defines={"STAGES": 4})
    shared = THREADS // 32 * 4 * CHUNK
    grid = made.resident_blocks(THREADS, shared)
    args = [weights, scales, x, y, z, counter, Shape(512, 2048)]
    for overlap in (False, True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(3):
                made.launch(grid, THREADS, args, shared_bytes=shared, cooperative=True, overlap=overlap)
        for _ in range(4):
            x.copy_(rand(2048))
            poison_(z)
            graph.replay()
            check(f"z, overlap={overlap}", z, _want(weights, scales, x)[1])


def test_wrong_arguments_are_refused() -> None:
    if MODE != "device":
        return
    made = nvrtc.kernel(DEVICE, SOURCE, "ring_product")
    assert made.resources.local_bytes == 0 and made.resources.max_threads == THREADS
    for args in ([None] * 6, [None] * 6 + [3], [None] * 6 + [c_int32(3)]):
        try:
            made.launch(1, 32, args)
        except nvrtc.CudaDriverError:
            continue
        raise AssertionError(f"{args} were taken")
