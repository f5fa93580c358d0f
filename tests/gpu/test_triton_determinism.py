"""Deterministic mode on CUDA: linears and attention that are batch-invariant, and the engine made of them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from gpu_harness import MODE, QUICK, Row, bandwidth, check, poisoned_outputs, rand, time_us
from test_triton_gemv import linear64

from penstock.engine.backends.cuda.kernels.matmul import matmul

BF16 = torch.bfloat16
ON_DEVICE = MODE == "device"
SHAPES = [(48, 96), (33, 80)] if QUICK else [(4096, 4096), (6144, 512), (1000, 576), (28672, 4096), (257, 1536)]


def test_linears_ignore_how_many_rows_there_are() -> None:
    for n, k in SHAPES:
        for dtype in (BF16, torch.float32):
            x, weight = rand(70, k, dtype=dtype), rand(n, k, dtype=dtype, scale=k**-0.5)
            bias = rand(n, dtype=dtype)
            with poisoned_outputs():
                whole = matmul(x, weight, bias)
            check(f"matmul {k} -> {n} {dtype}", whole, linear64(x, weight, bias))
            if MODE == "compile":
                continue
            for begin, rows in ((0, 1), (5, 1), (63, 2), (1, 8), (3, 64), (69, 1)):
                with poisoned_outputs():
                    part = matmul(x[begin : begin + rows].contiguous(), weight, bias)
                assert torch.equal(part, whole[begin : begin + rows]), (n, k, dtype, begin, rows)


def test_the_engine_is_batch_invariant() -> None:
    if not ON_DEVICE:
        return
    from tests.engine.harness import make_engine
    from tests.engine.test_determinism import WATCHED, bits, others_in_batch, run
    from tests.engine.tiny import write_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint("llama-mha-bias", Path(folder), spread=0.6)
        for dtype in ("float32", "bfloat16"):
            fixed = {"device": "cuda", "dtype": dtype, "deterministic": True, "num_blocks": 400, "max_running": 16}
            alone = make_engine(path, **fixed)
            expected = {request.request_id: bits(run(alone, [request]), request.request_id) for request in WATCHED}
            again = {request.request_id: bits(run(alone, [request]), request.request_id) for request in WATCHED}
            assert again == expected, "with the prompt found in the cache"
            for budget, others in ((512, 3), (64, 11), (7, 2)):
                engine = make_engine(path, **fixed, token_budget=budget)
                deltas = run(engine, others_in_batch(others) + WATCHED)
                for name, wanted in expected.items():
                    assert bits(deltas, name) == wanted, (dtype, name, budget, others)


def test_the_engine_is_batch_invariant_with_adapters() -> None:
    """Requests with and without adapters, in company of others with and without."""
    if not ON_DEVICE:
        return
    from penstock.engine.adapters.spec import AdapterSpec
    from tests.engine.adapters.files import write_adapter
    from tests.engine.adapters.test_ends import write_ends
    from tests.engine.harness import make_engine
    from tests.engine.test_determinism import WATCHED, bits, others_in_batch, run
    from tests.engine.tiny import write_checkpoint

    for family in ("llama-gqa", "qwen3-moe"):
        with tempfile.TemporaryDirectory() as folder:
            path = write_checkpoint(family, Path(folder) / "base", spread=0.6)
            targets = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")
            files = [write_adapter(Path(folder) / "0", path, rank=5, targets=targets)]
            files.append(write_ends(Path(folder) / "1", path, linears=("k_proj",)))
            files.append(write_adapter(Path(folder) / "2", path, rank=20, seed=2, targets=("q_proj", "v_proj")))
            specs = tuple(AdapterSpec(str(i), str(file)) for i, file in enumerate(files))
            fixed = {"device": "cuda", "dtype": "bfloat16", "deterministic": True, "num_blocks": 400, "max_running": 8}
            requests = [replace(request, adapter=name) for request, name in zip(WATCHED, "01", strict=False)]
            requests += [WATCHED[2], replace(WATCHED[0], request_id="narrow", adapter="2")]
            alone = make_engine(path, **fixed, adapters=specs)
            expected = {request.request_id: bits(run(alone, [request]), request.request_id) for request in requests}
            engine = make_engine(path, **fixed, adapters=specs, token_budget=64)
            company = [replace(other, adapter=("", "0", "1", "2")[i % 4]) for i, other in enumerate(others_in_batch(5))]
            deltas = run(engine, company + requests)
            for name, wanted in expected.items():
                assert bits(deltas, name) == wanted, (family, name)


def bench_fixed_linears() -> Iterator[Row]:
    """Against the usual path of the same shape."""
    from penstock.engine.backends.cuda.linear import CudaLinear

    for n, k in ((6144, 4096), (28672, 4096), (4096, 14336)):
        weights = [rand(n, k, dtype=BF16, scale=k**-0.5) for _ in range(3)]
        for rows in (1, 16, 512):
            x = rand(rows, k, dtype=BF16)
            fixed = time_us([lambda w=w, x=x: matmul(x, w, None) for w in weights])
            usual = time_us([lambda w=w, x=x: CudaLinear(w, None)(x) for w in weights])
            name, us, rate = bandwidth(f"fixed linear {rows} x {k} -> {n}", fixed, 2.0 * n * k)
            yield name, us, f"{rate}, {fixed / usual if usual else 0:.2f}x the usual"
