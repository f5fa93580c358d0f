"""Linears on 4-bit and 8-bit groups against float64: any batch, group size and dtype, with everything folded in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from gpu_harness import DEVICE, MODE, QUICK, Row, bandwidth, check, check_equal, poisoned_outputs, rand, time_us
from test_triton_elementwise import norm64
from test_triton_gemv import LLAMA, QWEN
from torch import Tensor

from penstock.engine.backends.cuda.group_quantizer import GroupQuantizer
from penstock.engine.backends.cuda.grouped_linear import Int8Linear
from penstock.engine.backends.cuda.kernels import int8
from penstock.engine.backends.cuda.kernels.grouped import GroupedConfig, GroupedWeight, join_factors, linear, widen
from penstock.engine.loading.groups import IntGroups
from penstock.engine.quantization.grids import round_int4, round_int8

BF16, F16 = torch.bfloat16, torch.float16
SHAPES = [(48, 128), (33, 64)] if QUICK else [(4096, 4096), (6144, 512), (1000, 576), (4096, 14336), (257, 1536)]


def integers(low: int, high: int, *shape: int) -> Tensor:
    if MODE == "compile":
        return torch.empty(shape, dtype=torch.int32)
    return torch.randint(low, high, shape, device=DEVICE, dtype=torch.int32)


def make(rows: int, k: int, bits: int, group: int, minimum: bool = True) -> tuple[GroupedWeight, Tensor]:
    """A random weight and what it stands for, in float64; the packing is written out here a second time."""
    q = integers(0, 16, rows, k) if bits == 4 else integers(-127, 128, rows, k)
    scale = (rand(k // group, rows).abs() + 0.1).mul_(k**-0.5 / (4 if bits == 4 else 64)).to(F16)
    low = (rand(k // group, rows) * k**-0.5).to(F16) if minimum else None
    if bits == 4:
        blocks = q.reshape(rows, k // 32, 2, 16)
        data = (blocks[:, :, 0] + 16 * blocks[:, :, 1]).reshape(rows, k // 2).to(torch.uint8)
    else:
        data = q.to(torch.int8)
    weight = GroupedWeight(data, join_factors(scale, low), bits, group, minimum)
    if MODE == "compile":
        return weight, torch.empty(rows, k, dtype=torch.float64)
    wide = q.double() * scale.double().T.repeat_interleave(group, 1)
    if low is not None:
        wide += low.double().T.repeat_interleave(group, 1)
    return weight, wide


def linear64(
    x: Tensor, wide: Tensor, bias: Tensor | None, norm: Tensor | None, residual: Tensor | None, gated: bool
) -> Tensor:
    y = (x.double() if norm is None else norm64(x, norm, 1e-5)) @ wide.T
    if bias is not None:
        y = y + bias.double()
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = torch.nn.functional.silu(gate) * up
    return y if residual is None else y + residual.double()


def groups_of(k: int) -> list[int]:
    return [group for group in (32, 64, 128) if k % group == 0]


def product(n: int, k: int, bits: int, group: int, dtype: torch.dtype, batch: int) -> None:
    weight, wide = make(n, k, bits, group, minimum=(batch + group) % 3 != 0)
    x = rand(batch, k, dtype=dtype)
    with poisoned_outputs():
        got = linear(x, weight)
    check(f"int{bits} group {group} {batch} x {k} -> {n} {dtype}", got, linear64(x, wide, None, None, None, False))


def test_grouped_linear_of_any_shape() -> None:
    for n, k in SHAPES:
        for bits in (4, 8):
            product(n, k, bits, groups_of(k)[-1], BF16, 1)
            product(n, k, bits, groups_of(k)[-1], BF16, 11 if QUICK else 40)


def test_grouped_linear_in_any_batch_group_and_dtype() -> None:
    n, k = SHAPES[0] if QUICK else (1000, 768)
    for bits in (4, 8):
        for group in groups_of(k):
            for dtype in (BF16, F16, torch.float32):
                for batch in (3,) if QUICK else (1, 2, 8, 16, 32, 100):
                    product(n, k, bits, group, dtype, batch)


def test_grouped_linear_folds_its_neighbours() -> None:
    n, k = (33, 64) if QUICK else (1000, 576)
    for bits in (4, 8):
        for batch in (1, 3) if QUICK else (1, 8, 24):
            for gated in (False, True):
                for use_bias, use_norm, use_residual in (
                    (True, False, False),
                    (False, True, False),
                    (True, True, True),
                ):
                    x = rand(batch, k, dtype=BF16, scale=2)
                    weight, wide = make(2 * n if gated else n, k, bits, groups_of(k)[-1])
                    bias = rand(wide.shape[0], dtype=BF16) if use_bias else None
                    norm = rand(k, dtype=BF16) if use_norm else None
                    residual = rand(batch, n, dtype=BF16) if use_residual else None
                    want = linear64(x, wide, bias, norm, residual, gated)
                    with poisoned_outputs():
                        got = linear(
                            x, weight, bias=bias, norm=norm, eps=1e-5, residual=residual, gated=gated, out=residual
                        )
                    check(f"int{bits} batch {batch} gated={gated} {use_bias} {use_norm}", got, want, 1.2e-2)


def test_large_inputs_keep_their_precision() -> None:
    """Inputs far from zero: what the kernel adds to every weight and takes back must not drown the result."""
    weight, wide = make(64, 128, 4, 64)
    x = (rand(2, 128) + 30).to(BF16)
    check("large mean", linear(x, weight), linear64(x, wide, None, None, None, False))


def test_strided_input_rows() -> None:
    weight, wide = make(32, 64, 4, 32)
    x = rand(3, 256, dtype=BF16)[:, 64:128]
    check("strided", linear(x, weight), linear64(x, wide, None, None, None, False))


def test_widened_rows() -> None:
    for bits in (4, 8):
        for minimum in (False, True):
            weight, wide = make(70, 128, bits, 64, minimum)
            for first, count in ((0, 70), (32, 38), (64, 16)):
                with poisoned_outputs():
                    got = widen(weight, first, torch.empty(count, 128, dtype=torch.float32, device=DEVICE))
                rows = min(count, 70 - first)
                check(f"int{bits} rows from {first}", got[:rows], wide[first : first + rows], 1e-6)


def test_grouped_linear_repeats_itself_in_a_graph() -> None:
    if MODE != "device":
        return
    weight, _ = make(4096, 4096, 4, 128)
    x, out = rand(4, 4096, dtype=BF16), torch.empty(4, 4096, dtype=BF16, device=DEVICE)
    want = linear(x, weight).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        linear(x, weight, out=out)
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        check_equal("replayed", out, want)


def timed(
    n: int, k: int, batch: int, bits: int, group: int, folded: dict[str, bool], config: GroupedConfig | None = None
) -> tuple[float, float]:
    """Microseconds and bytes of one linear; weights rotate so that the cache cannot hold them."""
    rows = 2 * n if folded.get("gated") else n
    copies = max(2, min(48, 400_000_000 // (rows * k * bits // 8)))
    weights = [make(rows, k, bits, group)[0] for _ in range(copies if MODE != "compile" else 1)]
    x = rand(batch, k, dtype=BF16)
    norm = rand(k, dtype=BF16) if folded.get("norm") else None
    residual = rand(batch, n, dtype=BF16) if folded.get("residual") else None
    gated = folded.get("gated", False)
    us = time_us(
        [lambda w=w: linear(x, w, norm=norm, eps=1e-5, residual=residual, gated=gated, config=config) for w in weights],
        repeats=9,
    )
    return us, float(weights[0].nbytes + (batch * (n + k)) * 2)


def bench_grouped() -> Iterator[Row]:
    for bits, group in ((4, 128), (4, 32), (8, 32)):
        for batch in (1, 4, 8, 16, 32, 64, 128, 256):
            if batch > 8 and (bits, group) != (4, 128):
                continue
            for name, (n, k, folded) in LLAMA.items():
                if name == "head" and (bits, group, batch) != (4, 128, 1):
                    continue
                folded = {key: on for key, on in folded.items() if key != "norm"}
                us, size = timed(n, k, batch, bits, group, folded)
                rows = 2 * n if folded.get("gated") else n
                yield bandwidth(f"int{bits} g{group} b{batch} {name} {rows}x{k} {'+'.join(folded)}", us, size)
    for name, (n, k, folded) in QWEN.items():
        us, size = timed(n, k, 1, 4, 128, folded)
        yield bandwidth(f"int4 g128 b1 {name} {n}x{k}", us, size)


def bench_widen() -> Iterator[Row]:
    weight, _ = make(4096, 14336, 4, 128)
    out = torch.empty(4096, 14336, dtype=BF16, device=DEVICE)
    yield bandwidth("widen int4 g128 4096x14336", time_us([lambda: widen(weight, 0, out)]), 4096 * 14336 * 2.5)


def tune_grouped() -> Iterator[Row]:
    for n, k, gated in ((6144, 4096, False), (4096, 4096, False), (14336, 4096, True), (4096, 14336, False)):
        for batch in (1, 8):
            for block_n, unroll, warps, stages in (
                (16, 1, 1, 4),
                (16, 2, 1, 4),
                (16, 4, 1, 3),
                (16, 4, 1, 4),
                (32, 1, 2, 4),
                (32, 2, 2, 4),
                (32, 4, 2, 3),
                (32, 2, 1, 4),
                (64, 1, 4, 4),
                (64, 2, 4, 3),
            ):
                config = GroupedConfig(block_n, unroll, warps, stages)
                us, size = timed(n, k, batch, 4, 128, {"gated": gated}, config)
                label = f"{n}x{k}{' gated' if gated else ''} b{batch}"
                yield bandwidth(f"tune int4 {label} n{block_n} u{unroll} w{warps} s{stages}", us, size)


def test_int8_activations() -> None:
    for tokens, k, n in ((3, 64, 40), (9, 100, 1030)) if QUICK else ((3, 4096, 4096), (40, 14336, 1000)):
        x = rand(tokens, k, dtype=BF16)
        with poisoned_outputs():
            rounded, scale = int8.quantize(x)
        if MODE != "compile":
            wide = rounded[:tokens].double() * scale.double()[:, None]
            assert float((wide - x.double()).abs().amax() / x.double().abs().amax()) <= 0.51 / 127
        sums, factor, bias = integers(-9999, 9999, tokens + 5, n), rand(n).abs(), rand(n, dtype=BF16)
        with poisoned_outputs():
            got = int8.rescale(sums, scale, factor, bias, BF16)
        check("rescale", got, sums[:tokens].double() * scale.double()[:, None] * factor.double() + bias.double())


def layer(rows: int, k: int, bits: int, group: int) -> IntGroups:
    dense = rand(rows, k, scale=k**-0.5)
    return round_int4(dense, group) if bits == 4 else round_int8(dense, group)


def test_linears_made_of_stored_groups() -> None:
    """What the engine builds: any group size, an order of inputs, matrices that do not go together."""
    if MODE == "compile":
        return
    make_linear = GroupQuantizer(DEVICE, BF16, "auto")._linear
    k = 256 if QUICK else 1024
    for groups in (
        layer(48, k, 4, 128),
        layer(48, k, 4, k),
        layer(48, k, 8, 32),
        replace(layer(48, k, 4, 64), order=torch.randperm(k, device=DEVICE)),
    ):
        for tokens in (1, 5) if QUICK else (1, 5, 40, 300):
            x = rand(tokens, k, dtype=BF16)
            want = x.double() @ groups.dense().double().T
            check(f"{groups.bits} bits, {groups.group}, {tokens}", make_linear(groups, None)(x), want, 1.2e-2)
            fused = make_linear(groups, None).fused(x, residual=want.to(BF16))
            check("added", fused, 2 * want, 1.2e-2)


def test_int8_weights_and_activations() -> None:
    if MODE != "device":
        return  # the vendor's int8 product
    groups = layer(512, 1024, 8, 1024)
    linear = GroupQuantizer(DEVICE, BF16, "int8", "int8")._linear(groups, None)
    assert isinstance(linear, Int8Linear)
    for tokens in (1, 4, 8, 9, 16, 17, 300):
        x = rand(tokens, 1024, dtype=BF16)
        check(f"w8a8 {tokens}", linear(x), x.double() @ groups.dense().double().T, 2e-2)
