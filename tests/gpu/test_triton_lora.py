"""LoRA kernels against plain PyTorch, and the engine with adapters on CUDA: graphs, overlap, eviction."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from attention_cases import build
from attention_cases import layout as heads_of
from gpu_harness import (
    DEVICE,
    MODE,
    QUICK,
    TOLERANCE,
    check,
    check_equal,
    poisoned_outputs,
    rand,
)
from test_triton_gemv import linear64, make_weight
from test_triton_moe import make_moe

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from penstock.engine.adapters.apply import TABLES  # noqa: E402
from penstock.engine.adapters.experts import AdaptedExperts  # noqa: E402
from penstock.engine.adapters.layout import AdapterLayout, Site  # noqa: E402
from penstock.engine.adapters.peft import LoadedAdapter  # noqa: E402
from penstock.engine.adapters.visits import VisitBank, VisitChange, VisitChanges  # noqa: E402
from penstock.engine.backends.cuda.experts import group  # noqa: E402
from penstock.engine.backends.cuda.kernels import gemv  # noqa: E402
from penstock.engine.backends.cuda.kernels.addends import Addends  # noqa: E402
from penstock.engine.backends.cuda.kernels.norm import rms_norm  # noqa: E402
from penstock.engine.backends.cuda.linear import CudaLinear  # noqa: E402
from penstock.engine.backends.cuda.lora import TritonLora  # noqa: E402
from penstock.engine.backends.cuda.ops import TritonOps  # noqa: E402
from penstock.engine.backends.reference.lora import ReferenceLora  # noqa: E402
from penstock.engine.models.layers.experts import ExpertSlots  # noqa: E402

ON_DEVICE = torch.cuda.is_available() and os.environ.get("PENSTOCK_GPU_TESTS") != "compile"
TIE = 2e-2
TINY = AdapterLayout(
    (
        Site("qkv", ("q", "k", "v"), (144, 48, 48), 64),
        Site("output", ("o",), (64,), 144),
        Site("gate_up", ("g", "u"), (96, 96), 64),
    ),
    2,
    by_output=True,
)
COS_SIN = rand(64, 16)
SMALL = AdapterLayout(
    (
        Site("qkv", ("q", "k", "v"), (32, 16, 16), 48),
        Site("output", ("o",), (16,), 32),
        Site("gate_up", ("g", "u"), (16, 16), 48),
    ),
    1,
    by_output=True,
)
"""The interpreter takes its time for every program."""
LLAMA = AdapterLayout(
    (
        Site("qkv", ("q", "k", "v"), (4096, 1024, 1024), 4096),
        Site("output", ("o",), (4096,), 4096),
        Site("gate_up", ("g", "u"), (14336, 14336), 4096),
        Site("down", ("d",), (4096,), 14336),
    ),
    1,
    by_output=True,
)


def adapter(layout: AdapterLayout, rank: int, dtype: torch.dtype, skip: int | None = None) -> LoadedAdapter:
    width = layout.width(rank)
    ranks = torch.full((len(layout.sites),), width, dtype=torch.int32)
    if skip is not None:
        ranks[skip] = 0
    data = rand(width * layout.unit, dtype=dtype, scale=0.2).cpu()
    return LoadedAdapter("", rank, "", data, ranks)


def kernels(layout: AdapterLayout, ranks: list[int], dtype: torch.dtype, most: int) -> tuple[TritonLora, ReferenceLora]:
    ours, reference = TritonLora(layout, len(ranks), most, dtype, DEVICE), ReferenceLora(layout, len(ranks), DEVICE)
    for slot, rank in enumerate(ranks):
        loaded = adapter(layout, rank, dtype, skip=1 if slot == 2 else None)
        ours.put(slot, loaded)
        reference.put(slot, loaded)
    return ours, reference


def compare(name: str, layout: AdapterLayout, ours: TritonLora, reference: ReferenceLora, slots: np.ndarray, dtype: torch.dtype) -> None:  # fmt: skip  # noqa: E501
    reference.begin(slots)
    for layer in range(layout.layers):
        for index, site in enumerate(layout.sites):
            x, y = rand(len(slots), site.inputs, dtype=dtype), rand(len(slots), site.outputs, dtype=dtype)
            got, want = y.clone(), y.float()
            with poisoned_outputs():
                ours.add(x, got, layout.place(layer, index))
            reference.add(x.float(), want, layout.place(layer, index))
            check(f"{name} {site.attribute}", got, want, 2 * TOLERANCE[dtype])
            without = torch.from_numpy(np.flatnonzero(slots < 0)).to(DEVICE)
            check_equal(f"{name} {site.attribute}: tokens without adapter", got[without], y[without])


def test_each_token_gets_its_own_adapter() -> None:
    rng = np.random.default_rng(1)
    for dtype in (torch.bfloat16, torch.float32):
        ours, reference = kernels(TINY, [1, 5, 16, 24], dtype, 24)
        for tokens in (1, 40) if QUICK else (1, 17, 40, 300):
            slots = rng.integers(-1, 4, tokens).astype(np.int32)
            slots[0] = 3
            ours.begin(slots)
            compare(f"{dtype} {tokens}", TINY, ours, reference, slots, dtype)


def test_adapters_inside_the_launch_of_a_linear() -> None:
    """A few tokens, base tokens among them: what `fused` gives is the linear, then adapters, then what is folded in."""
    rng = np.random.default_rng(3)
    cases = [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32), (torch.bfloat16, torch.float8_e4m3fn)]
    for dtype, weight_dtype in cases[::2] if QUICK else cases:
        layout = SMALL if QUICK else TINY
        ours, reference = kernels(layout, [1, 16, 8, 24], dtype, 24)
        for tokens in (1, 5) if QUICK else (1, 2, 5, 8):
            mixed = rng.integers(-1, 4, tokens).astype(np.int32)
            mixed[0] = 3
            for slots in [mixed] if QUICK else [mixed, np.full(tokens, 3, np.int32), np.full(tokens, -1, np.int32)]:
                reference.begin(slots)
                inside(f"{weight_dtype} {slots}", layout, ours, reference, slots, dtype, weight_dtype)


def inside(name: str, layout: AdapterLayout, ours: TritonLora, reference: ReferenceLora, slots: np.ndarray, dtype: torch.dtype, weight_dtype: torch.dtype) -> None:  # fmt: skip  # noqa: E501
    """Behind a norm, which makes the products with A, and without one."""
    tokens, eps = len(slots), 1e-5
    for normed in (True, False):
        ours.begin(slots)
        for layer, (index, site) in itertools.product(range(layout.layers), enumerate(layout.sites)):
            placed = layout.place(layer, index)
            gated = site.attribute == "gate_up"
            x = rand(tokens, site.inputs, dtype=dtype)
            gain = rand(site.inputs, dtype=dtype) if normed else None
            seen = x if gain is None else rms_norm(x, gain, eps)
            weight, scale = make_weight(site.outputs, site.inputs, weight_dtype)
            residual = rand(tokens, site.outputs, dtype=dtype) if site.attribute in ("output", "down") else None
            want = linear64(seen, weight, scale=scale).float()
            reference.add(seen.float(), want, placed)
            if gated:
                gate, up = want.chunk(2, dim=-1)
                want = torch.nn.functional.silu(gate) * up
            if residual is not None:
                want = want + residual.float()
            linear = CudaLinear(weight, None, scale)
            with poisoned_outputs():
                got = linear.fused(
                    x, norm=gain, eps=eps, residual=residual, gated=gated, lora=ours.inline(placed)
                )  # fmt: skip
            check(f"inline {name} {site.attribute}, norm {normed}", got, want, 3 * TOLERANCE[dtype])


def test_what_follows_a_linear_adds_what_ran_beside_it() -> None:
    dtype = torch.bfloat16
    ours, reference = kernels(TINY, [16, 8, 5], dtype, 16)
    ops = TritonOps(DEVICE)
    slots = np.array([2, -1, 0, 1, 1, -1, 2, 0, -1, 0, 1, 2], np.int32)
    count = len(slots)
    use(ours, slots, count)
    reference.begin(slots)

    def both(index: int) -> tuple[Addends, torch.Tensor]:
        site, placed = TINY.sites[index], TINY.place(1, index)
        x, y = rand(count, site.inputs, dtype=dtype), rand(count, site.outputs, dtype=dtype)
        want = y.float()
        reference.add(x.float(), want, placed)
        with poisoned_outputs():
            made = ours.beside(x, placed, lambda _: y)
        assert isinstance(made, Addends)
        return made, want.to(dtype)

    for index, gate in ((2, ops.silu_mul), (2, ops.gelu_mul)):
        got, want = both(index)
        check("gate", gate(got), gate(want), 3 * TOLERANCE[dtype])
    got, want = both(1)
    start, weight = rand(count, 64, dtype=dtype), rand(64, dtype=dtype)
    for x_weight in (None, rand(64, dtype=dtype)):
        ours_residual, residual = start.clone(), start.clone()
        check(
            "norm",
            ops.add_rms_norm(got, ours_residual, weight, 1e-5, x_weight),
            ops.add_rms_norm(want, residual, weight, 1e-5, x_weight),
            3 * TOLERANCE[dtype],
        )
        check("residual", ours_residual, residual, 3 * TOLERANCE[dtype])
    got, want = both(0)
    heads = heads_of(9, 3, 16)
    results = []
    for qkv in (got, want):
        case = build([1] * count, [20 + i for i in range(count)], heads, dtype)
        case.k_cache.zero_()
        case.v_cache.zero_()
        q = ops.rope_and_cache(qkv, heads, COS_SIN, case.batch, case.k_cache, case.v_cache, None, None, 1e-5)
        k, v = case.k_cache.flatten(0, 1), case.v_cache.flatten(0, 1)
        results.append([q, k.norm(dim=(0, 1)), v.norm(dim=(0, 1))])
    for mine, theirs in zip(*results, strict=True):
        check("rope", mine, theirs, 3 * TOLERANCE[dtype])


def test_rows_of_a_that_registers_do_not_hold() -> None:
    """A single token, and more steps along the input than are loaded before it is there."""
    dtype = torch.bfloat16
    inputs, step = (200, 16) if MODE == "interpret" else (12 * 256 + 40, 256)
    layout = AdapterLayout((Site("down", ("d",), (32,), inputs),), 1, by_output=True)
    ours, reference = kernels(layout, [8], dtype, 16)
    config = gemv.GemvConfig("rows", 2, step, 1, 1)
    weight, _ = make_weight(32, inputs, dtype)
    x, out = rand(1, inputs, dtype=dtype), rand(1, 32, dtype=dtype)
    for kernel in (ours, reference):
        kernel.begin(np.zeros(1, np.int32))
    want = linear64(x, weight).float() + out.float()
    reference.add(x.float(), want, layout.place(0, 0))
    got = gemv.linear(x, weight, residual=out, out=out, lora=ours.inline(layout.place(0, 0)), config=config)
    check("long rows", got.float(), want, 3 * TOLERANCE[dtype])


def use(lora: TritonLora, slots: np.ndarray, bucket: int, *, alters: bool = False) -> None:
    """Begin a pass as graphs of `bucket` tokens do."""
    tables = {name: torch.zeros(bucket, dtype=torch.int32, device=DEVICE) for name in TABLES}
    tables["lora_tokens"].fill_(-1)
    for name, values in lora.tables(slots, bucket).items():
        tables[name][: len(values)] = torch.from_numpy(values).to(DEVICE)
    lora.use(tables, bucket, alters=alters)


def test_parts_that_an_adapter_does_not_touch_are_skipped() -> None:
    """Their matrices are never read: here they hold no numbers."""
    dtype, site = torch.bfloat16, TINY.sites[0]
    loaded, plain = adapter(TINY, 16, dtype), adapter(TINY, 16, dtype)
    middle = 16 * len(site.sizes) * site.inputs
    loaded.data[16 * site.inputs : 2 * 16 * site.inputs] = 0  # A and B of the keys
    loaded.data[middle + 16 * 144 : middle + 16 * 192] = 0
    unread = loaded.data.clone()
    unread[16 * site.inputs : 2 * 16 * site.inputs] = float("nan")
    unread[middle + 16 * 144 : middle + 16 * 192] = float("nan")
    parts = torch.tensor([0b101, 1, 3], dtype=torch.int32)
    ours, reference = TritonLora(TINY, 2, 16, dtype, DEVICE), ReferenceLora(TINY, 2, DEVICE)
    ours.put(0, dataclasses.replace(loaded, data=unread, parts=parts))
    reference.put(0, loaded)
    for kernel in (ours, reference):
        kernel.put(1, plain)
    slots = np.array([0, 1, -1, 0, 0, 1], np.int32)
    place = TINY.place(0, 0)
    reference.begin(slots)
    for captured in (False, True):
        if captured:
            use(ours, slots, 6)
        else:
            ours.begin(slots)
        x, y = rand(6, site.inputs, dtype=dtype), rand(6, site.outputs, dtype=dtype)
        want, got = y.float(), y.clone()
        reference.add(x.float(), want, place)
        with poisoned_outputs():
            ours.add(x, got, place)
            beside = ours.beside(x, place, lambda _, y=y: y.clone())
        check("parts", got, want, 2 * TOLERANCE[dtype])
        if isinstance(beside, Addends):
            delta = torch.where(beside.ranks[:, None] > 0, beside.delta, 0)
            check("parts beside", (beside.base + delta), want, 3 * TOLERANCE[dtype])


def test_graphs_tables_are_padded_with_empty_tiles() -> None:
    dtype = torch.bfloat16
    ours, reference = kernels(TINY, [4, 8, 16], dtype, 16)
    slots = np.array([2, -1, 0, 2, 1, -1, 2, 0, -1], np.int32)
    use(ours, slots, 12)
    compare("padded", TINY, ours, reference, slots, dtype)


def test_a_slot_takes_another_adapter() -> None:
    dtype = torch.bfloat16
    ours, reference = kernels(TINY, [16, 16], dtype, 16)
    for kernel, loaded in zip((ours, reference), [adapter(TINY, 3, dtype)] * 2, strict=True):
        kernel.put(1, loaded)
    slots = np.array([1, 0, 1], np.int32)
    ours.begin(slots)
    compare("replaced", TINY, ours, reference, slots, dtype)


def test_model_sizes() -> None:
    if QUICK:
        return
    dtype = torch.bfloat16
    ours, reference = kernels(LLAMA, [8, 16, 64], dtype, 64)
    rng = np.random.default_rng(2)
    for tokens in (1, 64, 700):
        slots = rng.integers(-1, 3, tokens).astype(np.int32)
        slots[0] = 2
        ours.begin(slots)
        compare(f"llama {tokens}", LLAMA, ours, reference, slots, dtype)


EXPERTS = AdapterLayout(
    (
        Site("qkv", ("q", "k", "v"), (32, 16, 16), 48),
        Site("expert_gate_up", ("g", "u"), (40, 40), 48, further=True, experts=5, layers=(False, True)),
        Site("expert_down", ("d",), (48,), 40, further=True, experts=5, layers=(False, True)),
    ),
    2,
    by_output=True,
)


def test_experts_of_adapters() -> None:
    """Every visit gets the matrices of its expert in its token's adapter."""
    rng = np.random.default_rng(3)
    for dtype in (torch.bfloat16, torch.float32):
        ours, reference = kernels(EXPERTS, [3, 8, 20], dtype, 20)
        for rows in (1, 24):
            slots = torch.from_numpy(rng.integers(-1, 3, rows)).to(DEVICE)
            experts = torch.from_numpy(rng.integers(0, 5, rows)).to(DEVICE)
            weights = torch.rand(rows, device=DEVICE)
            for index in (1, 2):
                placed = EXPERTS.place(1, index)
                x, y = (rand(rows, size, dtype=dtype) for size in (placed.site.inputs, placed.site.outputs))
                for scale in (None, weights):
                    got, want = y.clone(), y.float()
                    with poisoned_outputs():
                        ours.add_visits(x, got, placed, slots, experts, scale)
                    reference.add_visits(x.float(), want, placed, slots, experts, scale)
                    check(f"{dtype} {rows} {placed.site.attribute}", got, want, 2 * TOLERANCE[dtype])
                    check_equal("visits without adapter", got[slots < 0], y[slots < 0])


