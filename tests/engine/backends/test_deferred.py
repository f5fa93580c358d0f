"""Steps that are captured after the start: larger ones stand in for them until there is time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.engine.backends import cpu
from penstock.engine.backends.cuda import decode_graphs, graph_memory, prompt_graphs
from penstock.engine.backends.cuda.capture import Recording, Work
from penstock.engine.backends.cuda.deferred import Deferred
from penstock.engine.backends.cuda.graph_memory import graph_bytes
from penstock.engine.backends.cuda.graphs import GraphExecutor
from penstock.engine.backends.interface import StepLimits
from penstock.engine.backends.reference.backend import ReferenceBackend
from penstock.engine.core import Engine
from penstock.engine.request import Request
from tests.engine.harness import assert_idle, generate, greedy, make_engine
from tests.engine.tiny import write_checkpoint


def test_a_larger_size_stands_in_until_a_size_is_captured_or_wanted_often() -> None:
    later = Deferred(10, [24, 40, 48])
    sizes = [24, 32, 40, 48, 64]
    assert later.choose(size for size in sizes if size >= 36) == 64
    for _ in range(9):
        assert later.choose(size for size in sizes if size >= 20) == 32
    assert later.due is None
    for _ in range(20):
        assert later.choose(size for size in sizes if size >= 20) == 32
        assert later.due == 24
    assert later.choose(size for size in sizes if size >= 20) == 24, "no step was long enough to capture it beside"
    assert later.choose(size for size in sizes if size >= 36) == 64, "what is only passed over is not wanted"
    later.done(40)
    assert later.choose(size for size in sizes if size >= 36) == 40
    assert later.next == 24 and later.choose([48]) is None


def test_sequences_rarely_wait_for_captures() -> None:
    now = 0.0
    later = Deferred(1, [24, 40], clock=lambda: now)
    for _ in range(2):
        assert later.choose([24, 32]) == 32 and later.choose([40, 64]) == 64
    assert later.choose([24, 32]) == 24
    later.done(24)
    assert later.choose([40, 64]) == 64 and later.due == 40, "another was waited for a moment ago"
    now = 1.0
    assert later.choose([40, 64]) == 40
    later.done(40)
    assert later.due is None and later.next is None


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
        rehearse()
        graph: Any = CalledAgain(work)
    return Recording(graph, graph.results)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(cpu, "load", lambda threads: None)
    for module in (decode_graphs, prompt_graphs):
        monkeypatch.setattr(module, "record", record)
    monkeypatch.setattr(ReferenceBackend, "executor", lambda self, resources: GraphExecutor(resources))
    folder = write_checkpoint("llama-gqa", tmp_path)
    return make_engine(folder, max_running=40, num_blocks=300, token_budget=64, max_model_len=128)


def test_few_steps_are_captured_at_the_start_and_the_rest_when_there_is_no_work(engine: Engine) -> None:
    executor = engine.runner.executor
    assert isinstance(executor, GraphExecutor) and executor.prompt_graphs is not None
    assert set(executor.graphs._captured) == {1, 2, 3, 4, 6, 8, 16, 32, 40}
    assert {shape.tokens for shape in executor.prompt_graphs._captured} == {64}
    requests = [greedy(f"r{i}", [(i * 17 + j * 5) % 190 for j in range(3 + i)], 8) for i in range(20)]
    before = generate(engine, *requests)
    assert 24 not in executor.graphs._captured, "too few steps to capture it while others wait"
    engine.submit(requests[0])
    assert not engine.improve(), "there is work"
    while engine.has_work:
        engine.step()
    while engine.improve():
        pass
    assert set(executor.graphs._captured) == set(executor.graphs.buckets)
    assert {shape.tokens for shape in executor.prompt_graphs._captured} == {32, 64}
    assert generate(engine, *requests) == before
    captured = [*executor.graphs._captured.values(), *executor.prompt_graphs._captured.values()]
    kept = graph_bytes(engine.runner.decoder, StepLimits(40, 64, 128, 16)) - graph_memory._REST
    assert kept == max(one.logits.nbytes for one in captured), "what is left free for them"
    executor.release()()
    assert set(executor.graphs._captured) == {1, 2, 3, 4, 6, 8, 16, 32, 40}, "and the others later again"
    engine.forget_caches()
    assert generate(engine, *requests) == before
    assert_idle(engine)


def test_a_request_ends_the_capture_of_a_step_between_two_layers(engine: Engine) -> None:
    executor = engine.runner.executor
    assert isinstance(executor, GraphExecutor)
    captured = set(executor.graphs._captured)
    asked = 0

    def comes_later() -> bool:
        nonlocal asked
        asked += 1
        return asked > 3

    assert engine.improve(comes_later), "there is still something to do"
    assert asked == 4 and set(executor.graphs._captured) == captured
    prompt = greedy("r", [3, 1, 4, 1, 5], 6)
    before = generate(engine, prompt)
    assert engine.improve()
    assert len(executor.graphs._captured) == len(captured) + 1, "the same one from its beginning"
    assert generate(engine, prompt) == before
    assert_idle(engine)


def test_a_step_that_is_wanted_often_is_captured_beside_a_long_one(engine: Engine) -> None:
    executor = engine.runner.executor
    assert isinstance(executor, GraphExecutor)
    requests = [greedy(f"r{i}", [(i * 17 + j * 5) % 190 for j in range(3 + i)], 80) for i in range(20)]
    before = generate(engine, *requests)
    assert 24 not in executor.graphs._captured and executor.graphs.due
    assert not engine.catch_up(0.001), "too short"
    executor._capture_s = 0.0
    assert engine.catch_up(0.0), "begun, and broken off"
    assert 24 not in executor.graphs._captured
    executor._capture_s = 0.0
    assert engine.catch_up(60.0)
    assert 24 in executor.graphs._captured and not executor.graphs.due
    while engine.catch_up(60.0):
        pass  # prompts that were padded
    assert 0 < executor._capture_s < 60
    engine.forget_caches()
    assert generate(engine, *requests) == before
    assert_idle(engine)


def fail(*arguments: object) -> Recording:
    raise torch.OutOfMemoryError


def requests_of(count: int, tokens: int) -> list[Request]:
    return [greedy(f"r{i}", [(i * 17 + j * 5) % 190 for j in range(3 + i)], tokens) for i in range(count)]


@pytest.mark.parametrize(
    "beside", [pytest.param(True, marks=pytest.mark.slow), False], ids=["beside a step", "before a step"]
)
def test_a_capture_that_fails_costs_no_step_and_is_tried_again_without_work(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    executor = engine.runner.executor
    assert isinstance(executor, GraphExecutor) and executor.prompt_graphs is not None
    for later in (executor.graphs._later, executor.prompt_graphs._later):
        later._often = 4
    before = generate(engine, *requests_of(20, 12))
    assert executor.graphs.due and 24 not in executor.graphs._captured
    with monkeypatch.context() as patched:
        for module in (decode_graphs, prompt_graphs):
            patched.setattr(module, "record", fail)
        if beside:
            assert not engine.catch_up(60.0)
        for _ in range(4):  # however often it is wanted
            engine.forget_caches()
            assert generate(engine, *requests_of(20, 12)) == before
        assert engine.scheduler.token_budget == 64, "no step failed"
        assert not executor.graphs.due and not engine.catch_up(60.0)
    while engine.improve():
        pass
    assert 24 in executor.graphs._captured
    assert_idle(engine)


def test_a_capture_that_fails_without_work_is_the_last_one(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patched:
        for module in (decode_graphs, prompt_graphs):
            patched.setattr(module, "record", fail)
        assert not engine.improve() and "others stand in" in caplog.text
    assert len(generate(engine, *requests_of(20, 12))) == 20
    assert_idle(engine)
