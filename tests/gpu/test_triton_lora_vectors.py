"""DoRA, biases and norms of adapters on CUDA: kernels against plain PyTorch, the engine against merged checkpoints."""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from gpu_harness import DEVICE, QUICK, TOLERANCE, check, check_equal, poisoned_outputs, rand
from test_triton_lora import kernels, use
from test_triton_lora_ends import ENDS, ON_DEVICE, TIE

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from penstock.engine.adapters.apply import FusedLora, GraphLora
from penstock.engine.adapters.norms import NormBank
from penstock.engine.adapters.vectors import SiteVectors, VectorBank
from penstock.engine.backends.cuda.backend import CudaBackend
from penstock.engine.backends.cuda.kernels.addends import Addends
from penstock.engine.backends.cuda.lora import TritonLora
from penstock.engine.backends.cuda.ops import TritonOps
from penstock.engine.backends.cuda.slot_tables import NormTable, VectorTable
from penstock.engine.backends.reference.ops import ReferenceOps


def test_outputs_are_scaled_and_shifted_behind_the_adapters() -> None:
    rng = np.random.default_rng(4)
    touched = frozenset({(0, 0), (1, 0), (0, 2)})
    held = SiteVectors(torch.randn(2, ENDS.columns, generator=torch.Generator().manual_seed(1)), touched)
    for dtype in (torch.bfloat16, torch.float32):
        pair = kernels(ENDS, [5, 16], dtype, 16)
        ours, reference = pair
        ours.banks.vectors, reference.banks.vectors = VectorTable(ENDS, 2, DEVICE), VectorBank(2, DEVICE)
        for kernel in pair:
            kernel.banks.vectors.put(0, held)
            kernel.banks.vectors.put(0, None)
            kernel.banks.vectors.put(1, held)
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
        bucket, slots = 8, np.array([1, -1, 0, 1, 1], np.int32)
        placed = ENDS.place(0, 0)
        x, y = rand(bucket, 48, dtype=dtype), rand(bucket, placed.site.outputs, dtype=dtype)
        reference.begin(np.append(slots, [-1, -1, -1]).astype(np.int32))
        for alters in (True, False):
            use(ours, slots, bucket, alters=alters)
            if not alters:
                assert not ours.banks.vectors.active, "a graph for other adapters launches nothing for vectors"
                reference.banks.vectors.clear()
            want = y.clone().float()
            reference.add(x.float(), want, placed)
            with poisoned_outputs():
                both = ours.beside(x, placed, lambda _, y=y: y.clone())
            if isinstance(both, Addends):
                assert not alters
                both = both.base + torch.where(both.ranks.unsqueeze(1) > 0, both.delta, 0.0)
            check(f"{dtype} captured, {alters}", both, want, 4 * TOLERANCE[dtype])


