"""Norms, gating and fp8 quantization against float64."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from gpu_harness import (
    DEVICE,
    MODE,
    QUICK,
    Row,
    bandwidth,
    check,
    check_equal,
    check_rounded,
    poisoned_outputs,
    rand,
    rng,
    time_us,
)
from torch import Tensor

from penstock.engine.backends.cuda.kernels import norm
from penstock.engine.backends.cuda.kernels.activation import quantize_fp8, silu_mul_fp8
from penstock.engine.backends.cuda.kernels.addends import (
    Addends,
    Summands,
)
from penstock.engine.backends.cuda.kernels.common import building_kernels
from penstock.engine.backends.cuda.kernels.norm import rms_norm_fp8
from penstock.engine.backends.cuda.ops import TritonOps
from penstock.engine.backends.interface import Clip, Pointwise, Xielu
from penstock.engine.backends.reference.ops import ReferenceOps

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ops = TritonOps(DEVICE)


def norm64(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.double()


def silu64(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.double().chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def widths() -> list[int]:
    return [64, 576] if QUICK else [64, 576, 1024, 4096, 8192, rng.randrange(100, 5000) * 2]


def tokens() -> int:
    return rng.randrange(1, 4) if QUICK else rng.choice([1, 7, 64, rng.randrange(1, 300)])


def test_rms_norm() -> None:
    for dtype in DTYPES:
        for hidden in widths():
            x, weight = rand(tokens(), hidden, dtype=dtype, scale=3), rand(hidden, dtype=dtype)
            with poisoned_outputs():
                got = ops.rms_norm(x, weight, 1e-5)
            check(f"rms_norm {dtype} {hidden}", got, norm64(x, weight, 1e-5))


def test_rms_norm_reads_strided_rows() -> None:
    wide, weight = rand(5, 192, dtype=torch.bfloat16), rand(64, dtype=torch.bfloat16)
    x = wide[:, 64:128]
    with poisoned_outputs():
        got = ops.rms_norm(x, weight, 1e-6)
    check("strided", got, norm64(x, weight, 1e-6))


def test_add_rms_norm_updates_the_residual_in_place() -> None:
    for dtype in DTYPES:
        for hidden in widths():
            n = tokens()
            x, residual = rand(n, hidden, dtype=dtype), rand(n, hidden, dtype=dtype)
            weight, total = rand(hidden, dtype=dtype), x + residual
            with poisoned_outputs():
                got = ops.add_rms_norm(x.clone(), residual, weight, 1e-6)
            check_rounded(f"residual {dtype} {hidden}", residual, total)
            check(f"add_rms_norm {dtype} {hidden}", got, norm64(total, weight, 1e-6))


def test_the_norm_adds_up_what_experts_left() -> None:
    for dtype in DTYPES:
        n, hidden = tokens(), 96
        rows, residual, weight = (
            rand(n * 3, hidden, dtype=dtype),
            rand(n, hidden, dtype=dtype),
            rand(hidden, dtype=dtype),
        )
        total = residual.double() + rows.double().view(n, 3, hidden).sum(1)
        with poisoned_outputs():
            got = ops.add_rms_norm(Summands(rows, 3), residual, weight, 1e-6)
        check(f"residual {dtype}", residual, total)
        check(f"summed {dtype}", got, norm64(residual, weight, 1e-6))


def test_centre_adds_and_subtracts_the_mean_in_place() -> None:
    for dtype in DTYPES:
        for hidden in widths():
            for added in range(3):
                n = tokens()
                residual, parts = rand(n, hidden, dtype=dtype), [rand(n, hidden, dtype=dtype) for _ in range(added)]
                total = residual.double() + sum(part.double() for part in parts)
                ops.centre(residual, *parts)
                if MODE != "compile":
                    check(f"centre {dtype} {hidden} {added}", residual, total - total.mean(-1, keepdim=True))


def test_centre_adds_what_adapters_add() -> None:
    n, hidden = 3, widths()[0]
    base, delta = rand(n, hidden), rand(n, hidden)
    ranks = torch.tensor([0, 8, 0], dtype=torch.int32, device=DEVICE)
    residual, other = rand(n, hidden), rand(n, hidden)
    total = residual.double() + base.double() + torch.where(ranks[:, None] > 0, delta, 0.0).double() + other.double()
    ops.centre(residual, other, Addends(base, delta, ranks))
    if MODE != "compile":
        check("centre with adapters", residual, total - total.mean(-1, keepdim=True))


def test_silu_mul() -> None:
    for dtype in DTYPES:
        for ffn in [96, 1536] if QUICK else [96, 1536, 14336, rng.randrange(8, 3000)]:
            for n in (1,) if QUICK else (1, 33, tokens()):
                gate_up = rand(n, 2 * ffn, dtype=dtype, scale=2)
                with poisoned_outputs():
                    got = ops.silu_mul(gate_up)
                check(f"silu_mul {dtype} {n}x{ffn}", got, silu64(gate_up))


def pointwise64(x: Tensor, function: Pointwise) -> Tensor:
    return ReferenceOps().pointwise(x.double(), function).double()


def test_pointwise() -> None:
    """In place, and with what adapters add."""
    functions: tuple[Pointwise, ...] = (
        "relu2", "plain_gelu", "plain_gelu_tanh", Clip(0.7), Xielu(0.9, 1.4, 0.4, -1e-3),
    )  # fmt: skip
    for dtype in DTYPES:
        for width in [96] if QUICK else [96, 1536, 14336, rng.randrange(8, 3000)]:
            for function in functions:
                n = tokens()
                x, delta = rand(n, width, dtype=dtype, scale=3), rand(n, width, dtype=dtype)
                ranks = torch.tensor([8 * (row % 2) for row in range(n)], dtype=torch.int32, device=DEVICE)
                both = x.double() + torch.where(ranks[:, None] > 0, delta, 0.0).double()
                got = ops.pointwise(x.clone(), function)
                adapted = ops.pointwise(Addends(x.clone(), delta, ranks), function)
                if MODE != "compile":
                    check(f"{function} {dtype} {n}x{width}", got, pointwise64(x, function))
                    check(f"{function} with adapters {dtype} {n}x{width}", adapted, pointwise64(both, function))


def check_fp8(name: str, quantized: tuple[Tensor, Tensor], want: Tensor) -> None:
    if MODE == "compile":
        return
    values, scale = quantized
    assert values.dtype == torch.float8_e4m3fn
    largest = want.abs().amax(-1, keepdim=True) / 448
    check(f"{name} scale", scale, largest, 4e-3)
    check(name, values.float().double() * scale.double(), want, 6.5e-2)
    assert int((values.float().abs() == 448).sum()) >= want.shape[0], f"{name}: a row does not use the range"


def test_fp8_quantization_is_per_row_and_fused() -> None:
    for dtype in DTYPES:
        for width in widths()[:3]:
            n = tokens()
            x = rand(n, width, dtype=dtype) * torch.logspace(-2, 2, n, device=DEVICE)[:, None].to(dtype)
            residual, weight = rand(n, width, dtype=dtype), rand(width, dtype=dtype)
            with poisoned_outputs():
                check_fp8("quantize", quantize_fp8(x), x.double())
                check_fp8("norm", rms_norm_fp8(x, weight, 1e-6), norm64(x, weight, 1e-6))
                total = x + residual
                check_fp8("add norm", rms_norm_fp8(x, weight, 1e-6, residual), norm64(total, weight, 1e-6))
                check_rounded("residual", residual, total)
                gate_up = rand(n, 2 * width, dtype=dtype)
                check_fp8("silu_mul", silu_mul_fp8(gate_up), silu64(gate_up))


def test_fp8_of_a_zero_row_is_zero() -> None:
    x = torch.zeros(2, 64, device=DEVICE)
    values, scale = quantize_fp8(x)
    check_equal("zero", values.float() * scale, x)


def test_kernels_can_be_built_ahead_of_use() -> None:
    if MODE != "device":
        return
    x, weight = rand(3, 208, dtype=torch.bfloat16), rand(208, dtype=torch.bfloat16)
    with building_kernels():
        ops.rms_norm(x, weight, 1e-5)
    cache = norm._norm_kernel.device_caches[torch.cuda.current_device()][0]
    built = len(cache)
    with poisoned_outputs():
        check("built ahead", ops.rms_norm(x, weight, 1e-5), norm64(x, weight, 1e-5))
    assert built > 0 and len(cache) == built, "the kernel was built again when it was used"


def bench_elementwise() -> Iterator[Row]:
    bf16, hidden, ffn = torch.bfloat16, 4096, 14336
    weight = rand(hidden, dtype=bf16)
    for n in (1, 64, 256, 8192):
        sets = [(rand(n, hidden, dtype=bf16), rand(n, hidden, dtype=bf16)) for _ in range(4)]
        wide = [rand(n, 2 * ffn, dtype=bf16) for _ in range(4 if n < 8192 else 2)]
        size = n * hidden * 2
        us = time_us([lambda x=x: ops.rms_norm(x, weight, 1e-5) for x, _ in sets])
        yield bandwidth(f"rms_norm {n}x{hidden}", us, 2 * size)
        us = time_us([lambda x=x, r=r: ops.add_rms_norm(x, r, weight, 1e-5) for x, r in sets])
        yield bandwidth(f"add_rms_norm {n}x{hidden}", us, 4 * size)
        us = time_us([lambda x=x, r=r: rms_norm_fp8(x, weight, 1e-5, r) for x, r in sets])
        yield bandwidth(f"add_rms_norm fp8 {n}x{hidden}", us, 3.5 * size)
        us = time_us([lambda x=x: ops.silu_mul(x) for x in wide])
        yield bandwidth(f"silu_mul {n}x{ffn}", us, 6 * n * ffn)
        us = time_us([lambda x=x: silu_mul_fp8(x) for x in wide])
        yield bandwidth(f"silu_mul fp8 {n}x{ffn}", us, 5 * n * ffn)
