"""Linear layers of a few tokens against float64, with everything that can be folded in."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from gpu_harness import MODE, QUICK, Row, bandwidth, check, poisoned_outputs, rand, time_us
from test_triton_elementwise import norm64
from torch import Tensor

from penstock.engine.backends.cuda.kernels.gemv import GemvConfig, linear

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
SHAPES = (
    [(48, 96), (33, 64)]
    if QUICK
    else [(4096, 4096), (6144, 512), (1000, 576), (3072, 1024), (4096, 14336), (257, 1536)]
)


def linear64(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    norm: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    wide = weight.to(torch.float32).double()
    if scale is not None:
        wide = wide * scale.double()[:, None]
    y = (x.double() if norm is None else norm64(x, norm, 1e-5)) @ wide.T
    if bias is not None:
        y = y + bias.double()
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = torch.nn.functional.silu(gate) * up
    return y if residual is None else y + residual.double()


def make_weight(rows: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    if MODE == "compile":
        return torch.empty(rows, k, dtype=dtype), torch.empty(rows) if dtype == FP8 else None
    if dtype == FP8:
        return rand(rows, k, scale=50).to(FP8), rand(rows).abs() * 0.01 + 1e-3
    return rand(rows, k, dtype=dtype, scale=k**-0.5), None


def configs(batch: int) -> list[GemvConfig | None]:
    """The table's own choice, and the tensor-core kernel where the table prefers the other."""
    if batch > 1:
        return [None]
    rows = [GemvConfig("rows", n, 256, 1, 1) for n in ((4,) if QUICK else (1, 2, 4))]
    rows += [GemvConfig("rows", 2, 512, 1, 1)]
    return [None, GemvConfig("tiles", 16, 64, 1, 3), *rows]


def test_linear_in_any_batch_and_dtype() -> None:
    for n, k in SHAPES:
        for dtype, weight_dtype in ((BF16, BF16), (torch.float16, torch.float16), (torch.float32,) * 2, (BF16, FP8)):
            for batch in (1, 3) if QUICK else (1, 2, 5, 8):
                x = rand(batch, k, dtype=dtype)
                weight, scale = make_weight(n, k, weight_dtype)
                with poisoned_outputs():
                    got = linear(x, weight, weight_scale=scale)
                check(f"linear {batch} x {k} -> {n} {weight_dtype}", got, linear64(x, weight, scale=scale))


def test_folded_operations() -> None:
    n, k = SHAPES[1] if QUICK else (1000, 576)
    for weight_dtype in (BF16, FP8):
        for batch in (1, 3) if QUICK else (1, 4, 7):
            for gated in (False, True):
                for config in configs(batch):
                    for use_bias, use_norm, use_residual in (
                        (True, False, False),
                        (False, True, False),
                        (False, False, True),
                        (True, True, True),
                    ):
                        x = rand(batch, k, dtype=BF16, scale=2)
                        weight, scale = make_weight(2 * n if gated else n, k, weight_dtype)
                        bias = rand(weight.shape[0], dtype=BF16) if use_bias else None
                        norm = rand(k, dtype=BF16) if use_norm else None
                        residual = rand(batch, n, dtype=BF16) if use_residual else None
                        want = linear64(x, weight, bias, scale, norm, residual, gated)
                        with poisoned_outputs():
                            got = linear(
                                x,
                                weight,
                                bias=bias,
                                weight_scale=scale,
                                norm=norm,
                                eps=1e-5,
                                residual=residual,
                                gated=gated,
                                out=residual,
                                config=config,
                            )
                        name = f"{weight_dtype} batch {batch} gated={gated} {config}"
                        check(f"{name} {use_bias} {use_norm} {use_residual}", got, want, 1.2e-2)


def test_strided_input_rows() -> None:
    wide, (weight, _) = rand(3, 256, dtype=BF16), make_weight(64, 64, BF16)
    x = wide[:, 64:128]
    check("strided", linear(x, weight), linear64(x, weight))


LLAMA = {
    "qkv": (6144, 4096, {"norm": True}),
    "o": (4096, 4096, {"residual": True}),
    "gate_up": (14336, 4096, {"gated": True, "norm": True}),
    "down": (4096, 14336, {"residual": True}),
    "head": (128256, 4096, {}),
}
QWEN = {"q qkv": (4096, 1024, {}), "q o": (1024, 2048, {}), "q down": (1024, 3072, {})}


