"""Captured steps over several ranks (R-ENG-10): rank 0 says which step to replay, and all replay it.

Without a GPU: a "captured" step is one that is called again, on the reference backend; peer memory is gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.bench.soak.engines import verify_everything
from penstock.engine.backends import cpu
from penstock.engine.backends.cuda import decode_graphs, prompt_graphs
from penstock.engine.backends.cuda.capture import Recording, Work
from penstock.engine.backends.cuda.graphs import GraphExecutor, GraphFollower
from penstock.engine.backends.reference.backend import ReferenceBackend
from penstock.engine.backends.reference.linear import DenseLinear
from penstock.engine.backends.select import rank_device
from penstock.engine.config import EngineConfig
from penstock.engine.kv import kinds
from penstock.engine.parallel import decoder as parallel_decoder
from penstock.engine.parallel.channel import Capture, Replay
from penstock.engine.parallel.groups import Group
from penstock.engine.sleep.offload import offload
from penstock.engine.speculative import draft
from penstock.engine.speculative.draft import DraftProposer
from penstock.errors import ConfigError
from tests.engine.harness import assert_idle, generate, greedy, make_engine
from tests.engine.parallel.threads import threaded_engine
from tests.engine.tiny import Reference, write_checkpoint

SETTINGS = {"max_running": 3, "token_budget": 32, "max_model_len": 128, "num_blocks": 60}


class CalledAgain:
    """Stands for a CUDA graph."""

    def __init__(self, work: Callable[[], tuple[Tensor, Tensor]]) -> None:
        self._work = work
        self.results = work()

    def replay(self) -> None:
        for kept, new in zip(self.results, self._work(), strict=True):
            kept.copy_(new)

    def pool(self) -> None:
        return None


def record(device: torch.device, work: Work, pool: Any, rehearse: Work) -> Recording:
    with torch.inference_mode():
        graph: Any = CalledAgain(work)
    return Recording(graph, graph.results)


class Peers:
    """Stands for peer memory."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def takes(self, x: Tensor) -> bool:
        return True

    def sum(self, x: Tensor) -> Tensor:
        return self._group.sum(x)

    def add_rms_norm(
        self, ops: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float, x_weight: Tensor | None
    ) -> Any:
        if len(x) > 8:
            return None  # as if there were no kernel for it
        return ops.add_rms_norm(self._group.sum(x), residual, weight, eps, x_weight)

    def gather(self, x: Tensor, outputs: int) -> Tensor:
        return self._group.join(x, outputs)

    def broadcast(self, x: Tensor) -> Tensor:
        return self._group.broadcast(x)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, tuple[int, int]]]]:
    """What the other ranks replay."""
    replayed: list[tuple[int, tuple[int, int]]] = []

    class Watched(GraphFollower):
        def replay(self, kind: int, shape: tuple[int, int], inputs: Any) -> None:
            replayed.append((kind, shape))
            super().replay(kind, shape, inputs)

    def peers(self: ReferenceBackend, store: Any, rank: int, size: int, timeout: timedelta) -> Peers:
        return Peers(Group(self.process_group(store, rank, size, timeout), rank, size))

    monkeypatch.setattr(cpu, "load", lambda threads: None)
    monkeypatch.setattr(decode_graphs, "record", record)
    monkeypatch.setattr(prompt_graphs, "record", record)
    monkeypatch.setattr(prompt_graphs, "TOKENS", (16, 32))
    monkeypatch.setattr(prompt_graphs, "TOKENS_BESIDE_DECODES", (32,))
    monkeypatch.setattr(ReferenceBackend, "peer_group", peers)
    monkeypatch.setattr(ReferenceBackend, "executor", lambda self, resources: GraphExecutor(resources))
    monkeypatch.setattr(ReferenceBackend, "follower", lambda self, resources: Watched(resources))
    yield replayed