@contextmanager
def copies() -> Iterator[list[bool]]:
    """Of every copy into a tensor, whether the host goes on without waiting for it."""
    seen: list[bool] = []
    kept = torch.Tensor.copy_

    def copy_(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        seen.append(non_blocking)
        return kept(self, source, non_blocking)

    with patch.object(torch.Tensor, "copy_", copy_):
        yield seen


def test_adapters_come_and_go_without_waiting_for_the_device() -> None:
    weight = rand(48)
    norms = NormTable([((0, "first"), weight)], 2, DEVICE)
    vectors = VectorTable(ENDS, 2, DEVICE)
    held = SiteVectors(torch.ones(2, ENDS.columns), frozenset({(0, 0)}))
    for table, own in ((vectors, held), (norms, {(0, "first"): torch.ones(48)})):
        for what, wanted in ((None, 0), (own, 2), (None, 1), (None, 0)):
            with copies() as seen:
                table.put(1, what)
            assert seen == [True] * wanted, (type(table).__name__, seen)
            assert bool(table._held[1].any()) is (what is not None)


def test_a_kernel_is_known_as_one_for_graphs_before_any_step() -> None:
    kernel = TritonLora(ENDS, 2, 16, torch.float32, DEVICE)
    assert isinstance(kernel, GraphLora) and isinstance(kernel, FusedLora)


def test_tables_are_taken_only_where_they_are_reserved() -> None:
    backend = CudaBackend.__new__(CudaBackend)
    backend.device = DEVICE
    norms = [((0, "first"), rand(48))]
    for reserved, kinds in ((True, (VectorTable, NormTable)), (False, (VectorBank, NormBank))):
        made = backend.vector_bank(ENDS, 2, reserved=reserved), backend.norm_bank(norms, 2, reserved=reserved)
        assert tuple(map(type, made)) == kinds, made


def test_norms_have_the_gains_of_each_tokens_adapter() -> None:
    hidden, eps = 48, 1e-5
    slots = np.array([1, -1, 0, 2, 1, 0], np.int32)
    for dtype in (torch.bfloat16, torch.float32):
        weight, x_weight, other = (rand(hidden, dtype=dtype) for _ in range(3))
        norms = [((0, "first"), weight), ((0, "out"), x_weight), ((None, "last"), other)]
        own = {(0, "first"): rand(hidden).cpu(), (0, "out"): rand(hidden).cpu()}
        table, bank = NormTable(norms, 3, DEVICE), NormBank(3, norms, DEVICE)
        for each in (table, bank):
            each.put(0, own)
            each.put(1, {(0, "first"): own[0, "out"]})
            each.put(2, own)
            each.put(2, None)
            each.begin(slots)
        table.token_slots = torch.from_numpy(slots).to(DEVICE)
        ours, reference = table.on(TritonOps(DEVICE)), bank.on(ReferenceOps())
        x, residual = rand(len(slots), hidden, dtype=dtype), rand(len(slots), hidden, dtype=dtype)
        for gains in (weight, other, None):
            with poisoned_outputs():
                got = ours.rms_norm(x, gains, eps)
            check(f"{dtype} rms_norm", got, reference.rms_norm(x, gains, eps), 2 * TOLERANCE[dtype])
        for gains, of_x in ((weight, None), (weight, x_weight), (other, x_weight), (None, x_weight)):
            left, right = residual.clone(), residual.clone()
            with poisoned_outputs():
                got = ours.add_rms_norm(x, left, gains, eps, of_x)
            want = reference.add_rms_norm(x, right, gains, eps, of_x)
            check(f"{dtype} add_rms_norm", got, want, 4 * TOLERANCE[dtype])
            check(f"{dtype} residual", left, right, 4 * TOLERANCE[dtype])
        table.begin(np.array([2, -1], np.int32))
        assert not table.active and table.lookup(weight) is None, "no adapter of the step replaces a norm"


def test_norms_that_nobody_replaces_stay_those_of_the_layer() -> None:
    """Layers whose linears have no adapters may round activations to FP8 in their norms."""
    weight, other, x = rand(48), rand(48), rand(2, 48)
    table = NormTable([((0, "first"), weight), ((0, "second"), other)], 1, DEVICE)
    table.put(0, {(0, "first"): torch.ones(48)})
    rounding = SimpleNamespace(rms_norm=lambda *_: "rounded", add_rms_norm=lambda *_: "rounded")
    ops = table.on(rounding)
    for slots in (np.array([-1, -1], np.int32), np.array([0, -1], np.int32)):
        table.begin(slots)
        table.token_slots = torch.from_numpy(slots).to(DEVICE)
        for unknown in (None, rand(48)):
            assert ops.rms_norm(x, unknown, 1e-5) == ops.add_rms_norm(x, x, unknown, 1e-5) == "rounded"
        assert isinstance(ops.rms_norm(x, weight, 1e-5), torch.Tensor) is table.active


def test_engine_with_dora_biases_and_norms() -> None:
    """Decodes with such adapters are replayed from graphs of their own, others from theirs, in turn; more adapters than
    slots."""
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
            unreserved = make_engine(
                base, device="cuda", adapters=tuple(specs), adapter_slots=2, max_running=8, num_blocks=200,
                token_budget=96, adapter_vectors=False,
            )  # fmt: skip
            assert unreserved.runner.executor.altered_graphs is None
            again = generate(unreserved, *(ask(id, prompt, name, 16) for id, (prompt, name) in asked.items()))
            for id, (prompt, name) in asked.items():
                assert float(references[name].margins(prompt, again[id]).max()) < TIE, (family, id, name, "unreserved")
            altered = engine.runner.executor.altered_graphs
            # Steps with norms of queries and keys are launched one by one, and so is what runs beside them.
            assert altered is not None and (altered._captured or family == "qwen3-qknorm"), "outside of graphs"
            assert_idle(engine)


def test_engine_with_adapters_of_other_kinds() -> None:
    """Those that become matrices, vectors or norms run from graphs, those with rows one by one."""
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
