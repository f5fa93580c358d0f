"""A conversation goes on after its engine, or the whole server, was killed: its beginning comes from disk (R-ENG-4)."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.test_failover import tiny_model
from tests.e2e.test_supervisor import Server

pytestmark = pytest.mark.slow
Talk = list[dict[str, str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@contextmanager
def serving(model: Path, disk: Path, replicas: int = 1) -> Iterator[Server]:
    server = Server(
        *(str(model), "--set", "models.0.name=tiny", "--set", "models.0.threads=1", "--set", "encoders=[]"),
        *("--set", "models.0.deterministic=true", "--set", "models.0.kv_memory=16MiB"),
        *("--set", "models.0.host_memory=8MiB", "--set", "models.0.disk_memory=64MiB"),
        *("--set", f"models.0.disk_path={disk}", "--set", "models.0.disk_persistent=true"),
        *("--set", f"models.0.replicas={replicas}", "--set", "server.drain_s=2"),
        defaults=False,
    )
    try:
        server.wait_for("curl http")
        yield server
    finally:
        server.close()


def say(server: Server, talk: Talk, salt: str = "one") -> tuple[str, int]:
    """The next answer, and how many tokens of the prompt were cached."""
    body: dict[str, Any] = {"model": "tiny", "messages": talk, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    deadline = time.monotonic() + 60
    while True:
        reply = httpx.post(f"{server.url}/v1/chat/completions", json=body | {"cache_salt": salt}, timeout=180)
        if reply.status_code == 200 or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    assert reply.status_code == 200, reply.text
    found = reply.json()
    details = found["usage"]["prompt_tokens_details"] or {}
    return found["choices"][0]["message"]["content"], details.get("cached_tokens") or 0


def talk_of(number: int) -> Talk:
    return [{"role": "user", "content": f"{number}: " + "a long story about a river and a mill. " * 10}]


def engines(server: Server) -> list[int]:
    return server.processes("engine")


def wait_until_saved(server: Server) -> None:
    """Blocks are written when the engine has nothing else to do."""
    text = ""
    for _ in range(1000):
        time.sleep(0.1)
        before, text = text, httpx.get(f"{server.url}/metrics").text
        rows = [line for line in text.splitlines() if line.startswith("penstock_kv_disk_blocks_written_total")]
        if before and rows and rows == [line for line in before.splitlines() if line in rows]:
            return


def test_after_kill_9_and_after_a_restart(model: Path, tmp_path: Path) -> None:
    talks = [talk_of(number) for number in range(4)]
    with serving(model, tmp_path) as server:
        answers = [say(server, talk) for talk in talks]
        assert [cached for _, cached in answers] == [0] * 4
        wait_until_saved(server)
        (engine,) = engines(server)
        os.kill(engine, signal.SIGKILL)
        after = [say(server, talk) for talk in talks]
        assert engines(server) != [engine]
        assert [text for text, _ in after] == [text for text, _ in answers]
        assert min(cached for _, cached in after) > 300, "all but the last block"
        other = say(server, talks[0], "two")
        assert other == (answers[0][0], 0), "another salt"
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0, server.lines
    with serving(model, tmp_path) as server:
        again = [say(server, talk) for talk in talks]
        assert [text for text, _ in again] == [text for text, _ in answers]
        assert min(cached for _, cached in again) > 300
        assert say(server, talks[0], "two")[1] > 300, "what was in memory was saved when it ended"
        assert server.process.poll() is None
        server.process.kill()  # everything at once


def test_killed_at_any_moment(model: Path, tmp_path: Path) -> None:
    """Engines are killed while they write, again and again: answers stay the same."""
    talks = [talk_of(number) for number in range(12)]
    expected: dict[int, str] = {}
    found = 0
    with serving(model, tmp_path) as server:
        for turn in range(4):
            killed = threading.Timer(
                0.15 + 0.2 * turn, lambda: [os.kill(pid, signal.SIGKILL) for pid in engines(server)]
            )
            killed.start()
            for number, talk in enumerate(talks):
                text, cached = say(server, talk)
                assert expected.setdefault(number, text) == text, f"turn {turn}"
                found += cached > 0
            killed.join()
    assert found > 12


def test_prompts_go_to_the_replica_that_has_their_beginning(model: Path, tmp_path: Path) -> None:
    """After a restart of everything, though no gateway remembers who had what."""
    talks = [talk_of(number) for number in range(6)]
    with serving(model, tmp_path, replicas=2) as server:
        for talk in talks:
            say(server, talk)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0, server.lines
    assert len(list(tmp_path.glob("kv-cache/*/*/rank0.blocks"))) == 2
    with serving(model, tmp_path, replicas=2) as server:
        time.sleep(1)
        assert min(say(server, talk)[1] for talk in talks) > 300
