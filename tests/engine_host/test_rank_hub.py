"""Machines that join an engine and run some of its ranks: over loopback, with the ranks as threads (R-ENG-10)."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import zmq

from penstock.engine.config import EngineConfig
from penstock.engine.core import Engine
from penstock.engine.parallel import launch
from penstock.engine.parallel.child import connection_pair
from penstock.engine.startup import part
from penstock.engine_host import rank_host
from penstock.engine_host.rank_host import Offer, RankHost
from penstock.engine_host.rank_hub import RankHub
from penstock.errors import ConfigError, ReplicaLost
from penstock.protocol.transport import CurveClient, CurveServer, generate_keypair
from tests.engine.harness import generate, greedy, make_engine
from tests.engine.parallel.threads import ThreadProcess, _spawn
from tests.engine.tiny import write_checkpoint
from tests.engine_host.client import eventually

PROMPT = [5, 3, 77, 12, 9, 41]
HEAD, MACHINE, STRANGER = generate_keypair(), generate_keypair(), generate_keypair()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama-gqa", tmp_path_factory.mktemp("machines") / "model")


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[int]]:
    return generate(make_engine(folder), greedy("a", PROMPT, 12))


class RankThread(ThreadProcess):
    def kill(self) -> None:
        """It leaves when its connections are closed, which happens before a process would be killed."""


def start(link: Connection) -> tuple[Any, Connection]:
    ours, theirs = connection_pair()
    return RankThread(theirs, link), ours


def hub(endpoint: str = "tcp://127.0.0.1:*", join_s: float = 200.0) -> RankHub:
    return RankHub(endpoint, CurveServer(HEAD[1], [MACHINE[0]]), join_s=join_s, source="hf:org/large")


def host(endpoint: str, model: Path, *, name: str = "b", server: str = HEAD[0], secret: str = MACHINE[1]) -> RankHost:
    return RankHost(endpoint, Offer(name, model, threads=1), CurveClient(server, secret), start=start)


@contextmanager
def running(*hosts: RankHost) -> Iterator[None]:
    threads = [threading.Thread(target=each.run, daemon=True) for each in hosts]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for each in hosts:
            each.stop()
        for thread in threads:
            thread.join(100)
            assert not thread.is_alive()


def over(folder: Path, *places: str, tensor: int = 1, **settings: Any) -> EngineConfig:
    shape = {"tensor_parallel": tensor, "pipeline_parallel": len(places) // tensor}
    settings = {"device": "cpu", "dtype": "float32", "threads": 1, **shape, **settings}
    return EngineConfig(str(folder), machines=places, **settings)


@contextmanager
def engine_of(config: EngineConfig, machines: RankHub) -> Iterator[Engine]:
    with patch.object(launch, "_spawn", _spawn):
        engine = Engine.load(config, machines=machines)
    try:
        yield engine
    finally:
        engine.close()


def test_a_pipeline_over_two_machines_answers_like_one_device_and_is_joined_again(
    folder: Path, expected: dict[str, list[int]]
) -> None:
    machines = hub()
    with running(host(machines.endpoint, folder)):
        with engine_of(over(folder, "local", "b"), machines) as engine:
            assert generate(engine, greedy("a", PROMPT, 12)) == expected
        with engine_of(over(folder, "local", "b"), hub(machines.endpoint)) as engine:
            assert generate(engine, greedy("a", PROMPT, 12)) == expected


def test_shards_and_stages_on_three_machines_answer_like_one_device(
    folder: Path, expected: dict[str, list[int]]
) -> None:
    machines = hub()
    with (
        running(host(machines.endpoint, folder), host(machines.endpoint, folder, name="c")),
        engine_of(over(folder, "local", "b", "b", "c", tensor=2), machines) as engine,
    ):
        assert generate(engine, greedy("a", PROMPT, 12)) == expected


def test_a_machine_that_leaves_is_a_lost_rank_and_wakes_whoever_waits_for_it(folder: Path) -> None:
    machines = hub()
    leaving = host(machines.endpoint, folder)
    noticed: list[str] = []
    with running(leaving), engine_of(over(folder, "local", "b"), machines) as engine:
        assert engine.ranks is not None
        engine.ranks.watch(noticed.append, exit_after_s=None)
        engine.submit(greedy("a", PROMPT, 100))
        engine.step()
        leaving.stop()
        with pytest.raises(ReplicaLost, match=r"rank 1 \(.*stage 1 of 2\) is gone \(b: b was told to stop\)"):
            while True:
                if not engine.has_work:
                    engine.submit(greedy("a", PROMPT, 100))
                engine.step()
        assert eventually(lambda: bool(noticed)), "an idle engine must notice too"


def test_a_machine_that_does_not_come_is_named_with_the_command_to_run(folder: Path) -> None:
    command = r"penstock join tcp://THIS-MACHINE:\d+ --as b --model hf:org/large --curve-key FILE --curve-engine FILE"
    with pytest.raises(ConfigError, match=rf"b with rank 1 .* did not join within 0.1 s: run `{command}` there"):
        Engine.load(over(folder, "local", "b"), machines=hub(join_s=0.1))


@contextmanager
def waiting(config: EngineConfig) -> Iterator[str]:
    """A rank 0 to which machines may come; yields where."""
    machines = hub()

    def wait() -> None:
        with pytest.raises(ConfigError):
            machines.gather(config)

    machines._join_s = 200.0
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    try:
        yield machines.endpoint
    finally:
        with machines._changed:
            machines._join_s = 0.0
            machines._changed.notify_all()
        thread.join(100)
        machines.close()


REFUSALS: dict[str, tuple[dict[str, Any], str, str]] = {
    "wrong key": ({"secret": STRANGER[1]}, "public key .* is not among those", "is not among those that may join"),
    "wrong engine's key": ({"server": STRANGER[0]}, "has another public key", "did not use this engine's public key"),
    "wrong name": ({"name": "z"}, "no rank is placed on 'z': the placement names b", "refused z: no rank is placed"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_strangers_are_refused_with_a_sentence_on_both_sides(
    case: str, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, there, here = REFUSALS[case]
    monkeypatch.setattr(rank_host, "_RETRY_S", (0.01, 0.01))
    with caplog.at_level(logging.INFO), waiting(over(folder, "local", "b")) as endpoint:
        with pytest.raises(ConfigError, match=there):
            host(endpoint, folder, **settings).run()
        assert eventually(lambda: here in caplog.text)


def test_another_version_and_another_checkpoint_are_refused(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    config = other / "config.json"
    config.write_text(config.read_text().replace("llama", "mistral"))
    with waiting(over(folder, "local", "b")) as endpoint:
        with pytest.raises(ConfigError, match=r"its model is not this engine's: it has another config.json"):
            host(endpoint, other).run()
        with monkeypatch.context() as patched:
            patched.setattr(rank_host, "version", lambda _: "0.0.1")
            with pytest.raises(ConfigError, match=r"it runs Penstock 0\.0\.1 .*install the same version on both"):
                host(endpoint, folder).run()
    assert "refused b: its model is not" in caplog.text and "refused b: it runs Penstock 0.0.1" in caplog.text


def test_a_second_machine_of_the_same_name_waits_and_nonsense_hurts_nobody(
    folder: Path, expected: dict[str, list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    machines = hub()
    with (
        caplog.at_level(logging.INFO),
        running(host(machines.endpoint, folder)),
        engine_of(over(folder, "local", "b"), machines) as engine,
    ):
        with zmq.Context() as context, context.socket(zmq.DEALER) as nonsense:
            nonsense.setsockopt(zmq.LINGER, 0)
            CurveClient(HEAD[0], MACHINE[1]).apply(nonsense)
            nonsense.connect(machines.endpoint)
            nonsense.send_multipart([b"\0" * 8, b"\xff" * 100])
            nonsense.send(b"nonsense")
            assert nonsense.poll(100_000) and b"not a message" in nonsense.recv_multipart()[-1]
        with running(host(machines.endpoint, folder)):
            assert eventually(lambda: "b has joined already; trying again" in caplog.text)
            assert generate(engine, greedy("a", PROMPT, 12)) == expected


def test_hardware_that_chose_otherwise_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pick(name: str, device: torch.device) -> torch.dtype:
        # Not bfloat16, for which a CPU with matrix units calibrates: that rank would first wait for this one's part.
        return torch.float32 if threading.current_thread() is threading.main_thread() else torch.float16

    monkeypatch.setattr(part, "pick_dtype", pick)
    machines = hub()
    with (
        running(host(machines.endpoint, folder)),
        pytest.raises(ConfigError, match=r"rank 1 .* has chosen dtype: torch.float16 and rank 0 torch.float32"),
        engine_of(over(folder, "local", "b", dtype="auto", weights="dense"), machines),
    ):
        pass


def test_the_network_needs_keys_on_this_side_too(folder: Path) -> None:
    with pytest.raises(ConfigError, match="is another machine, so the connection needs keys"):
        RankHost("tcp://192.0.2.1:7001", Offer("b", folder))
    with pytest.raises(ConfigError, match="tcp://HOST:PORT"):
        RankHost("head", Offer("b", folder))