def test_experts_all_at_once_with_adapters() -> None:
    """As one by one: of some tokens, with weights before the experts and behind them, and experts elsewhere."""
    sites = EXPERTS.sites
    for early, elsewhere in ((False, False), (True, False), (False, True)):
        ours, reference = kernels(EXPERTS, [3, 8, 20], torch.float32, 20)
        mlp = make_moe(5, 2, sites[1].inputs, sites[1].sizes[0], torch.float32)
        mlp = dataclasses.replace(mlp, router=dataclasses.replace(mlp.router, weight_inputs=early))
        if elsewhere:
            held = (4, 1, 2)
            slots = ExpertSlots((held, (0, 3, 2)), 0, 5, DEVICE)
            mlp = dataclasses.replace(mlp, experts=[mlp.experts[expert] for expert in held], slots=slots)
        grouped = group(mlp)
        assert grouped is not None
        tokens = np.array([0, 2, -1, 1, 0, -1], np.int32)
        x = rand(len(tokens), sites[1].inputs)
        for kernel in (ours, reference):
            kernel.begin(tokens)
        places = EXPERTS.place(1, 1), EXPERTS.place(1, 2)
        with poisoned_outputs():
            got = AdaptedExperts(grouped, ours, *places).forward(x.clone())
        want = AdaptedExperts(mlp, reference, *places).forward(x.clone())
        without = grouped.forward(x.clone())
        if MODE != "compile":
            check(f"early {early}, elsewhere {elsewhere}", got, want, 4 * TOLERANCE[torch.float32])
            plain = torch.from_numpy(tokens < 0).to(DEVICE)
            check("tokens without adapter", got[plain], without[plain], 4 * TOLERANCE[torch.float32])


