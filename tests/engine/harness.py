"""Driving an engine in tests."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from penstock.engine.config import EngineConfig
from penstock.engine.core import Engine
from penstock.engine.grammar.constraints import MakeCompiler
from penstock.engine.kv.exchange import Held
from penstock.engine.request import Delta, Request, SamplingParams


def make_engine(folder: Path, grammars: MakeCompiler | None = None, **settings: Any) -> Engine:
    # The models are so small that more threads would only wait for each other.
    # How a step is cut must not depend on how busy the machine is.
    settings = {"device": "cpu", "dtype": "float32", "threads": 1, "target_gap_ms": 1e6, **settings}
    return Engine.load(EngineConfig(model=str(folder), **settings), grammars=grammars)


def read_at_once(engine: Engine) -> Engine:
    """Have adapters read when they are asked for, not on threads: which requests run together, and what is evicted or
    preempted for them, must not depend on how busy the machine is. The engine again."""
    assert engine.adapters is not None
    loader = engine.adapters.registry._loader

    def start(key: Any, name: str, source: str) -> None:
        loader._done.append(loader._load(key, name, source))
        loader._arrived.set()

    loader.start = start  # type: ignore[method-assign]
    return engine


def greedy(request_id: str, prompt: list[int], count: int, **params: Any) -> Request:
    return Request(request_id, prompt, SamplingParams(max_tokens=count, temperature=0.0, **params))


def drain(engine: Engine, limit: int = 100_000) -> list[Delta]:
    """Step until idle; everything that came out."""
    deltas: list[Delta] = []
    for _ in range(limit):
        if not engine.has_work:
            return deltas
        output = engine.step()
        if output is not None:
            deltas.extend(output.deltas)
        elif engine._constraints.opening:
            time.sleep(0.001)  # a grammar is compiled beside the steps, which takes its time
    raise AssertionError("the engine did not become idle")


def collect(deltas: Iterable[Delta]) -> dict[str, list[int]]:
    """Tokens of every request."""
    tokens: dict[str, list[int]] = {}
    for delta in deltas:
        tokens.setdefault(delta.request_id, []).extend(delta.tokens)
    return tokens


def generate(engine: Engine, *requests: Request) -> dict[str, list[int]]:
    for request in requests:
        engine.submit(request)
    return collect(drain(engine))


def assert_idle(engine: Engine) -> None:
    """Nothing runs, nothing is held, the pool is whole."""
    load = engine.load_snapshot()
    assert load.running == 0 and load.waiting == 0 and load.used_blocks == 0
    engine.check_idle()


def carry(giver: Engine, taker: Engine, names: Sequence[bytes], cache: int = 0) -> list[Held]:
    """What the network does: blocks from the slots of one engine to those of another; they are held there."""
    here, there = giver.exchange, taker.exchange
    assert here is not None and there is not None
    blocks: list[Held] = []
    for name, slot in zip(names, here.copy_out(names), strict=True):
        target = there.take_slot(name)
        while not (here.is_idle(slot) and there.is_idle(target)):
            pass
        for source, memory in zip(here.memory(slot), there.memory(target), strict=True):
            memory[:] = source
        blocks += there.take_in([(name, target)], cache)
        here.give_back(slot)
        there.give_back(target)
    return blocks
