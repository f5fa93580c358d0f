"""Adapters on embedding and head on CUDA: the kernels against plain PyTorch, the engine against merged checkpoints."""

from __future__ import annotations

import os
import random
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from gpu_harness import DEVICE, QUICK, TOLERANCE, check, check_equal, poisoned_outputs, rand
from test_triton_lora import kernels, use

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from penstock.engine.adapters.layout import AdapterLayout, Site  # noqa: E402

ON_DEVICE = torch.cuda.is_available() and os.environ.get("PENSTOCK_GPU_TESTS") != "compile"
TIE = 2e-2
ENDS = AdapterLayout(
    (
        Site("qkv", ("q", "k", "v"), (32, 16, 16), 48),
        Site("embedding", ("embed_tokens",), (48,), 199, further=True, end="embedding"),
        Site("lm_head", ("lm_head",), (199,), 48, further=True, end="head"),
    ),
    2,
    by_output=True,
)


def test_each_token_gets_the_embedding_and_the_logits_of_its_adapter() -> None:
    rng = np.random.default_rng(2)
    embedding, head = ENDS.place(0, 1), ENDS.place(0, 2)
    for dtype in (torch.bfloat16, torch.float32):
        ours, reference = kernels(ENDS, [1, 5, 16, 24], dtype, 24)
        for tokens in (1, 20) if QUICK else (1, 17, 40, 300):
            slots = rng.integers(-1, 4, tokens).astype(np.int32)
            slots[0] = 3
            ids = torch.from_numpy(rng.integers(0, 199, tokens)).to(DEVICE)
            reference.begin(slots)
            for captured in (False, True) if tokens < 100 else (False,):
                if captured:
                    use(ours, slots, tokens)
                else:
                    ours.begin(slots)
                y = rand(tokens, 48, dtype=dtype)
                got, want = y.clone(), y.float()
                with poisoned_outputs():
                    ours.add_embedding(ids, got, embedding)
                reference.add_embedding(ids, want, embedding)
                check(f"{dtype} {tokens} embedding", got, want, 2 * TOLERANCE[dtype])
                x, logits = rand(tokens, 48, dtype=dtype), rand(tokens, 199, dtype=dtype)
                added, sums = logits.clone(), logits.float()
                with poisoned_outputs():
                    ours.add_head(x, added, head)
                reference.add_head(x.float(), sums, head)
                check(f"{dtype} {tokens} head", added, sums, 2 * TOLERANCE[dtype])
                without = torch.from_numpy(np.flatnonzero(slots < 0)).to(DEVICE)
                check_equal(f"{dtype} {tokens}: tokens without adapter", added[without], logits[without])


def test_engine_with_adapters_on_embedding_and_head() -> None:
    """Decode graphs, prompts beside them, several adapters and none in one batch, more adapters than slots."""
    if not ON_DEVICE:
        return
    from penstock.engine.adapters.spec import AdapterSpec
    from tests.engine.adapters.test_ends import merged, write_ends
    from tests.engine.adapters.test_equals_merging import ask
    from tests.engine.harness import assert_idle, generate, make_engine
    from tests.engine.tiny import Reference, write_checkpoint

    rng = random.Random(8)
    for family in ("llama-gqa", "llama-mqa-tied", "gemma2"):
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            base = write_checkpoint(family, root / "base")
            specs, references = [], {"": Reference(base)}
            for i, ends in enumerate((("embed_tokens", "lm_head"), ("lm_head",), ("embed_tokens",))):
                path = write_ends(root / f"a{i}", base, ends=ends, rank=2 + 5 * i, seed=i, whole=True)
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


def test_rows_of_the_head_are_replaced_behind_a_step() -> None:
    from penstock.engine.adapters.rows import EndRows, ReplacedRows, RowBank

    ours, _ = kernels(ENDS, [8, 8], torch.float32, 8)
    ours.banks.rows = RowBank(2, 199, 48, torch.float32, DEVICE, most=4)
    ours.banks.rows.put(1, EndRows(head=ReplacedRows(torch.tensor([4]), torch.ones(1, 48))))
    ours.begin(np.array([1, 1, 0, -1, 1], np.int32))
    ours.begin_head(np.array([1, -1, 0], np.int32))
    x, y = rand(3, 48, dtype=torch.float32), torch.zeros(3, 199, device=DEVICE)
    ours.banks.rows.replace_logits(x, y)
    want = torch.zeros_like(y)
    want[0, 4] = x[0].sum()
    check("rows of the head", y, want, TOLERANCE[torch.float32])


