"""Linear layers of one token by programs that stay, against float64; their launch shapes; and a layer made of them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from attention_cases import FP8, build, layout
from gpu_harness import DEVICE, MODE, QUICK, Row, bandwidth, check, check_equal, poisoned_outputs, rand, time_us
from test_triton_gemv import linear64, make_weight
from test_triton_layer import make_layer, run_layer
from torch import Tensor

from penstock.engine.backends.cuda.kernels import gemv
from penstock.engine.backends.cuda.kernels.common import building_kernels
from penstock.engine.backends.cuda.kernels.resident import ResidentConfig, linear, suits
from penstock.engine.backends.cuda.ops import TritonOps

BF16 = torch.bfloat16
Everything = tuple[bool, bool, bool, bool]
CASES: list[tuple[int, int, torch.dtype, ResidentConfig, Everything]] = [
    # gated, bias, norm, residual
    (33, 1056, FP8, ResidentConfig(1, 1, 2, 1), (True, False, True, False)),
    (48, 512, FP8, ResidentConfig(2, 1, 2, 1), (False, True, False, True)),
    (33, 528, BF16, ResidentConfig(1, 1, 2, 1), (False, True, True, True)),
    (7, 512, torch.float16, ResidentConfig(2, 1, 2, 1), (True, True, False, False)),
]
if not QUICK:
    CASES += [
        (4096, 4096, FP8, ResidentConfig(2, 4, 2, 2), (True, False, True, False)),
        (4096, 4096, FP8, ResidentConfig(4, 4, 2, 2), (False, False, True, False)),
        (257, 14336, FP8, ResidentConfig(1, 8, 2, 2), (False, False, False, True)),
        (1000, 4096, BF16, ResidentConfig(1, 4, 3, 2), (True, False, True, False)),
        (4096, 14336, BF16, ResidentConfig(1, 8, 2, 1), (False, False, False, True)),
    ]


def test_products_with_everything_folded_in() -> None:
    for n, k, weight_dtype, config, (gated, use_bias, use_norm, use_residual) in CASES:
        dtype = BF16 if weight_dtype == FP8 else weight_dtype
        x = rand(1, k, dtype=dtype, scale=2)
        weight, scale = make_weight(2 * n if gated else n, k, weight_dtype)
        assert suits(x, weight)
        bias = rand(weight.shape[0], dtype=dtype) if use_bias else None
        norm = rand(k, dtype=dtype) if use_norm else None
        residual = rand(1, n, dtype=dtype) if use_residual else None
        want = linear64(x, weight, bias, scale, norm, residual, gated)
        options = {"bias": bias, "weight_scale": scale, "norm": norm, "eps": 1e-5, "gated": gated}
        with poisoned_outputs():
            out = torch.empty((1, n), dtype=dtype, device=DEVICE) if residual is None else residual
            linear(x, weight, out, config, residual=residual, **options)
        check(f"{weight_dtype} {n} x {k} {config}", out, want, 1.2e-2)


def test_inputs_beyond_float16() -> None:
    """FP8 weights are multiplied as float16, whose range is less than bfloat16's."""
    weight, scale = make_weight(16, 512, FP8)
    for size in (1e5, 1e30):
        x = rand(1, 512, dtype=BF16, scale=size)
        out = torch.empty(1, 16, dtype=BF16, device=DEVICE)
        linear(x, weight, out, ResidentConfig(1, 1, 2, 1), weight_scale=scale)
        check(f"inputs of {size}", out, linear64(x, weight, scale=scale), 1.2e-2)


def test_same_bits_with_dependent_launch() -> None:
    """A chain in which every product reads what the one before wrote."""
    if MODE != "device":
        return
    weights = [make_weight(4096, 4096, FP8) for _ in range(4)]
    start = rand(1, 4096, dtype=BF16)
    norm = rand(4096, dtype=BF16)
    results = []
    for pdl in (False, True, True):
        x = start
        for _ in range(20):
            for weight, scale in weights:
                out = torch.empty_like(x)
                x = linear(x, weight, out, ResidentConfig(2, 4, 2, 2), weight_scale=scale, norm=norm, eps=1e-5, pdl=pdl)
        results.append(x)
    check_equal("dependent launch", results[1], results[0])
    check_equal("dependent launch again", results[2], results[0])


