"""The CPU emulation of CUDA C++ kernels: right where a device is right, and loud where a kernel is wrong."""

from __future__ import annotations

import ctypes
from ctypes import c_int32

import pytest
import torch
from torch import Tensor

from tests.gpu.cuda_emulation import HERE, EmulationError, compiler, emulate, guarded

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

CHECKS = HERE / "checks.cu"
STAGES, CHUNK, THREADS = 3, 512, 128
CODES = 65536


class Shape(ctypes.Structure):
    _fields_ = (("rows", c_int32), ("columns", c_int32))


def ring_product(seed: int, rows: int = 37, columns: int = 1024, blocks: int = 3) -> tuple[Tensor, Tensor]:
    """What the kernel wrote, and what it should have."""
    torch.manual_seed(seed)
    weights = guarded(torch.randn(rows, columns).to(torch.float8_e4m3fn))
    scales, x = guarded(torch.rand(rows) + 0.5), guarded(torch.randn(columns))
    y, z = guarded(torch.full((rows,), torch.nan)), guarded(torch.full((rows,), torch.nan, dtype=torch.bfloat16))
    args = [weights, scales, x, y, z, torch.zeros(1, dtype=torch.int32), Shape(rows, columns)]
    shared = THREADS // 32 * STAGES * CHUNK
    kernel = emulate(HERE / "ring_product.cu", "ring_product")
    kernel.launch(blocks, THREADS, args, shared_bytes=shared, cooperative=True, seed=seed)
    want = weights.double() @ x.double() * scales.double()
    return z.double(), want / want.norm()


@pytest.mark.parametrize("seed", range(4))
def test_rings_of_copies_and_a_grid_barrier_in_any_order(seed: int) -> None:
    got, want = ring_product(seed)
    torch.testing.assert_close(got, want, rtol=2**-8, atol=1e-6)


@pytest.mark.slow
def test_conversions_are_those_of_torch_for_every_code() -> None:
    codes = torch.arange(CODES, dtype=torch.int32).to(torch.int16)
    values = torch.randn(CODES) * torch.exp2(torch.randint(-30, 18, (CODES,)).float())
    values[:8] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 65519.0, 65520.0, 448.0, 1e-8])
    outs = [torch.empty(CODES) for _ in range(3)]
    to = [torch.empty(CODES, dtype=kind) for kind in (torch.float16, torch.bfloat16)]
    emulate(CHECKS, "conversions").launch(CODES // 256, 256, [values, *outs, *to])
    bytes_ = (torch.arange(CODES) >> 8).to(torch.uint8)
    wanted = codes.view(torch.float16), codes.view(torch.bfloat16), bytes_.view(torch.float8_e4m3fn)
    for got, want in zip(outs, wanted, strict=True):
        torch.testing.assert_close(got, want.float(), rtol=0, atol=0, equal_nan=True)
    for got in to:
        torch.testing.assert_close(got, values.to(got.dtype), rtol=0, atol=0, equal_nan=True)


def test_tensor_cores_multiply_tiles() -> None:
    a, b, d = torch.randn(16, 16).half(), torch.randn(16, 8).half(), torch.randn(16, 8)
    want = d.double() + a.double() @ b.double()
    emulate(CHECKS, "tensor_cores").launch(1, 32, [a, b, d])
    torch.testing.assert_close(d.double(), want, rtol=1e-5, atol=1e-5)


FAULTS = {
    1: r"deadlock: no thread can go on; 1 have ended; 31 wait for __syncthreads",
    2: r"thread \((\d+), 0, 0\): access to offset \d+, outside the 256 bytes of shared memory",
    3: r"deadlock.*16 wait for __shfl_xor_sync",
    4: r"thread \(0, 0, 0\): a misaligned access",
    5: r"access to the invalid address",
    6: r"deadlock.*wait for a value in global memory",
}


@pytest.mark.parametrize("which", FAULTS)
def test_a_mistake_ends_the_launch_with_what_it_was(which: int) -> None:
    out = guarded(torch.zeros(32))
    blocks = 2 if which == 6 else 1
    with pytest.raises(EmulationError, match=FAULTS[which]):
        emulate(CHECKS, "fault").launch(blocks, 32, [out, c_int32(which)], shared_bytes=256)
    emulate(CHECKS, "fault").launch(1, 32, [out, c_int32(0)], shared_bytes=256)  # and the next one runs


def test_a_missing_barrier_shows_as_a_wrong_result() -> None:
    out = torch.zeros(32)
    emulate(CHECKS, "fault").launch(1, 32, [out, c_int32(7)], shared_bytes=256)
    assert not torch.equal(out, torch.arange(31.0, -1.0, -1.0))