def timed(
    n: int,
    k: int,
    batch: int,
    dtype: torch.dtype,
    folded: dict[str, bool],
    config: GemvConfig | None = None,
) -> tuple[float, float]:
    """Microseconds and bytes of one linear; weights rotate so that the cache cannot hold them."""
    rows = 2 * n if folded.get("gated") else n
    size = rows * k * dtype.itemsize
    copies = max(2, min(24, 400_000_000 // size))
    weights = [make_weight(rows, k, dtype) for _ in range(copies)]
    x = rand(batch, k, dtype=BF16)
    norm = rand(k, dtype=BF16) if folded.get("norm") else None
    residual = rand(batch, n, dtype=BF16) if folded.get("residual") else None
    us = time_us(
        [
            lambda w=w, s=s: linear(
                x,
                w,
                weight_scale=s,
                norm=norm,
                eps=1e-5,
                residual=residual,
                gated=folded.get("gated", False),
                config=config,
            )
            for w, s in (weights if MODE != "compile" else weights[:1])
        ],
        repeats=9,
    )
    return us, float(size + (batch * (n + k)) * 2)


def bench_gemv() -> Iterator[Row]:
    for dtype, label in ((BF16, "bf16"), (FP8, "fp8")):
        for batch in (1, 2, 8):
            for name, (n, k, folded) in LLAMA.items():
                rows = 2 * n if folded.get("gated") else n
                plain = (rows, k, {})
                us, size = timed(plain[0], plain[1], batch, dtype, plain[2])
                yield bandwidth(f"gemv {label} b{batch} {name} {rows}x{k}", us, size)
                if folded and batch in (1, 8):
                    us, size = timed(n, k, batch, dtype, folded)
                    yield bandwidth(f"gemv {label} b{batch} {name} {rows}x{k} {'+'.join(folded)}", us, size)
    for name, (n, k, folded) in QWEN.items():
        for batch in (1, 8):
            us, size = timed(n, k, batch, BF16, folded)
            yield bandwidth(f"gemv bf16 b{batch} {name} {n}x{k}", us, size)


def bench_vendor() -> Iterator[Row]:
    """The vendor's product on the same weights, to see up to which batch the kernels above pay."""
    if MODE != "device":
        return
    for batch in (1, 8, 32):
        for n, k in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (1024, 3072), (4096, 1024)):
            copies = max(2, min(24, 400_000_000 // (2 * n * k)))
            weights = [make_weight(n, k, BF16)[0] for _ in range(copies)]
            x = rand(batch, k, dtype=BF16)
            us = time_us([lambda w=w, x=x: torch.nn.functional.linear(x, w) for w in weights], repeats=7)
            yield bandwidth(f"vendor bf16 b{batch} {n}x{k}", us, 2 * n * k)


def tune_vendor() -> Iterator[Row]:
    """The vendor's libraries at many tokens: both of them in 16 bits, scales per row and per tensor in FP8."""
    if MODE != "device":
        return
    scaled = torch._scaled_mm
    for n, k in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)):
        wide = [make_weight(n, k, BF16)[0] for _ in range(max(2, min(24, 400_000_000 // (2 * n * k))))]
        narrow = [make_weight(n, k, FP8) for _ in range(max(2, min(24, 400_000_000 // (n * k))))]
        for batch in (64, 256):
            x = rand(batch, k, dtype=BF16)
            for library in ("cublas", "cublaslt"):
                torch.backends.cuda.preferred_blas_library(library)
                us = time_us([lambda w=w, x=x: torch.nn.functional.linear(x, w) for w in wide], repeats=7)
                yield bandwidth(f"vendor bf16 b{batch} {n}x{k} {library}", us, 2 * n * k)
            torch.backends.cuda.preferred_blas_library("default")
            q, row, one = x.to(FP8), rand(batch, 1).abs(), torch.ones((), device=x.device)
            for fast in (True, False):
                us = time_us(
                    [
                        lambda w=w, s=s, q=q, r=row, f=fast: scaled(
                            q, w.t(), r, s.unsqueeze(0), out_dtype=BF16, use_fast_accum=f
                        )
                        for w, s in narrow
                    ],
                    repeats=7,
                )
                yield bandwidth(f"vendor fp8 b{batch} {n}x{k} rows fast={fast}", us, n * k)
            us = time_us(
                [
                    lambda w=w, q=q, o=one: scaled(q, w.t(), o, o, out_dtype=BF16, use_fast_accum=True)
                    for w, _ in narrow
                ],
                repeats=7,
            )
            yield bandwidth(f"vendor fp8 b{batch} {n}x{k} tensor", us, n * k)


Sweep = list[tuple[torch.dtype, int, int, bool, list[tuple[int, ...]]]]


def tune_gemv_rows() -> Iterator[Row]:
    sweep: Sweep = [
        (BF16, 14336, 4096, True, [(1, 4), (1, 8), (1, 16), (2, 4), (2, 8)]),
        (FP8, 14336, 4096, True, [(1, 2), (1, 4), (2, 2), (2, 4), (2, 8)]),
        (FP8, 4096, 4096, False, [(4, 2), (4, 4), (2, 2), (1, 4)]),
        (FP8, 4096, 14336, False, [(2, 2), (2, 4), (1, 8), (4, 2)]),
        (BF16, 4096, 14336, False, [(4, 4), (4, 8), (2, 2)]),
        (BF16, 3072, 1024, True, [(1, 4), (1, 2), (2, 2), (2, 4)]),
        (BF16, 4096, 1024, False, [(1, 4), (2, 4), (2, 2), (4, 2)]),
        (BF16, 1024, 2048, False, [(1, 4), (1, 8), (2, 4)]),
    ]
    for dtype, n, k, gated, shapes in sweep:
        for block_n, warps in shapes:
            config = GemvConfig("rows", block_n, warps * 256, warps, 1)
            us, size = timed(n, k, 1, dtype, {"gated": gated}, config)
            label = f"{'fp8' if dtype == FP8 else 'bf16'} {n}x{k}{' gated' if gated else ''}"
            yield bandwidth(f"tune rows {label} n{block_n} w{warps}", us, size)


def tune_rows_of_70b() -> Iterator[Row]:
    """FP8 in the shapes of a 70B model: rows of a program, warps, weights that a thread loads at once."""
    sweep = [
        (8192, 8192, False, [(4, 2, 8), (4, 2, 16), (2, 4, 8), (2, 4, 16), (2, 8, 16), (1, 8, 16)]),
        (28672, 8192, True, [(2, 2, 8), (2, 2, 16), (1, 4, 8), (1, 4, 16), (2, 4, 16), (1, 8, 16)]),
        (8192, 28672, False, [(2, 2, 8), (2, 8, 16), (2, 4, 16), (1, 8, 16), (2, 8, 8), (1, 16, 8)]),
    ]
    for n, k, gated, shapes in sweep:
        for block_n, warps, width in shapes:
            config = GemvConfig("rows", block_n, warps * 32 * width, warps, 1)
            us, size = timed(n, k, 1, FP8, {"gated": gated}, config)
            label = f"{n}x{k}{' gated' if gated else ''}"
            yield bandwidth(f"tune 70b fp8 {label} n{block_n} w{warps} x{width}", us, size)


def tune_gemv_tiles() -> Iterator[Row]:
    sweep: Sweep = [
        (
            BF16,
            6144,
            4096,
            False,
            [(16, 512, 1, 4), (16, 256, 1, 6), (16, 256, 2, 6), (32, 256, 2, 5), (32, 256, 4, 5)],
        ),
        (BF16, 14336, 4096, True, [(32, 256, 2, 3), (32, 128, 2, 5), (16, 256, 1, 4), (16, 512, 1, 3)]),
        (FP8, 14336, 4096, True, [(32, 512, 2, 3), (32, 256, 2, 4), (16, 512, 1, 4)]),
        (FP8, 4096, 4096, False, [(32, 512, 2, 5), (32, 256, 2, 6), (16, 512, 1, 6), (16, 1024, 1, 4)]),
        (FP8, 6144, 4096, False, [(32, 512, 2, 4), (16, 512, 1, 6), (16, 1024, 1, 4)]),
        (FP8, 4096, 14336, False, [(32, 512, 2, 5), (32, 256, 2, 6), (16, 1024, 1, 4)]),
        (BF16, 1024, 3072, False, [(16, 512, 1, 4), (16, 512, 2, 4), (16, 1024, 2, 3)]),
        (BF16, 4096, 1024, False, [(16, 512, 1, 3), (32, 256, 2, 4), (16, 256, 1, 5)]),
    ]
    for dtype, n, k, gated, shapes in sweep:
        for block_n, block_k, warps, stages in shapes:
            config = GemvConfig("tiles", block_n, block_k, warps, stages)
            us, size = timed(n, k, 8, dtype, {"gated": gated}, config)
            label = f"{'fp8' if dtype == FP8 else 'bf16'} {n}x{k}{' gated' if gated else ''}"
            yield bandwidth(f"tune tiles {label} n{block_n} k{block_k} w{warps} s{stages}", us, size)
