"""Experts whole on ranks: the output of one device, whatever the placement."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.adapters.spec import AdapterSpec
from penstock.engine.parallel import experts
from penstock.engine.request import Request
from penstock.errors import ConfigError
from tests.engine.adapters.files import write_adapter
from tests.engine.harness import assert_idle, generate, greedy, make_engine
from tests.engine.parallel.test_same_output import prompt_scores
from tests.engine.parallel.threads import threaded_engine
from tests.engine.speculative.forced import Oracle, verify_everything
from tests.engine.tiny import write_checkpoint

DATA: dict[str, Any] = {"attention_parallel": "data"}
MORE: list[Any] = [
    ("mixtral", 2, 1, {}),
    ("mixtral", 4, 1, {"expert_copies": 1}),
    ("mixtral", 4, 1, DATA),
    ("mixtral", 2, 2, {**DATA, "expert_copies": 1}),
    ("qwen3-moe", 2, 2, {"expert_copies": 2}),
    ("qwen3-moe", 2, 2, DATA),
    ("qwen3-moe-some-dense", 2, 2, {}),
    ("qwen3-moe-some-dense", 4, 1, {"expert_copies": 20}),  # every expert everywhere
]


class Checkpoints(dict[str, Path]):
    """Written when they are first asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def __missing__(self, family: str) -> Path:
        self[family] = write_checkpoint(family, self.folder / family)
        return self[family]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


def requests() -> list[Request]:
    """Prompts of very different lengths, so that steps mix prefill chunks and decodes."""
    return [greedy(f"r{i}", [(i * 17 + j * 5) % 190 for j in range(3 + 25 * i)], 10) for i in range(4)]


@pytest.mark.parametrize(
    ("family", "tensor", "pipeline", "settings"),
    [
        ("mixtral", 2, 1, {"expert_copies": 1}),
        ("qwen3-moe-some-dense", 3, 1, {"attention_parallel": "data"}),
        pytest.param("qwen3-next", 2, 1, {"attention_parallel": "data"}, marks=pytest.mark.slow),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE),
    ],
)
def test_a_batch_decodes_as_on_one_device(
    checkpoints: Checkpoints, family: str, tensor: int, pipeline: int, settings: dict[str, Any]
) -> None:
    expected = generate(make_engine(checkpoints[family], token_budget=32), *requests())
    with threaded_engine(
        checkpoints[family], tensor, pipeline, token_budget=32, expert_parallel=True, **settings
    ) as engine:
        assert generate(engine, *requests()) == expected
        assert_idle(engine)


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        pytest.param("mixtral", "tensor", marks=pytest.mark.slow),
        ("mixtral", "data"),
        pytest.param("qwen3-next", "tensor", marks=pytest.mark.slow),
        pytest.param("qwen3-next", "data", marks=pytest.mark.slow),
    ],
)
def test_prefixes_preemption_and_speculation(checkpoints: Checkpoints, family: str, attention: str) -> None:
    folder = checkpoints[family]
    settings: dict[str, Any] = {"block_size": 4, "token_budget": 16, "speculation": "ngram", "state_interval": 8}
    shared = [7, 3, 9, 1, 4, 4, 2, 8, 6, 5, 3, 1]
    batch = [greedy(f"p{i}", [*shared, 20 + i], 16) for i in range(4)]
    blocks = 10 if family == "qwen3-next" else 14
    expected = generate(make_engine(folder, num_blocks=blocks, **settings), *batch)
    with threaded_engine(
        folder, 2, 1, num_blocks=blocks, expert_parallel=True, attention_parallel=attention, **settings
    ) as engine:
        assert engine.speculation is not None
        verify_everything(engine.speculation)
        engine.speculation.proposer = Oracle(expected, wrong=0.3, vocab_size=190)
        for _ in range(2):
            assert generate(engine, *batch) == expected
        load = engine.load_snapshot()
        assert load.preemptions > 0 and load.prefix_hit_tokens > 0 and load.drafts > 0
        assert load.total_blocks == (2 * blocks if attention == "data" else blocks)
        assert_idle(engine)


