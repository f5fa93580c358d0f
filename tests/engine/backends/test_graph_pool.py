"""Captured steps overwrite each other's results, and nothing reads them too late: not with steps in flight either.

Without a GPU: a "captured" step is one that is called again, on the reference backend. Its results lie where those of
all others do, and copies to the host are made at once, as those that a stream makes in its order."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor

from penstock.engine.backends import cpu
from penstock.engine.backends.cuda import capture, decode_graphs, draw_chains, prompt_graphs
from penstock.engine.backends.cuda.capture import GraphPool, Recording, Work
from penstock.engine.backends.cuda.decode_graphs import DecodeGraphs
from penstock.engine.backends.cuda.graphs import GraphExecutor
from penstock.engine.backends.interface import CopyEvent
from penstock.engine.backends.reference.backend import ReferenceBackend
from penstock.engine.core import Engine
from penstock.engine.request import Delta, Request, SamplingParams
from tests.engine.harness import assert_idle, drain, make_engine
from tests.engine.speculative.forced import Oracle, eager_engine
from tests.engine.tiny import write_checkpoint

SETTINGS: dict[str, Any] = {"max_running": 12, "num_blocks": 300, "token_budget": 64, "max_model_len": 128}
POOL_BYTES = 1 << 18


class CalledAgain:
    """Stands for a CUDA graph. Its results are in memory that other graphs of its pool use too."""

    memory: ClassVar[WeakKeyDictionary[GraphPool, Tensor]] = WeakKeyDictionary()

    def __init__(self, pool: GraphPool, work: Callable[[], tuple[Tensor, Tensor]]) -> None:
        self._work = work
        self._memory = self.memory.setdefault(pool, torch.empty(POOL_BYTES, dtype=torch.uint8))
        taken, results = 0, []
        for result in work():
            end = taken + result.nbytes
            results.append(self._memory[taken:end].view(result.dtype).view(result.shape))
            taken = -(-end // 512) * 512
        self.results = results[0], results[1]

    def replay(self) -> None:
        new = self._work()
        self._memory.fill_(255)  # not a number, and no token
        for kept, result in zip(self.results, new, strict=True):
            kept.copy_(result)


def record(device: torch.device, work: Work, pool: GraphPool, rehearse: Work) -> Recording:
    with torch.inference_mode():
        graph: Any = CalledAgain(pool, work)
    return Recording(graph, graph.results)


def to_host(backend: ReferenceBackend, *tensors: Tensor) -> tuple[list[Tensor], CopyEvent | None]:
    return [tensor.clone() for tensor in tensors], None


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of decode steps that are replayed."""
    found: list[int] = []
    replay = DecodeGraphs.replay

    def noting(self: DecodeGraphs, batch: Any) -> tuple[Tensor, Tensor]:
        found.append(batch.num_tokens)
        return replay(self, batch)

    monkeypatch.setattr(cpu, "load", lambda threads: None)
    for module in (decode_graphs, draw_chains, prompt_graphs):
        monkeypatch.setattr(module, "record", record)
    monkeypatch.setattr(DecodeGraphs, "replay", noting)
    monkeypatch.setattr(ReferenceBackend, "overlaps", True)
    monkeypatch.setattr(ReferenceBackend, "to_host", to_host)
    return found


DRAWN: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.9}]
"""Sampled within graphs."""


def requests(logprobs: int | None, *, drawn: bool = False) -> list[Request]:
    """Answers of all lengths, so that steps have all sizes."""
    settings = (
        DRAWN
        if drawn
        else [
            *DRAWN,
            {"temperature": 0.9, "top_k": 30},
            {"temperature": 0.8, "top_p": 0.9, "typical_p": 0.9},
            {"temperature": 0.0, "presence_penalty": 0.5, "repetition_penalty": 1.2},
            {"temperature": 0.0, "logit_bias": {3: 4.0}, "stop_token_ids": (3,), "min_tokens": 4},
            {"temperature": 0.7, "allowed_token_ids": tuple(range(0, 190, 3)), "bad_words": ((6, 9),)},
        ]
    )
    return [
        Request(
            f"r{i}",
            [(i * 17 + j * 5) % 190 for j in range(3 + 5 * i)],
            SamplingParams(max_tokens=6 + 3 * i, seed=i, logprobs=logprobs, **settings[i % len(settings)]),
        )
        for i in range(12)
    ]


def answers(engine: Engine, *asked: Request) -> dict[str, list[tuple[int, float | None]]]:
    """Tokens and their log-probabilities."""
    for request in asked:
        engine.submit(request)
    found: dict[str, list[tuple[int, float | None]]] = {}
    for delta in drain(engine):
        found.setdefault(delta.request_id, []).extend(zip(delta.tokens, _logprobs(delta), strict=True))
    assert_idle(engine)
    return found


def _logprobs(delta: Delta) -> list[float | None]:
    return [one.logprob for one in delta.logprobs] if delta.logprobs else [None] * len(delta.tokens)