def test_engine_with_replaced_rows_of_embedding_and_head() -> None:
    """Steps that replace rows are launched one by one, others from graphs, in turn; more adapters than slots."""
    if not ON_DEVICE:
        return
    from penstock.engine.adapters.spec import AdapterSpec
    from tests.engine.adapters.test_end_rows import KINDS, replaced, write_saved
    from tests.engine.adapters.test_ends import merged, write_ends
    from tests.engine.adapters.test_equals_merging import ask
    from tests.engine.harness import assert_idle, generate, make_engine
    from tests.engine.tiny import Reference, write_checkpoint

    rng = random.Random(9)
    for family in ("llama-gqa", "llama-mqa-tied", "gemma2"):
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            base = write_checkpoint(family, root / "base")
            ends = write_ends(root / "ends", base, whole=True)
            specs, references = [AdapterSpec("ends", str(ends))], {"": Reference(base)}
            references["ends"] = Reference(merged(base, ends, root / "merged ends"))
            for seed, settings in enumerate(KINDS.values()):
                path = write_saved(root / f"a{seed}", base, seed=seed, **settings)
                specs.append(AdapterSpec(f"a{seed}", str(path)))
                references[f"a{seed}"] = Reference(replaced(base, path, root / f"m{seed}"))
            engine = make_engine(
                base, device="cuda", adapters=tuple(specs), adapter_slots=3, max_running=8, num_blocks=200,
                token_budget=96,
            )  # fmt: skip
            names = list(references)
            asked = {
                f"r{i}": ([rng.randrange(199) for _ in range(rng.randrange(1, 120))], names[i % len(names)])
                for i in range(2 * len(names))
            }
            got = generate(engine, *(ask(id, prompt, name, 16) for id, (prompt, name) in asked.items()))
            got |= generate(engine, *(ask(id, *asked[id], 16) for id in ("r0", "r1")))
            for id, (prompt, name) in asked.items():
                margins = references[name].margins(prompt, got[id])
                assert float(margins.max()) < TIE, (family, id, name, margins)
            assert_idle(engine)


def test_engine_with_tokens_of_adapters() -> None:
    """Logits behind the model's vocabulary, for some rows of a batch."""
    if not ON_DEVICE:
        return
    from penstock.engine.adapters.spec import AdapterSpec
    from tests.engine.adapters.test_added_tokens import KINDS, mixed
    from tests.engine.adapters.test_end_rows import replaced, write_saved
    from tests.engine.harness import assert_idle, generate, make_engine
    from tests.engine.tiny import Reference, write_checkpoint

    for family in ("llama-gqa", "gemma2"):
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            base = write_checkpoint(family, root / "base")
            specs, references = [], {"": Reference(base)}
            for seed, (name, settings) in enumerate(KINDS.items()):
                path = write_saved(root / name, base, seed=seed, size=0.9, **settings)
                specs.append(AdapterSpec(name, str(path)))
                references[name] = Reference(replaced(base, path, root / f"merged {name}"))
            engine = make_engine(base, device="cuda", adapters=tuple(specs), max_running=8, num_blocks=200)
            got = generate(engine, *mixed())
            for request in mixed():
                margins = references[request.adapter].margins(request.prompt, got[request.request_id])
                assert float(margins.max()) < TIE, (family, request.request_id, request.adapter, margins)
            assert_idle(engine)


def test_engine_with_virtual_tokens() -> None:
    """Prompt tuning: prompts are launched one by one, decodes behind them are those of the model, from its graphs."""
    if not ON_DEVICE:
        return
    from penstock.engine.adapters.spec import AdapterSpec
    from tests.engine.adapters.files import write_adapter
    from tests.engine.adapters.test_equals_merging import ask
    from tests.engine.adapters.virtual_files import KEYS, TOKENS, Prefixed, WithCache, write_prefix, write_prompt
    from tests.engine.harness import assert_idle, generate, make_engine
    from tests.engine.tiny import Reference, write_checkpoint

    rng = random.Random(7)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        base = write_checkpoint("llama-mqa-tied", root / "base")
        paths = {name: write_prompt(root / name, base, name, seed=seed) for seed, name in enumerate(TOKENS)}
        references: dict[str, Reference] = {name: Prefixed(base, path) for name, path in paths.items()}
        keys = {name: write_prefix(root / name, base, name, seed=seed) for seed, name in enumerate(KEYS)}
        references |= {name: WithCache(base, path) for name, path in keys.items()}
        references[""] = Reference(base)
        specs = [AdapterSpec(name, str(path)) for name, path in (paths | keys).items()]
        specs.append(AdapterSpec("lora", str(write_adapter(root / "lora", base, rank=4))))
        engine = make_engine(
            base, device="cuda", adapters=tuple(specs), adapter_slots=3, max_running=8, num_blocks=200, token_budget=32
        )
        names = [*references, "lora"]
        asked = {
            f"r{i}": ([rng.randrange(199) for _ in range(rng.randrange(1, 60))], names[i % len(names)])
            for i in range(3 * len(names))
        }
        got = generate(engine, *(ask(id, prompt, name, 12) for id, (prompt, name) in asked.items()))
        for id, (prompt, name) in asked.items():
            if name != "lora":
                margins = references[name].margins(prompt, got[id])
                assert float(margins.max()) < TIE, (id, name, margins)
        assert_idle(engine)
