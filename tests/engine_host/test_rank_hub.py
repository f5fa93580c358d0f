"""Ranks that join an engine from elsewhere: over loopback, with the ranks as threads (R-ENG-10)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from penstock.engine.config import EngineConfig
from penstock.engine.core import Engine
from penstock.engine.parallel import launch
from penstock.engine.parallel.child import connection_pair
from penstock.engine_host.rank_host import Offer, RankHost
from penstock.engine_host.rank_hub import RankHub
from penstock.protocol.transport import CurveClient, CurveServer, generate_keypair
from tests.engine.harness import generate, greedy, make_engine
from tests.engine.parallel.threads import ThreadProcess, _spawn
from tests.engine.tiny import write_checkpoint

PROMPT = [5, 3, 77, 12, 9, 41]
HEAD, MACHINE, STRANGER = generate_keypair(), generate_keypair(), generate_keypair()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama-gqa", tmp_path_factory.mktemp("machines") / "model")


class KilledThread(ThreadProcess):
    """It leaves when its connections are closed, as a killed process would."""

    def kill(self) -> None:
        pass


def start(link: Connection) -> tuple[Any, Connection]:
    ours, theirs = connection_pair()
    return KilledThread(theirs, link), ours


def hub(join_s: float = 30.0, **settings: Any) -> RankHub:
    return RankHub("tcp://127.0.0.1:*", CurveServer(HEAD[1], [MACHINE[0]]), join_s=join_s, **settings)


def host(endpoint: str, model: Path, *, name: str = "b", server: str = HEAD[0], secret: str = MACHINE[1]) -> RankHost:
    return RankHost(endpoint, Offer(name, model, threads=1), CurveClient(server, secret), start=start)


@contextmanager
def joined(*hosts: RankHost) -> Iterator[None]:
    threads = [threading.Thread(target=host.run, daemon=True) for host in hosts]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for each in hosts:
            each.stop()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()


@contextmanager
def engine_over(machines: RankHub, folder: Path, *places: str, tensor: int = 1, **settings: Any) -> Iterator[Engine]:
    config = EngineConfig(
        str(folder), device="cpu", dtype="float32", threads=1, tensor_parallel=tensor,
        pipeline_parallel=len(places) // tensor, machines=places, **settings,
    )  # fmt: skip
    with patch.object(launch, "_spawn", _spawn):
        engine = Engine.load(config, machines=machines)
    try:
        yield engine
    finally:
        engine.close()


def test_a_pipeline_over_two_machines_answers_like_one_device_and_is_joined_again(folder: Path) -> None:
    expected = generate(make_engine(folder), greedy("a", PROMPT, 12))
    machines = hub()
    with joined(host(machines.endpoint, folder)):
        with engine_over(machines, folder, "local", "b") as engine:
            assert generate(engine, greedy("a", PROMPT, 12)) == expected
        again = RankHub(machines.endpoint, CurveServer(HEAD[1], [MACHINE[0]]), join_s=30.0)
        with engine_over(again, folder, "local", "b") as engine:
            assert generate(engine, greedy("a", PROMPT, 12)) == expected