@pytest.mark.parametrize(("drawn", "logprobs"), [(True, None), (True, 2), (False, 2)])
def test_steps_of_all_sizes_in_flight_give_what_launched_ones_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replayed: list[int], drawn: bool, logprobs: int | None
) -> None:
    folder = write_checkpoint("llama-gqa", tmp_path)
    asked = requests(logprobs, drawn=drawn)
    expected = answers(make_engine(folder, **SETTINGS), *asked)
    monkeypatch.setattr(ReferenceBackend, "executor", lambda self, resources: GraphExecutor(resources))
    engine = make_engine(folder, **SETTINGS)
    assert engine._depth == 1, "one step is launched before the last was collected"
    found = answers(engine, *asked)
    assert {request: [token for token, _ in tokens] for request, tokens in found.items()} == {
        request: [token for token, _ in tokens] for request, tokens in expected.items()
    }
    for request, tokens in found.items():
        for (_, got), (_, wanted) in zip(tokens, expected[request], strict=True):
            assert (got is None) == (wanted is None) == (logprobs is None)
            assert got is None or got == pytest.approx(wanted, abs=1e-4)
    assert len(set(replayed)) > 6
    executor = engine.runner.executor
    assert isinstance(executor, GraphExecutor) and executor.prompt_graphs is not None
    captured = [*executor.graphs._captured.values(), *executor.prompt_graphs._captured.values()]
    assert len({one.logits.untyped_storage().data_ptr() for one in captured}) == 1
    executor.release()()
    engine.forget_caches()
    assert answers(engine, *asked) == found, "captured again"


def test_drafts_are_verified_with_the_logits_of_their_own_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replayed: list[int]
) -> None:
    folder = write_checkpoint("llama-gqa", tmp_path)
    expected = answers(make_engine(folder, **SETTINGS), *requests(0))
    texts = {request: [token for token, _ in tokens] for request, tokens in expected.items()}
    monkeypatch.setattr(ReferenceBackend, "executor", lambda self, resources: GraphExecutor(resources))
    engine = eager_engine(folder, lambda _: Oracle(texts, wrong=0.3, vocab_size=199), **SETTINGS)
    found = answers(engine, *requests(0))
    assert {request: [token for token, _ in tokens] for request, tokens in found.items()} == texts
    assert engine.load_snapshot().accepted_tokens > 40 and len(set(replayed)) > 6


class PooledGraph:
    """Stands for a CUDA graph as PyTorch counts those of a pool: one that has none any more cannot be named again."""

    alive: ClassVar[Counter[int]] = Counter()
    begun: ClassVar[int] = 0
    fails: ClassVar[bool] = False

    def capture_begin(self, pool: int | None = None, **_: Any) -> None:
        if pool is None:
            PooledGraph.begun += 1
            pool = PooledGraph.begun
        else:
            assert self.alive[pool] > 0, "a pool without graphs was named"
        self._pool = pool
        self.alive[pool] += 1

    def capture_end(self) -> None:
        if self.fails:
            raise RuntimeError("out of memory")

    def pool(self) -> int:
        return self._pool

    def replay(self) -> None:
        """Results stay as they were when it was captured."""

    def __del__(self) -> None:
        self.alive[self._pool] -= 1


@pytest.fixture
def pooled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[int]]]:
    """Captures as they are on a device; how many graphs each pool has."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(cpu, "load", lambda threads: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", PooledGraph)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(capture, "_capture_stream", lambda device: stream)
    monkeypatch.setattr(capture, "_make_room", lambda device: None)
    monkeypatch.setattr(ReferenceBackend, "executor", lambda self, resources: GraphExecutor(resources))
    gc.collect()
    PooledGraph.alive.clear()

    def counts() -> list[int]:
        gc.collect()
        return [count for _, count in sorted(PooledGraph.alive.items())]

    yield counts
    PooledGraph.alive.clear()


def urgent_in_capture(engine: Engine) -> Callable[[], bool]:
    """Something is at the last layer, once all of them were rehearsed."""
    looks = iter([False] * (2 * len(engine.runner.decoder.layers) - 1) + [True])
    return lambda: next(looks)


def test_a_pool_is_named_only_as_long_as_it_has_graphs(tmp_path: Path, pooled: Callable[[], list[int]]) -> None:
    """Captures that are broken off, that fail, or that come again once all graphs were dropped."""
    engine = make_engine(write_checkpoint("llama-gqa", tmp_path), **SETTINGS)
    executor = engine.runner.executor
    assert isinstance(executor, GraphExecutor) and executor.prompt_graphs is not None
    (first,) = pooled()
    begun = PooledGraph.begun
    assert executor.improve(urgent_in_capture(engine)) and pooled() == [first], "broken off"
    PooledGraph.fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        executor.improve()
    PooledGraph.fails = False
    assert executor.improve() and pooled() == [first + 1]

    again = executor.release()
    assert pooled() == [0]
    assert executor.improve(urgent_in_capture(engine)), "the first of a new pool is broken off"
    assert PooledGraph.begun == begun + 1 and not any(pooled())
    PooledGraph.fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        executor.improve()
    PooledGraph.fails = False
    again()
    while executor.improve():
        pass
    *before, all_of_them = pooled()
    assert not any(before) and all_of_them > first
    captured = len(executor.graphs._captured) + len(executor.prompt_graphs._captured)
    assert all_of_them == captured and set(executor.graphs._captured) == set(executor.graphs.buckets)


def test_a_drafter_has_a_pool_of_its_own_for_steps_and_chains(tmp_path: Path, pooled: Callable[[], list[int]]) -> None:
    folder = write_checkpoint("llama-gqa", tmp_path)
    engine = make_engine(folder, speculation="draft", draft_model=str(folder), **SETTINGS)
    assert len(pooled()) == 2 and all(pooled())
    executors = engine.runner.executor, engine.speculation.proposer.runner.executor  # type: ignore[union-attr]
    assert isinstance(executors[1], GraphExecutor)
    executors[1].chains = draw_chains.DrawChains(executors[1].graphs, depth=2)
    executors[1].chains.capture_all()
    assert len(pooled()) == 2
    agains = [executor.release() for executor in executors]
    assert pooled() == [0, 0]
    for again in agains:
        again()
    assert pooled()[:2] == [0, 0] and len(pooled()) == 4 and all(pooled()[2:])
