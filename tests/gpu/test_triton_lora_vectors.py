"""DoRA, biases and norms of adapters on CUDA: kernels against plain PyTorch, the engine against merged checkpoints."""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_harness import DEVICE, QUICK, TOLERANCE, check, check_equal, rand
from test_triton_lora import kernels, use
from test_triton_lora_ends import ENDS, ON_DEVICE, TIE

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from penstock.engine.adapters.vectors import SiteVectors, VectorBank


def test_outputs_are_scaled_and_shifted_behind_the_adapters() -> None:
    rng = np.random.default_rng(4)
    touched = frozenset({(0, 0), (1, 0), (0, 2)})
    held = SiteVectors(torch.randn(2, ENDS.columns, generator=torch.Generator().manual_seed(1)), touched)
    for dtype in (torch.bfloat16, torch.float32):
        pair = kernels(ENDS, [5, 16], dtype, 16)
        for kernel in pair:
            kernel.vectors = VectorBank(2, DEVICE)
            kernel.vectors.put(1, held)
        ours, reference = pair
        for tokens in (1, 20) if QUICK else (1, 17, 300):
            slots = rng.integers(-1, 2, tokens).astype(np.int32)
            slots[0] = 1
            for placed in (ENDS.place(0, 0), ENDS.place(1, 0), ENDS.place(0, 2)):
                x, y = rand(tokens, 48, dtype=dtype), rand(tokens, placed.site.outputs, dtype=dtype)
                got, want = y.clone(), y.float()
                for kernel, read, made in ((ours, x, got), (reference, x.float(), want)):
                    if placed.site.end:
                        kernel.begin_head(slots)
                        kernel.add_head(read, made, placed)
                    else:
                        kernel.begin(slots)
                        kernel.add(read, made, placed)
                check(f"{dtype} {tokens} {placed.site.attribute}", got, want, 4 * TOLERANCE[dtype])
                without = torch.from_numpy(np.flatnonzero(slots < 0)).to(DEVICE)
                check_equal(f"{dtype} {tokens}: tokens without adapter", got[without], y[without])
        use(ours, np.full(4, 1, np.int32), 4)
        assert not ours.vectors._groups, "a captured step has no vectors"


def test_engine_with_dora_biases_and_norms() -> None:
    """Steps with such adapters are launched one by one, others from graphs, in turn; more adapters than slots."""
    if not ON_DEVICE:
        return
    from penstock.engine.adapters.spec import AdapterSpec
    from tests.engine.adapters.test_equals_merging import ask
    from tests.engine.adapters.test_vectors import merged, write_vectors
    from tests.engine.harness import assert_idle, generate, make_engine
    from tests.engine.tiny import Reference, write_checkpoint

    rng = random.Random(5)
    kinds: list[dict[str, Any]] = [
        {"dora": True, "bias": "all"},
        {"bias": "lora_only", "modules_to_save": ["layernorm", "norm"]},
        {},
    ]
    for family in ("llama-mha-bias", "gemma2", "qwen3-qknorm"):  # the last with norms of queries and keys
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            base = write_checkpoint(family, root / "base")
            specs, references = [], {"": Reference(base)}
            for i, settings in enumerate(kinds):
                path = write_vectors(root / f"a{i}", base, rank=2 + 5 * i, seed=i, **settings)
                specs.append(AdapterSpec(f"a{i}", str(path)))
                references[f"a{i}"] = Reference(merged(base, path, root / f"m{i}"))
            engine = make_engine(
                base, device="cuda", adapters=tuple(specs), adapter_slots=2, max_running=8, num_blocks=200,
                token_budget=96,
            )  # fmt: skip
            names = list(references)
            asked = {
                f"r{i}": ([rng.randrange(199) for _ in range(rng.randrange(1, 120))], names[i % len(names)])
                for i in range(12)
            }
            got = generate(engine, *(ask(id, prompt, name, 16) for id, (prompt, name) in asked.items()))
            for id, (prompt, name) in asked.items():
                margins = references[name].margins(prompt, got[id])
                assert float(margins.max()) < TIE, (family, id, name, margins)
            assert_idle(engine)


def test_engine_with_adapters_of_other_kinds() -> None:
    """Those that become matrices run from graphs, those with vectors, norms or rows one by one."""
    if not ON_DEVICE:
        return
    from penstock.engine.adapters.spec import AdapterSpec
    from tests.engine.adapters.kind_files import KINDS, merged, write_kind
    from tests.engine.adapters.test_equals_merging import ask
    from tests.engine.harness import assert_idle, generate, make_engine
    from tests.engine.tiny import Reference, write_checkpoint

    rng = random.Random(6)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        base = write_checkpoint("llama-mha-bias", root / "base")
        paths = {name: write_kind(root / name, base, name, seed=seed) for seed, name in enumerate(KINDS)}
        references = {name: Reference(merged(base, path, root / f"{name} merged")) for name, path in paths.items()}
        references[""] = Reference(base)
        specs = tuple(AdapterSpec(name, str(path)) for name, path in paths.items())
        engine = make_engine(
            base, device="cuda", adapters=specs, adapter_slots=6, max_running=8, num_blocks=200, token_budget=96
        )
        names = list(references)
        asked = {
            f"r{i}": ([rng.randrange(199) for _ in range(rng.randrange(1, 120))], names[i % len(names)])
            for i in range(2 * len(names))
        }
        got = generate(engine, *(ask(id, prompt, name, 16) for id, (prompt, name) in asked.items()))
        for id, (prompt, name) in asked.items():
            margins = references[name].margins(prompt, got[id])
            assert float(margins.max()) < TIE, (id, name, margins)
        assert_idle(engine)
