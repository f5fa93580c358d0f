"""Kernels are built while weights are read: those of the first layer, and then those of layers of other kinds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.backends import cpu
from penstock.engine.backends.reference.backend import ReferenceBackend
from penstock.engine.loading.random_checkpoint import ShapeReader
from penstock.engine.models import build
from penstock.errors import CheckpointError
from tests.engine.harness import generate, greedy, make_engine
from tests.engine.tiny import write_checkpoint


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, Collection[object]]]:
    """The thread, the number of layers and what is done already, of each time that kernels are built."""
    found: list[tuple[str, int, Collection[object]]] = []

    def compile(
        self: Any, decoder: Any, dtype: Any, limits: Any, adapters: Any, done: Any = (), wanted: Any = None
    ) -> list[str]:
        found.append((threading.current_thread().name, len(decoder.layers), done))
        return ["attention"]

    monkeypatch.setattr(cpu, "load", lambda threads: None)
    monkeypatch.setattr(ReferenceBackend, "compiles", True)
    monkeypatch.setattr(ReferenceBackend, "compile", compile)
    return found


def test_the_first_layer_while_the_others_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, builds: list[tuple[str, int, Collection[object]]]
) -> None:
    built: list[int] = []
    layers = build.LLAMA_LIKE.compose_layer

    def compose(context: Any) -> Any:
        built.append(len(builds))
        return layers(context)

    monkeypatch.setattr(build, "LLAMA_LIKE", type(build.LLAMA_LIKE)(build.LLAMA_LIKE.decoder, compose))
    engine = make_engine(write_checkpoint("llama-gqa", tmp_path), num_blocks=20)
    assert built[0] == 0
    assert builds == [("kernels", 1, ()), ("MainThread", 3, ["attention"])]
    assert len(generate(engine, greedy("r", [1, 2, 3], 4))["r"]) == 4


def test_a_failure_there_leaves_it_to_the_whole_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, builds: list[tuple[str, int, Collection[object]]]
) -> None:
    inner = ReferenceBackend.compile

    def fails(self: Any, decoder: Any, *rest: Any, **named: Any) -> Any:
        if threading.current_thread().name == "kernels":
            raise RuntimeError("no compiler")
        return inner(self, decoder, *rest, **named)

    monkeypatch.setattr(ReferenceBackend, "compile", fails)
    make_engine(write_checkpoint("llama-gqa", tmp_path), num_blocks=20)
    assert builds == [("MainThread", 3, ())]


def test_a_model_that_cannot_be_loaded_leaves_no_thread_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, builds: list[tuple[str, int, Collection[object]]]
) -> None:
    given_up: list[bool] = []
    interval = sys.getswitchinterval()

    def compile(self: Any, *rest: Any, wanted: Any) -> list[str]:
        until = time.monotonic() + 100.0
        while wanted() and time.monotonic() < until:
            time.sleep(0.001)  # a kernel
        given_up.append(not wanted())
        return []

    layers = build.LLAMA_LIKE.compose_layer

    def compose(context: Any) -> Any:
        if context.index == 1 and not isinstance(context.read, ShapeReader):
            assert sys.getswitchinterval() < interval
            raise CheckpointError("cut short")
        return layers(context)

    monkeypatch.setattr(ReferenceBackend, "compile", compile)
    monkeypatch.setattr(build, "LLAMA_LIKE", type(build.LLAMA_LIKE)(build.LLAMA_LIKE.decoder, compose))
    with pytest.raises(CheckpointError, match="cut short"):
        make_engine(write_checkpoint("llama-gqa", tmp_path), num_blocks=20)
    assert given_up == [True]
    assert sys.getswitchinterval() == interval
    assert not any(thread.name == "kernels" for thread in threading.enumerate())
