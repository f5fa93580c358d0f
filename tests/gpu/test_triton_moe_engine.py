"""Engines with experts in few bits on CUDA: they run as stored, and in deterministic mode."""

from __future__ import annotations

import os
import random
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from penstock.engine.core import Engine  # noqa: E402
from tests.engine.harness import assert_idle, generate, greedy, make_engine  # noqa: E402
from tests.engine.quantization.layouts import write  # noqa: E402
from tests.engine.tiny import Reference, write_checkpoint  # noqa: E402

ON_DEVICE = torch.cuda.is_available() and os.environ.get("PENSTOCK_GPU_TESTS") != "compile"
LAYOUTS = {"gptq-act-order": 0.63, "int8": 1.13, "fp8": 1.1}
"""Bytes of a weight, at most, with the factors of groups of 32."""


def _engine(folder: Path, **settings: object) -> Engine:
    return make_engine(folder, **{"device": "cuda", "max_running": 8, "num_blocks": 200, **settings})


def test_experts_of_every_layout_run_as_stored() -> None:
    if not ON_DEVICE:
        return
    rng = random.Random(13)
    with tempfile.TemporaryDirectory() as folder:
        dense = write_checkpoint("qwen3-moe", Path(folder) / "dense", spread=0.5)
        prompts = {f"r{n}": [rng.randrange(199) for _ in range(n)] for n in (1, 9, 300)}
        for layout, most in LAYOUTS.items():
            few, same, _ = write(dense, layout, Path(folder))
            engine = _engine(few, dtype="bfloat16" if layout == "fp8" else "float32")
            experts = engine.runner.decoder.layers[0].feed_forward
            weights = 12 * 3 * 64 * 32
            held = experts.gate_up.weight_bytes + experts.down.weight_bytes  # type: ignore[attr-defined]
            assert held <= most * weights, (layout, held / weights)
            got = generate(engine, *(greedy(name, prompt, 20) for name, prompt in prompts.items()))
            assert_idle(engine)
            if layout == "fp8":  # activations are rounded too, and change which experts are chosen
                continue
            reference = Reference(same)
            for name, prompt in prompts.items():
                margins = reference.margins(prompt, got[name])
                assert float(margins.max()) < 0.05, (layout, name, margins)


def test_engines_with_experts_are_batch_invariant() -> None:
    if not ON_DEVICE:
        return
    from tests.engine.test_determinism import WATCHED, bits, others_in_batch, run

    with tempfile.TemporaryDirectory() as folder:
        dense = write_checkpoint("qwen3-moe", Path(folder) / "dense", spread=0.6)
        paths = {layout: write(dense, layout, Path(folder))[0] for layout in ("awq", "fp8-tiles")}
        for case, path in {"dense": dense, **paths}.items():
            engine = _engine(
                path, deterministic=True, dtype="bfloat16", num_blocks=400, max_running=16, token_budget=64,
                prefix_cache=False,
            )  # fmt: skip
            expected = {request.request_id: bits(run(engine, [request]), request.request_id) for request in WATCHED}
            deltas = run(engine, others_in_batch(11) + WATCHED)
            for name, wanted in expected.items():
                assert bits(deltas, name) == wanted, (case, name)
