"""Engines with conversations that outlive them, for the tests of that."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.engine.core import Engine
from penstock.engine.request import Request
from tests.engine.harness import assert_idle, collect, drain, generate, greedy, make_engine
from tests.engine.tiny import write_checkpoint

BLOCK = 12288
"""Bytes of a block of the model below."""


def write_model(folder: Path) -> Path:
    return write_checkpoint("llama-gqa", folder, spread=0.5)


def answers(folder: Path) -> dict[str, list[int]]:
    """Of four conversations."""
    engine = make_engine(folder)
    return generate(engine, *(greedy(f"{number}", text(number), 5) for number in range(4)))


def text(number: int, length: int = 100) -> list[int]:
    return [(number * 31 + 7 * i * i + 3 * i) % 199 for i in range(length)]


def start(folder: Path, disk: Path, **settings: Any) -> Engine:
    tiers = {"host_memory": 16 * BLOCK, "disk_memory": 60 * BLOCK, "disk_path": str(disk), "disk_persistent": True}
    return make_engine(folder, **{"num_blocks": 40, "max_model_len": 256} | tiers | settings)


def converse(engine: Engine, expected: dict[str, list[int]], salt: str = "", numbers: range = range(4)) -> list[int]:
    """Have conversations, the tokens of which are checked; how many tokens each took from the cache."""
    cached = []
    for number in numbers:
        request = greedy(f"{number}", text(number), 5)
        engine.submit(Request(request.request_id, request.prompt, request.params, cache_salt=salt))
        deltas = drain(engine)
        assert collect(deltas)[f"{number}"] == expected[f"{number}"]
        cached.append(deltas[0].cached_tokens)
    assert_idle(engine)
    return cached


def kill(engine: Engine) -> None:
    """End an engine as a signal would: nothing is saved, its files and its lock are closed."""
    persistence = engine.persistence
    assert persistence is not None
    engine.persistence = None
    engine.close()
    persistence.close()


def settle(engine: Engine) -> None:
    """What an engine without work does all the time."""
    while engine.settle():
        pass


def files(disk: Path, name: str) -> list[Path]:
    return sorted(disk.glob(f"kv-cache/*/*/{name}"))


def wait(over: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not over():
        assert time.monotonic() < deadline
        time.sleep(0.001)