@pytest.mark.parametrize(
    ("tensor", "pipeline", "attention"),
    [
        (2, 1, "tensor"),
        pytest.param(2, 2, "tensor", marks=pytest.mark.slow),
        pytest.param(3, 1, "data", marks=pytest.mark.slow),
    ],
)
def test_experts_move_while_requests_run_and_the_output_stays(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, tensor: int, pipeline: int, attention: str
) -> None:
    monkeypatch.setattr(experts, "_VISITS", 4)
    folder = checkpoints["qwen3-moe-some-dense"]
    batch = [greedy(f"m{i}", [(i * 3 + j * j) % 190 for j in range(20)], 24) for i in range(3)]
    expected = generate(make_engine(folder, token_budget=32), *batch)
    settings: dict[str, Any] = {"expert_parallel": True, "expert_copies": 1, "expert_rebalance_s": 1e-6}
    settings["attention_parallel"] = attention
    with threaded_engine(folder, tensor, pipeline, token_budget=32, **settings) as engine:
        balancer = engine.balancer
        assert isinstance(balancer, experts.ExpertBalancer)
        before = dict(balancer._tables)
        assert generate(engine, *batch) == expected
        assert balancer.moved > 0 and balancer._tables != before
        assert set(balancer._tables) == {0, 2}, "layer 1 is dense"
        load = engine.load_snapshot()
        assert load.moved_experts == balancer.moved and 1.0 <= load.expert_imbalance < tensor
        assert generate(engine, *batch) == expected


def test_what_has_no_experts_to_spread_is_refused(checkpoints: Checkpoints, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is only one"):
        make_engine(checkpoints["mixtral"], expert_parallel=True)
    with pytest.raises(ConfigError, match="there is only one"):
        make_engine(checkpoints["mixtral"], expert_parallel=True, pipeline_parallel=2)
    with pytest.raises(ConfigError, match="else run replicas"):
        make_engine(checkpoints["mixtral"], attention_parallel="data", tensor_parallel=2)
    dense = write_checkpoint("llama-gqa", tmp_path / "dense")
    with pytest.raises(ConfigError, match="no experts"):
        make_engine(dense, expert_parallel=True, tensor_parallel=2)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["tensor", "data"])
def test_adapters_on_attention(checkpoints: Checkpoints, tmp_path: Path, attention: str) -> None:
    folder = checkpoints["mixtral"]
    targets = ("q_proj", "k_proj", "v_proj", "o_proj")
    made = [write_adapter(tmp_path / f"a{i}", folder, rank=4 + i, targets=targets, seed=i) for i in range(3)]
    specs = tuple(AdapterSpec(path.name, str(path)) for path in made)
    batch = [replace(request, adapter=name) for request, name in zip(requests(), ("a0", "", "a1", "a2"), strict=True)]
    expected = generate(make_engine(folder, adapters=specs), *batch)
    assert expected != generate(make_engine(folder), *requests()), "the adapters matter"
    settings = {"expert_parallel": True, "attention_parallel": attention, "adapters": specs}
    for tensor, pipeline in ((2, 1), (2, 2)):
        with threaded_engine(folder, tensor, pipeline, **settings) as engine:
            assert generate(engine, *batch) == expected
            assert_idle(engine)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "attention"),
    # Attention's matrices in FP8 have a scale per output and part: cut, they are rounded otherwise than whole.
    [("int8", "tensor"), ("int8", "data"), ("int4", "tensor"), ("int4", "data"), ("fp8", "data")],
)
def test_rounded_experts_are_those_of_one_device(tmp_path: Path, weights: str, attention: str) -> None:
    folder = write_checkpoint("qwen3-moe", tmp_path / "wide", hidden_size=64, moe_intermediate_size=96, spread=0.3)
    settings: dict[str, Any] = {"weights": weights, "activations": "auto" if weights == "fp8" else "int16"}
    expected = prompt_scores(make_engine(folder, **settings))
    with threaded_engine(
        folder, 2, 1, expert_parallel=True, attention_parallel=attention, expert_copies=1, **settings
    ) as engine:
        assert prompt_scores(engine) == pytest.approx(expected, abs=0.02)