def test_vectors_and_blocks_of_experts() -> None:
    """All at once as one by one, with scales, shifts and turned inputs of an adapter's own."""
    up, down = EXPERTS.sites[1:3]
    ours, reference = kernels(EXPERTS, [3, 8, 20], torch.float32, 20)
    mlp = make_moe(5, 2, up.inputs, up.sizes[0], torch.float32)
    grouped = group(mlp)
    assert grouped is not None
    blocks = {expert: rand(up.inputs // 4, 4, 4) for expert in (0, 3)}
    changes = VisitChanges(
        {
            (1, 1): VisitChange(1 + 0.3 * rand(5, up.outputs), None, (blocks, {})),
            (1, 2): VisitChange(1 + 0.3 * rand(5, down.outputs), rand(5, down.outputs)),
        }
    )
    tokens = np.array([0, 2, -1, 1, 0, -1], np.int32)
    x, places = rand(len(tokens), up.inputs), (EXPERTS.place(1, 1), EXPERTS.place(1, 2))
    before = AdaptedExperts(mlp, reference, *places)
    reference.begin(tokens)
    without = before.forward(x.clone())
    for kernel in (ours, reference):
        kernel.banks.visits = VisitBank(3, DEVICE)
        kernel.banks.visits.put(0, changes)
        kernel.begin(tokens)
    got = AdaptedExperts(grouped, ours, *places).forward(x.clone())
    want = before.forward(x.clone())
    if MODE != "compile":
        check("with vectors and blocks", got, want, 8 * TOLERANCE[torch.float32])
        others = torch.from_numpy(tokens != 0).to(DEVICE)
        check("other tokens", want[others], without[others], TOLERANCE[torch.float32])
        assert float((want[~others] - without[~others]).abs().max()) > 0.1


def test_engine_with_adapters_of_experts() -> None:
    """Decode graphs, prompts beside them, a batch of several adapters and none."""
    if not ON_DEVICE:
        return
    from penstock.engine.adapters.spec import AdapterSpec
    from tests.engine.adapters.expert_files import merge_experts, write_expert_adapter
    from tests.engine.adapters.test_equals_merging import ask
    from tests.engine.harness import assert_idle, generate, make_engine
    from tests.engine.tiny import Reference, write_checkpoint

    rng = random.Random(6)
    for family, more in (
        ("qwen3-moe", ("gate",)),
        ("gpt-oss", ("router",)),
        ("deepseek-v3", ("gate", "up_proj", "kv_b_proj")),
    ):
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            base = write_checkpoint(family, root / "base")
            references = {"": Reference(base)}
            specs = []
            for i in range(2):
                made = references[f"a{i}"] = Reference(base)
                targets = ("gate_up_proj", "down_proj", *more)
                path = write_expert_adapter(root / f"a{i}", made.model, rank=3 + 5 * i, seed=i, targets=targets)
                merge_experts(made.model, path)
                specs.append(AdapterSpec(f"a{i}", str(path)))
            engine = make_engine(
                base, device="cuda", adapters=tuple(specs), max_running=4, num_blocks=200, token_budget=96
            )
            asked = {
                f"r{i}": ([rng.randrange(199) for _ in range(rng.randrange(1, 90))], ["", "a0", "a1"][i % 3])
                for i in range(9)
            }
            got = generate(engine, *(ask(id, prompt, name, 16) for id, (prompt, name) in asked.items()))
            for id, (prompt, name) in asked.items():
                margins = references[name].margins(prompt, got[id])
                assert float(margins.max()) < TIE, (family, id, name, margins)
            assert_idle(engine)


def test_engine_with_adapters_equals_merged_checkpoints() -> None:
    """Decode graphs with and without adapters, prompts beside them, more adapters than slots, over several weights."""
    if not ON_DEVICE:
        return
    from penstock.engine.adapters.spec import AdapterSpec
    from tests.engine.adapters.files import merge, write_adapter
    from tests.engine.adapters.test_equals_merging import ask
    from tests.engine.harness import assert_idle, generate, make_engine
    from tests.engine.tiny import Reference, write_checkpoint

    rng = random.Random(5)
    for family in ("llama-gqa", "qwen3-qknorm"):
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            base = write_checkpoint(family, root / "base")
            specs, references = [], {"": Reference(base)}
            for i in range(4):
                path = write_adapter(root / f"a{i}", base, rank=2 + 4 * i, seed=i)
                specs.append(AdapterSpec(f"a{i}", str(path)))
                references[f"a{i}"] = Reference(merge(base, path, root / f"m{i}"))
            engine = make_engine(
                base, device="cuda", adapters=tuple(specs), adapter_slots=2, max_running=8, num_blocks=200,
                token_budget=96,
            )  # fmt: skip
            names = ["", *references]
            asked = {
                f"r{i}": ([rng.randrange(199) for _ in range(rng.randrange(1, 120))], names[i % len(names)])
                for i in range(20)
            }
            got = generate(engine, *(ask(id, prompt, name, 24) for id, (prompt, name) in asked.items()))
            for id, (prompt, name) in asked.items():
                margins = references[name].margins(prompt, got[id])
                assert float(margins.max()) < TIE, (family, id, name, margins)
            assert_idle(engine)


def test_adapters_on_fp8_weights() -> None:
    if not ON_DEVICE:
        return
    from penstock.engine.adapters.spec import AdapterSpec
    from tests.engine.adapters.files import write_adapter
    from tests.engine.adapters.test_equals_merging import ask
    from tests.engine.harness import generate, make_engine
    from tests.engine.tiny import write_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        base = write_checkpoint("llama-gqa", Path(folder) / "base", spread=0.3)
        path = write_adapter(Path(folder) / "a", base, size=0.6)
        engine = make_engine(
            base,
            device="cuda",
            dtype="bfloat16",
            weights="fp8",
            adapters=(AdapterSpec("a", str(path)),),
            num_blocks=200,
        )
        got = generate(engine, *(ask(f"{name}{i}", [7, 8, 9, i], name, 16) for i in range(12) for name in ("", "a")))
        assert all(got[f"{i}"] != got[f"a{i}"] for i in range(12))
        again = generate(engine, *(ask(f"{i}", [7, 8, 9, i], "", 16) for i in range(12)))
        assert len(again) == 12
