"""Engines that compute prompts and engines that use them, for the tests of that."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from penstock.engine.core import Engine
from penstock.engine.request import Delta, Handover, HandoverLoad, Request, StepOutput
from penstock.engine_host.handover import fetcher
from penstock.protocol.messages import Submit
from penstock.protocol.transport import CurveServer
from tests.engine.harness import assert_idle, make_engine
from tests.engine_host.client import Client, connected, serving

SLOW = {"token_budget": 16}
"""One block per step: prompts take their time."""

PATIENCE_S = 120.0


@dataclass
class Prefiller:
    process: subprocess.Popen[bytes]
    endpoint: str

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def prefiller(folder: Path, tmp_path: Path) -> Iterator[Prefiller]:
    """`penstock engine --role prefill`, in a process of its own."""
    endpoint, config = f"ipc://{tmp_path}/prefill", tmp_path / "penstock.yaml"
    config.write_text(f"models: [{{name: tiny, source: {folder}, dtype: float32, threads: 1, token_budget: 16}}]\n")
    command = ["engine", "tiny", "-c", str(config), "--endpoint", endpoint, "--role", "prefill"]
    process = subprocess.Popen([sys.executable, "-m", "penstock", *command])
    try:
        with connected(endpoint) as client:
            client.hello()
        yield Prefiller(process, endpoint)
    finally:
        process.kill()
        process.wait()


@dataclass
class World:
    """An engine that decodes, its one gateway, and where prompts are computed."""

    engine: Engine
    endpoint: str
    client: Client
    source: Handover

    def ask(self, request: Request) -> None:
        self.client.send(Submit(replace(request, handover=self.source)))

    def answer(self, request: Request) -> tuple[list[int], Delta]:
        """Its tokens, and its first delta."""
        self.ask(request)
        first, tokens = None, list[int]()
        for delta in self.client.deltas():
            if delta.request_id == request.request_id:
                first = first or delta
                tokens += delta.tokens
                if delta.finish_reason is not None:
                    assert delta.error is None, delta.error
                    return tokens, first
        raise AssertionError(f"{request.request_id} did not finish")

    @property
    def counts(self) -> HandoverLoad:
        assert self.engine.exchange is not None
        return self.engine.exchange.counts


@contextmanager
def decoder(folder: Path, source: Handover, curve: CurveServer | None = None, **settings: Any) -> Iterator[World]:
    engine = make_engine(folder, role="decode", **settings)
    with ExitStack() as stack:
        # However busy this machine is: an engine that is there answers in time.
        stack.enter_context(patch.object(fetcher, "CONNECT_S", PATIENCE_S))
        running = stack.enter_context(serving(engine, curve=curve))
        client = stack.enter_context(connected(running.endpoint))
        client.hello()
        yield World(engine, running.endpoint, client, source)
    assert_idle(engine)
    assert engine.exchange is not None and len(engine.exchange.slots) == engine.exchange.num_slots, "slots leaked"


@contextmanager
def pair(folder: Path, **settings: Any) -> Iterator[tuple[World, Engine]]:
    """Two engines in this process; neither may be left with anything in the end."""
    giver = make_engine(folder, role="prefill", **settings.pop("giver", SLOW))
    with serving(giver) as running, decoder(folder, source(running.endpoint), **settings) as world:
        yield world, giver
    assert_idle(giver)


class Halted:
    """Holds an engine that computes prompts as soon as `when` is true, until it is let go: what a test does meanwhile
    happens in the midst of it. The engine's server goes on."""

    def __init__(self, engine: Engine, when: Callable[[], bool]) -> None:
        self._step, self._when, self._over = engine.step, when, False
        engine.step = self._halt  # type: ignore[method-assign]

    def let_go(self) -> None:
        self._over = True

    def _halt(self) -> StepOutput | None:
        if self._over or not self._when():
            return self._step()
        time.sleep(0.001)
        return None


def source(endpoint: str, **options: Any) -> Handover:
    return Handover(endpoint, **{"least_tokens": 64, "wait_s": PATIENCE_S, **options})


def text(number: int, length: int = 700) -> list[int]:
    return [(number * 31 + 7 * i * i + 3 * i) % 199 for i in range(length)]
