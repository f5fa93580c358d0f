"""With an adapter the engine answers as the model with the adapter merged into its weights."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from penstock.engine.adapters.spec import AdapterSpec
from penstock.engine.backends.cpu.executor import RecordedExecutor
from penstock.engine.request import Request, SamplingParams
from tests.engine.adapters.files import merge, write_adapter
from tests.engine.harness import assert_idle, generate, make_engine
from tests.engine.parallel.threads import threaded_engine
from tests.engine.tiny import Reference, write_checkpoint

GATED = ("gate_proj", "up_proj", "down_proj")
LATENTS = ("pre_expert_proj", "post_expert_proj")
QKV = ("q_proj", "k_proj", "v_proj")
TIE = 2e-2
"""Logits of these models spread over tens; adding the product instead of merging it moves them by less than this."""


def ask(request_id: str, prompt: list[int], adapter: str = "", count: int = 16, **settings: object) -> Request:
    return Request(request_id, prompt, SamplingParams(max_tokens=count, temperature=0.0), adapter=adapter, **settings)


def prompts(count: int, seed: int = 1, longest: int = 60) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(199) for _ in range(rng.randrange(1, longest))] for _ in range(count)]


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama-gqa", {}),
        ("llama-mha-bias", {"rank": 3, "alpha": 7, "targets": ("q_proj", "v_proj")}),
        ("mistral-window", {"rank": 16, "use_rslora": True}),
        ("qwen2-bias", {"rank": 1, "targets": ("o_proj", "down_proj", "k_proj")}),
        ("gpt-oss", {"rank": 4, "targets": ("q_proj", "k_proj", "v_proj", "o_proj")}),
        ("qwen3-qknorm", {"rank": 8, "targets": ("gate_proj", "q_proj", "k_proj", "v_proj", "o_proj")}),
        ("qwen3.5", {"size": 0.6}),
        pytest.param(
            "qwen3-next",
            {"rank": 8, "targets": ("q_proj", "k_proj", "v_proj", "o_proj"), "size": 0.6},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "falcon-h1",
            {"rank": 4, "targets": ("q_proj", "v_proj", "in_proj", "out_proj", "up_proj"), "size": 0.6},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "lfm2",
            {"rank": 4, "targets": ("q_proj", "v_proj", "in_proj", "out_proj", "w1", "w2", "w3"), "size": 0.6},
            marks=pytest.mark.slow,
        ),
        ("granite4-hybrid-dense", {"rank": 4, "targets": ("q_proj", "o_proj", "in_proj", "out_proj"), "size": 0.6}),
        ("mamba2", {"rank": 4, "targets": ("in_proj", "out_proj"), "size": 0.6}),
        ("gemma4-small", {"rank": 4, "targets": (*QKV, "o_proj", "gate_proj", "up_proj", "down_proj"), "size": 0.3}),
        pytest.param("gemma4", {"rank": 4, "targets": (*QKV, "o_proj"), "size": 0.6}, marks=pytest.mark.slow),
        ("laguna", {"rank": 4, "targets": (*QKV, "g_proj", "o_proj", "gate_proj", "down_proj"), "size": 0.6}),
        pytest.param("laguna-elements", {"rank": 4, "targets": ("q_proj", "g_proj", "o_proj")}, marks=pytest.mark.slow),
        ("muse-glimmer", {"rank": 4, "targets": (*QKV, "o_proj", *GATED), "size": 0.6}),
        ("muse-spark", {"rank": 4, "targets": (*QKV, "gate_proj", "o_proj", *LATENTS), "size": 0.6}),
        pytest.param(
            "muse-spark-some-dense",
            {"rank": 4, "targets": (*QKV, "o_proj", *GATED, *LATENTS), "size": 0.6},
            marks=pytest.mark.slow,
        ),
        ("minimax-m3", {"rank": 4, "targets": (*QKV, "o_proj", "gate_up_proj", "down_proj"), "size": 0.3}),
        pytest.param(  # quick: of all its parts, in test_newer_families.py
            "step3.5",
            {"rank": 4, "targets": (*QKV, "g_proj", "o_proj", "gate_proj", "down_proj"), "size": 0.3},
            marks=pytest.mark.slow,
        ),
        ("mimo-v2-flash", {"rank": 4, "targets": (*QKV, "o_proj", "gate_proj", "down_proj"), "size": 0.3}),
        pytest.param(
            "gemma4-experts",
            {"rank": 4, "targets": (*QKV, "o_proj", "gate_proj", "down_proj"), "size": 0.3},
            marks=pytest.mark.slow,
        ),
        ("nemotron-h", {"rank": 4, "targets": ("k_proj", "o_proj", "in_proj", "out_proj", "up_proj", "down_proj")}),
    ],
)
def test_an_adapter_equals_merging_it(tmp_path: Path, family: str, settings: dict[str, object]) -> None:
    base = write_checkpoint(family, tmp_path / "base")
    adapter = write_adapter(tmp_path / "adapter", base, **settings)  # type: ignore[arg-type]
    merged, plain = Reference(merge(base, adapter, tmp_path / "merged")), Reference(base)
    engine = make_engine(base, adapters=(AdapterSpec("tuned", str(adapter)),), token_budget=40, num_blocks=60)
    asked = {f"r{i}": (prompt, "tuned" if i % 2 else "") for i, prompt in enumerate(prompts(6))}
    got = generate(engine, *(ask(id, prompt, adapter) for id, (prompt, adapter) in asked.items()))
    for id, (prompt, name) in asked.items():
        assert (merged if name else plain).agrees(prompt, got[id], TIE), id
        assert not (plain if name else merged).agrees(prompt, got[id], TIE), "the adapter makes no difference"
    assert_idle(engine)


@pytest.mark.slow
@pytest.mark.parametrize("grid", [(2, 1), (1, 2)], ids=str)
@pytest.mark.parametrize(
    "family",
    [
        "mamba2",
        "nemotron-h",
        "lfm2",
        "gemma4",
        "gemma4-small",
        "mimo-v2-flash",
        "laguna",
        "minimax-m3",
        "step3.5",
        "muse-glimmer",
        "muse-spark",
    ],
)
def test_ranks_with_layers_of_one_part_give_the_same(tmp_path: Path, family: str, grid: tuple[int, int]) -> None:
    """A stage may have none of the layers that some sites are for."""
    base = write_checkpoint(family, tmp_path / "base")
    targets = {
        "mamba2": ("in_proj", "out_proj"),
        "nemotron-h": ("q_proj", "o_proj", "out_proj", "up_proj"),
        "lfm2": ("q_proj", "in_proj", "out_proj", "w1", "w2"),
        "gemma4": (*QKV, "o_proj"),
        "gemma4-small": (*QKV, "o_proj", "gate_proj", "down_proj"),
        "mimo-v2-flash": (*QKV, "o_proj"),
        "laguna": (*QKV, "g_proj", "o_proj", "down_proj"),
        "minimax-m3": (*QKV, "o_proj", "gate_up_proj"),
        "step3.5": (*QKV, "g_proj", "o_proj", "up_proj"),
        "muse-glimmer": (*QKV, "o_proj", *GATED),
        "muse-spark": (*QKV, "gate_proj", "o_proj", *LATENTS),
    }[family]
    adapter = write_adapter(tmp_path / "adapter", base, rank=4, targets=targets, size=0.6)
    specs = (AdapterSpec("tuned", str(adapter)),)
    requests = [ask(f"r{i}", prompt, "tuned" if i % 2 else "") for i, prompt in enumerate(prompts(6))]
    alone = generate(make_engine(base, adapters=specs), *requests)
    with threaded_engine(base, *grid, adapters=specs, token_budget=40) as ranks:
        assert generate(ranks, *requests) == alone


@pytest.mark.slow
def test_a_batch_of_several_adapters_and_base_equals_each_alone(tmp_path: Path) -> None:
    base = write_checkpoint("llama-gqa", tmp_path / "base")
    specs = tuple(
        AdapterSpec(f"a{i}", str(write_adapter(tmp_path / f"a{i}", base, rank=1 + 3 * i, seed=i))) for i in range(5)
    )
    engine = make_engine(base, adapters=specs, token_budget=64, num_blocks=200)
    names = ["", *(spec.name for spec in specs)]
    requests = [ask(f"r{i}", prompt, names[i % 6]) for i, prompt in enumerate(prompts(18, longest=90))]
    alone = {}
    for request in requests:
        alone |= generate(engine, request)
    assert engine.load_snapshot().prefix_hit_tokens == 0, "nothing was shared between adapters"
    fresh = make_engine(base, adapters=specs, token_budget=64, num_blocks=200)
    assert generate(fresh, *requests) == alone
    assert_idle(fresh)


def test_cached_prefixes_are_shared_within_an_adapter_only(tmp_path: Path) -> None:
    base = write_checkpoint("llama-gqa", tmp_path / "base")
    specs = tuple(AdapterSpec(n, str(write_adapter(tmp_path / n, base, seed=i))) for i, n in enumerate("ab"))
    engine = make_engine(base, adapters=specs)
    prompt = prompts(1, longest=200)[0] * 4
    hits = []
    for id, adapter in enumerate(["", "a", "b", "a", ""]):
        before = engine.load_snapshot().prefix_hit_tokens
        generate(engine, ask(f"r{id}", prompt, adapter))
        hits.append(engine.load_snapshot().prefix_hit_tokens - before)
    assert hits[:3] == [0, 0, 0] and hits[3] > 0 and hits[4] > 0


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_adapters_work_on_quantized_weights(tmp_path: Path, weights: str) -> None:
    base = write_checkpoint("llama-gqa", tmp_path / "base")
    adapter = write_adapter(tmp_path / "adapter", base)
    zero = write_adapter(tmp_path / "zero", base, alpha=0)
    specs = (AdapterSpec("tuned", str(adapter)), AdapterSpec("zero", str(zero)))
    # Two digits for any number of rows: the float16 form of larger batches rounds coarser than random logits lie apart.
    engine = make_engine(base, adapters=specs, weights=weights, activations="int16")
    prompt = prompts(1)[0]
    got = generate(engine, ask("base", prompt), ask("zero", prompt, "zero"), ask("tuned", prompt, "tuned"))
    assert got["zero"] == got["base"] != got["tuned"]
    executor = engine.runner.executor
    assert isinstance(executor, RecordedExecutor) and executor.adapted is not None, (
        "steps with adapters are recorded too"
    )
    assert "pk_lora" in executor.adapted.names