Shape = tuple[int, int, dict[str, bool]]
MATRICES: dict[str, Shape] = {
    "qkv": (6144, 4096, {"norm": True}),
    "o": (4096, 4096, {"residual": True}),
    "gate_up": (14336, 4096, {"norm": True, "gated": True}),
    "down": (4096, 14336, {"residual": True}),
    "head": (128256, 4096, {"norm": True}),
}
Launch = tuple[int, int, int, int]
NARROW: list[Launch] = [(2, 4, 2, 2), (1, 4, 4, 2), (2, 4, 3, 2), (2, 4, 2, 3), (2, 4, 2, 4), (2, 2, 2, 4)]
WIDE: list[Launch] = [(4, 4, 2, 2), (4, 8, 2, 2), (4, 4, 3, 1)]
SWEEP: list[tuple[torch.dtype, str, list[Launch]]] = [
    (FP8, "gate_up", [*NARROW, *WIDE, (2, 4, 3, 3)]),
    (FP8, "down", [(1, 8, 2, 2), (1, 8, 3, 2), (1, 8, 2, 3), (1, 8, 4, 1), (1, 4, 2, 2), (1, 16, 3, 1)]),
    (FP8, "qkv", [*NARROW, (4, 4, 2, 2)]),
    (FP8, "o", NARROW),
    (BF16, "head", [(1, 4, 2, 2), (2, 4, 2, 2), (1, 4, 3, 3), (1, 8, 3, 2)]),
    (BF16, "gate_up", [(1, 4, 2, 2), (1, 4, 3, 2), (1, 4, 2, 3), (2, 4, 2, 2)]),
    (BF16, "down", [(1, 8, 2, 1), (1, 16, 2, 1), (1, 16, 3, 1)]),
    (BF16, "qkv", [(1, 4, 2, 2), (1, 4, 3, 2), (1, 4, 2, 4)]),
    (BF16, "o", [(1, 4, 2, 2), (1, 4, 3, 2), (1, 4, 2, 4)]),
]
SETS: dict[str, dict[str, Launch]] = {
    "small": {"qkv": (2, 4, 2, 2), "o": (2, 4, 2, 2), "gate_up": (2, 4, 2, 2), "down": (1, 8, 2, 1)},
    "medium": {"qkv": (2, 4, 3, 2), "o": (2, 4, 3, 2), "gate_up": (2, 4, 3, 2), "down": (1, 8, 3, 1)},
    "large": {"qkv": (2, 4, 2, 4), "o": (2, 4, 2, 4), "gate_up": (2, 4, 3, 3), "down": (1, 8, 2, 2)},
}


def calls(
    weights: list[tuple[Tensor, Tensor | None]], n: int, k: int, folded: dict[str, bool], config: Launch | None
) -> list[partial[Tensor]]:
    x, out = rand(1, k, dtype=BF16), rand(1, n, dtype=BF16)
    options = {
        "norm": rand(k, dtype=BF16) if "norm" in folded else None,
        "eps": 1e-5,
        "residual": out if "residual" in folded else None,
        "gated": "gated" in folded,
        "pdl": True,
    }
    if config is None:
        return [partial(gemv.linear, x, w, out=out, weight_scale=s, **options) for w, s in weights]
    return [partial(linear, x, w, out, ResidentConfig(*config), weight_scale=s, **options) for w, s in weights]


def tune_resident() -> Iterator[Row]:
    for dtype, name, configs in SWEEP:
        n, k, folded = MATRICES[name]
        rows = 2 * n if "gated" in folded else n
        size = rows * k * dtype.itemsize
        copies = 1 if MODE == "compile" else max(2, min(24, 500_000_000 // size))
        weights = [make_weight(rows, k, dtype) for _ in range(copies)]
        if MODE == "device":
            with building_kernels():
                for config in configs:
                    calls(weights[:1], n, k, folded, config)[0]()
        for config in (None, *configs):
            us = time_us(calls(weights, n, k, folded, config), repeats=9)
            label = "as now" if config is None else " ".join(map(str, config))
            yield bandwidth(f"{'fp8' if dtype == FP8 else 'bf16'} b1 {name} {label}", us, size)
        del weights


def choice(configs: dict[str, Launch], x: Tensor, weight: Tensor, *, out: Tensor | None = None, **options) -> Tensor:
    """`gemv.linear` by the launch shapes of a set."""
    gated = options.get("gated", False)
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    name = "gate_up" if gated else "qkv" if options.get("norm") is not None else "down" if x.shape[1] > n else "o"
    if name not in configs:
        return gemv.linear(x, weight, out=out, **options)
    out = torch.empty((1, n), dtype=x.dtype, device=x.device) if out is None else out
    return linear(x, weight, out, ResidentConfig(*configs[name]), **options)


def tune_resident_layer() -> Iterator[Row]:
    heads = layout(32, 8, 128)
    for dtype, label in ((FP8, "fp8"),):
        layers = [make_layer(4096, 14336, heads, dtype) for _ in range(1 if MODE == "compile" else 8)]
        size = sum(w[0].numel() * w[0].element_size() for w in vars(layers[0]).values() if w is not layers[0].norms)
        case = build([1], [300], heads, BF16, max_context=8192)
        cos_sin, residual = rand(1024, heads.head_dim), rand(1, 4096, dtype=BF16)
        ops = TritonOps(DEVICE, pdl=True)
        sets = {"as now": {}, **SETS}
        sets["small but down"] = {k: v for k, v in SETS["small"].items() if k != "down"}
        sets["small qkv and o"] = {k: v for k, v in SETS["small"].items() if k in ("qkv", "o")}
        if MODE == "device":
            with building_kernels():
                for configs in sets.values():
                    run_layer(ops, layers[0], residual, case, cos_sin, partial(choice, configs))
        for name, configs in sets.items():
            product = partial(choice, configs)
            us = time_us([partial(run_layer, ops, x, residual, case, cos_sin, product) for x in layers], repeats=9)
            yield bandwidth(f"layer llama-8b {label} b1, {name}", us, size)
