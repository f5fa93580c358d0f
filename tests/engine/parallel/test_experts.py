"""Experts whole on ranks: the output of one device, whatever the placement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.engine.parallel import experts
from penstock.engine.request import Request
from penstock.errors import ConfigError
from tests.engine.harness import assert_idle, generate, greedy, make_engine
from tests.engine.parallel.threads import threaded_engine
from tests.engine.tiny import write_checkpoint

FAMILIES = ("mixtral", "qwen3-moe-some-dense", "qwen3-moe")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {family: write_checkpoint(family, folder / family) for family in FAMILIES}


def requests() -> list[Request]:
    """Prompts of very different lengths, so that steps mix prefill chunks and decodes."""
    return [greedy(f"r{i}", [(i * 17 + j * 5) % 190 for j in range(3 + 25 * i)], 10) for i in range(4)]


@pytest.mark.parametrize(
    ("family", "tensor", "pipeline", "settings"),
    [
        ("mixtral", 2, 1, {}),
        ("mixtral", 4, 1, {"expert_copies": 1}),
        ("qwen3-moe", 2, 2, {"expert_copies": 2}),
        ("qwen3-moe-some-dense", 2, 2, {}),
        ("qwen3-moe-some-dense", 4, 1, {"expert_copies": 20}),  # every expert everywhere
    ],
)
def test_a_batch_decodes_as_on_one_device(
    checkpoints: dict[str, Path], family: str, tensor: int, pipeline: int, settings: dict[str, Any]
) -> None:
    expected = generate(make_engine(checkpoints[family], token_budget=32), *requests())
    with threaded_engine(
        checkpoints[family], tensor, pipeline, token_budget=32, expert_parallel=True, **settings
    ) as engine:
        assert generate(engine, *requests()) == expected
        assert_idle(engine)


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (2, 2)])
def test_experts_move_while_requests_run_and_the_output_stays(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tensor: int, pipeline: int
) -> None:
    monkeypatch.setattr(experts, "_VISITS", 4)
    folder = checkpoints["qwen3-moe-some-dense"]
    batch = [greedy(f"m{i}", [(i * 3 + j * j) % 190 for j in range(20)], 40) for i in range(4)]
    expected = generate(make_engine(folder, token_budget=32), *batch)
    settings = {"expert_parallel": True, "expert_copies": 1, "expert_rebalance_s": 1e-6}
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


def test_what_has_no_experts_to_spread_is_refused(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is only one"):
        make_engine(checkpoints["mixtral"], expert_parallel=True)
    with pytest.raises(ConfigError, match="there is only one"):
        make_engine(checkpoints["mixtral"], expert_parallel=True, pipeline_parallel=2)
    dense = write_checkpoint("llama-gqa", tmp_path / "dense")
    with pytest.raises(ConfigError, match="no experts"):
        make_engine(dense, expert_parallel=True, tensor_parallel=2)