@pytest.mark.parametrize(
    "family", ["llama-gqa", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma2", "qwen3-next-dense"))]
)
def test_ranks_replay_the_steps_that_rank_0_replays(
    tmp_path: Path, family: str, captured: list[tuple[int, tuple[int, int]]]
) -> None:
    folder = write_checkpoint(family, tmp_path / family)
    requests = [greedy(f"r{i}", [(i * 17 + j * 5) % 190 for j in range(3 + 25 * i)], 10) for i in range(3)]
    expected = generate(make_engine(folder, **SETTINGS), *requests)
    captured.clear()
    with threaded_engine(folder, 2, 1, **SETTINGS) as engine:
        assert type(engine.runner.executor) is GraphExecutor
        assert generate(engine, *requests) == expected
        assert_idle(engine)
    assert {kind for kind, _ in captured} == {decode_graphs.Kind.DECODES, decode_graphs.Kind.PROMPTS}


@pytest.mark.parametrize(
    ("grid", "settings"),
    [((2, 1), {}), ((1, 2), {}), ((2, 1), {"attention_parallel": "data", "expert_parallel": True})],
    ids=str,
)
def test_room_is_left_for_captured_steps_where_there_are_some(
    tmp_path: Path,
    captured: list[tuple[int, tuple[int, int]]],
    monkeypatch: pytest.MonkeyPatch,
    grid: tuple[int, int],
    settings: dict[str, Any],
) -> None:
    asked: list[Any] = []

    def graph_bytes(*given: Any) -> int:
        asked.append(given)
        return 0

    monkeypatch.setattr(ReferenceBackend, "graph_bytes", graph_bytes)
    folder = write_checkpoint("mixtral", tmp_path / "m")
    with threaded_engine(folder, *grid, **SETTINGS, **settings) as engine:
        captures = type(engine.runner.executor) is GraphExecutor
    assert len(asked) == (2 if captures else 0)
    assert captures == (grid == (2, 1) and not settings)


@pytest.mark.parametrize(
    "family", ["glm-dsa", *(pytest.param(one, marks=pytest.mark.slow) for one in ("deepseek-v32", "mistral-large4"))]
)
def test_decodes_with_long_contexts_are_replayed_too(
    tmp_path: Path, family: str, captured: list[tuple[int, tuple[int, int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where tokens attend to chosen ones, in graphs of their own; where these cannot be captured, launched."""
    folder = write_checkpoint(family, tmp_path / family)
    requests = [greedy(f"r{i}", [(i * 17 + j * 5) % 190 for j in range(3 + 25 * i)], 10) for i in range(3)]
    expected = generate(make_engine(folder, **SETTINGS), *requests)
    captured.clear()
    with threaded_engine(folder, 2, 1, **SETTINGS) as engine:
        assert generate(engine, *requests) == expected
    kinds_seen = {kind for kind, _ in captured}
    assert kinds_seen >= {decode_graphs.Kind.DECODES, decode_graphs.Kind.LONG}
    captured.clear()

    def refused(graphs: decode_graphs.DecodeGraphs, count: int) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(decode_graphs.DecodeGraphs, "make_ready", refused)
    with threaded_engine(folder, 2, 1, **SETTINGS) as engine:
        assert generate(engine, *requests) == expected
        assert engine.runner.executor.long_graphs is None
    assert decode_graphs.Kind.LONG not in {kind for kind, _ in captured}


@pytest.mark.slow
def test_graphs_that_were_dropped_are_captured_by_all_again(
    tmp_path: Path, captured: list[tuple[int, tuple[int, int]]]
) -> None:
    folder = write_checkpoint("llama-gqa", tmp_path / "m")
    with threaded_engine(folder, 2, 1, **SETTINGS) as engine:
        expected = generate(engine, greedy("r", [1, 2, 3], 8))
        engine.runner.executor.release()()
        assert generate(engine, greedy("r", [1, 2, 3], 8)) == expected


@pytest.mark.slow
def test_both_models_of_an_engine_that_speculates_are_captured_and_again_after_a_sleep(
    tmp_path: Path, captured: list[tuple[int, tuple[int, int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft is the target, so every draft token is right as long as both ranks replay what they should."""
    folder = write_checkpoint("llama-gqa", tmp_path / "m")
    requests = [greedy(f"r{i}", [(i * 17 + j * 5) % 190 for j in range(3 + 25 * i)], 20) for i in range(2)]
    expected = generate(make_engine(folder, **SETTINGS), *requests)
    monkeypatch.setattr(ReferenceBackend, "linear", lambda self, weight, bias=None: DenseLinear(weight.clone(), bias))
    # As on a device: some tokens of a step were sampled there and never on the host.
    monkeypatch.setattr(parallel_decoder, "is_host", lambda device: False)
    # What stands for a graph here writes over its last results, which nothing has copied away.
    monkeypatch.setattr(draft, "_IN_FLIGHT", 1)
    monkeypatch.setattr(kinds, "zeros", lambda shape, dtype, device: torch.zeros(shape, dtype=dtype))
    with threaded_engine(folder, 2, 1, speculation="draft", draft_model=str(folder), **SETTINGS) as engine:
        assert engine.speculation is not None and isinstance(engine.speculation.proposer, DraftProposer)
        assert type(engine.speculation.proposer.runner.executor) is GraphExecutor
        verify_everything(engine.speculation)
        for _ in range(2):
            captured.clear()
            assert generate(engine, *requests) == expected
            assert {kind for kind, _ in captured} >= {decode_graphs.Kind.DECODES}
            offload(engine).restore()
        load = engine.load_snapshot()
        assert load.accepted_tokens == load.draft_tokens > 20
        assert_idle(engine)


@pytest.mark.parametrize("tensor", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_contexts_longer_than_those_of_other_captured_steps_have_graphs_of_their_own(
    tmp_path: Path, captured: list[tuple[int, tuple[int, int]]], monkeypatch: pytest.MonkeyPatch, tensor: int
) -> None:
    """Up to 24 tokens this model attends to all; a step that was captured so knows nothing else. Prompts with longer
    contexts are launched."""
    folder = write_checkpoint("glm-dsa", tmp_path / "m")
    reference, longest, beyond = Reference(folder), list[int](), list[int]()
    for graphs in (decode_graphs.DecodeGraphs, prompt_graphs.PromptGraphs):
        step = graphs.step

        def watched(self: Any, *args: Any, step: Any = step, **others: Any) -> Any:
            prompts = isinstance(self, prompt_graphs.PromptGraphs)
            contexts = (args[0].view if prompts else args[0])("contexts", torch.int32)
            here = beyond if self.kind == decode_graphs.Kind.LONG else longest
            here.append(int(contexts[: len(contexts) - prompts].max()))  # behind prompts there is padding
            return step(self, *args, **others)

        monkeypatch.setattr(graphs, "step", watched)
    requests = [
        greedy(f"r{i}", [(i * 17 + j * 5) % 190 for j in range(count)], 8) for i, count in enumerate((5, 18, 60))
    ]
    with threaded_engine(folder, tensor, 1, **SETTINGS) as engine:
        assert type(engine.runner.executor) is GraphExecutor
        longest.clear()
        for together in (requests[:1], requests[1:]):
            got = generate(engine, *together)
            for one in together:
                assert reference.agrees(list(one.prompt), got[one.request_id], 1e-3), one.request_id
        assert_idle(engine)
    assert 5 < max(longest) <= 24 < max(beyond)


def test_a_pipeline_and_ranks_without_peer_memory_launch_every_step(
    tmp_path: Path, captured: list[tuple[int, tuple[int, int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint("llama-gqa", tmp_path / "m")
    with threaded_engine(folder, 1, 2, **SETTINGS) as engine:
        assert type(engine.runner.executor) is not GraphExecutor
    monkeypatch.setattr(ReferenceBackend, "peer_group", lambda *args: None)
    with threaded_engine(folder, 2, 1, **SETTINGS) as engine:
        assert type(engine.runner.executor) is not GraphExecutor
        generate(engine, greedy("r", [1, 2, 3], 4))
    assert not captured


def test_messages_of_captured_steps_arrive_as_they_were_sent() -> None:
    from multiprocessing import Pipe

    from penstock.engine.parallel.channel import receive

    here, there = Pipe()
    cells, inputs = np.array([[1, 2], [3, 4], [5, 6]], np.int64), np.arange(33, dtype=np.uint8)
    here.send_bytes(Replay(3, (16, 64), cells, inputs, model=1).encode())
    here.send_bytes(Capture(2, (8, 0)).encode())
    got = receive(there)
    assert isinstance(got, Replay) and (got.kind, got.shape, got.model) == (3, (16, 64), 1)
    assert np.array_equal(got.cells, cells) and np.array_equal(got.inputs, inputs)
    assert receive(there) == Capture(2, (8, 0))


def test_devices_of_ranks_may_be_named() -> None:
    first = torch.device("cpu")
    assert rank_device(first, 1, 2, ("cpu", "cpu")) == first
    with pytest.raises(ConfigError, match="names 1, but"):
        rank_device(first, 0, 2, ("cpu",))
    config = EngineConfig("m", tensor_parallel=4, devices=("cuda:0", "cuda:0", "cuda:1", "cuda:1"))
    assert config.ranks_per_device == 2 and EngineConfig("m", tensor_parallel=4).ranks_per_device == 1
