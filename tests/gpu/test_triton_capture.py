"""Graphs that are captured when there is no work or beside a step: broken off, taken up again, and right in the end."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from penstock.engine.backends.cuda.capture import GraphPool, record  # noqa: E402
from penstock.engine.backends.cuda.graphs import GraphExecutor  # noqa: E402
from penstock.engine.core import Engine  # noqa: E402
from penstock.engine.request import Request  # noqa: E402
from tests.engine.harness import assert_idle, generate, greedy, make_engine  # noqa: E402
from tests.engine.tiny import Reference, write_checkpoint  # noqa: E402

ON_DEVICE = torch.cuda.is_available() and os.environ.get("PENSTOCK_GPU_TESTS") != "compile"
TIE = 5e-3
"""See `test_triton_engine`."""


def test_graphs_that_became_garbage_are_not_freed_within_a_capture() -> None:
    """As those of an engine that was dropped, whose parts refer to each other."""
    if not ON_DEVICE:
        return
    device, x = torch.device("cuda"), torch.arange(4.0, device="cuda")
    dropped: list[object] = []

    def work() -> tuple[torch.Tensor, torch.Tensor]:
        if torch.cuda.is_current_stream_capturing():
            dropped.clear()
            _ = [[] for _ in range(20_000)]  # enough new objects for the collector to look
        y = x + 1
        return y, y

    def plain() -> tuple[torch.Tensor, torch.Tensor]:
        return x + 1, x

    cycle: list[object] = [record(device, plain, GraphPool(), plain)]
    cycle.append(cycle)
    dropped.append(cycle)
    del cycle
    thresholds = gc.get_threshold()
    gc.set_threshold(10, 1, 1)
    try:
        recording = record(device, work, GraphPool(), plain)
    finally:
        gc.set_threshold(*thresholds)
    assert gc.isenabled()
    x.fill_(5)
    recording.graph.replay()
    assert recording.results[0].tolist() == [6.0] * 4


def test_steps_whose_capture_was_broken_off_give_the_same_tokens() -> None:
    """After each number of layers once, so in the rehearsal, in the capture, and not at all."""
    if not ON_DEVICE:
        return
    requests = [greedy(f"r{i}", [(i * 17 + j * 5) % 190 for j in range(3 + 9 * i)], 12) for i in range(20)]
    for family in ("llama-gqa", "mixtral"):
        with tempfile.TemporaryDirectory() as folder:
            path = write_checkpoint(family, Path(folder), num_hidden_layers=5)
            engine = make_engine(path, device="cuda", max_running=40, num_blocks=300, max_model_len=256)
            reference = Reference(path)

            def check(some: list[Request], engine: Engine = engine, reference: Reference = reference) -> None:
                engine.forget_caches()
                got = generate(engine, *some)
                for request in some:
                    margins = reference.margins(request.prompt, got[request.request_id])
                    assert len(got[request.request_id]) == 12 and float(margins.max()) < TIE, (request, margins)

            executor = engine.runner.executor
            assert isinstance(executor, GraphExecutor)
            check(requests)
            longest = 0.0
            for layers in range(1, 14):
                left, before = layers, len(executor.graphs._captured)

                def urgent() -> bool:
                    nonlocal left
                    left -= 1
                    return left < 0

                assert engine.improve(urgent)
                if left < 0:
                    assert len(executor.graphs._captured) == before
                check(requests[:3])
            # Beside steps in flight: those that were wanted often, with too little time and with enough.
            for number, request in enumerate(requests):
                engine.submit(request)
                for graphs in (executor.graphs, executor.prompt_graphs):
                    if graphs is not None and (size := graphs._later.next) is not None:
                        graphs._later._due[size] = None
                executor._capture_s = 0.0
                engine.step()
                engine.catch_up(1e-3 * number)
                engine.catch_up(60.0)
            while engine.has_work:
                engine.step()
            check(requests)
            more = True
            while more:
                began = time.perf_counter()
                more = engine.improve()
                longest = max(longest, time.perf_counter() - began)
            print(f"    {family}, 5 layers: the longest capture took {1e3 * longest:.1f} ms")
            assert set(executor.graphs._captured) == set(executor.graphs.buckets)
            check(requests)
            assert_idle(engine)
