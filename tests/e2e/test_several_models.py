"""`penstock serve` with two real models in one memory: turns on demand, and sleep and wake by hand (R-ENG-14)."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from penstock.engine.loading.checkpoint import GGUFCheckpoint
from tests.e2e.test_supervisor import Server

pytestmark = pytest.mark.slow
SLICE_S = 2.0


def memory(pid: int) -> int:
    """Resident bytes of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


@pytest.fixture(scope="module")
def copy(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A second model: the same file under another name."""
    other = tmp_path_factory.mktemp("models") / "other.gguf"
    shutil.copy(default_model, other)
    assert GGUFCheckpoint(other).config
    return other


@pytest.fixture(scope="module")
def server(copy: Path) -> Iterator[Server]:
    models = [
        {"source": "smollm2-135m", "name": "first", "time_slice": "cpu0"},
        {"source": str(copy), "name": "second", "time_slice": "cpu0"},
        {"source": str(copy), "name": "third", "memory_share": 0.3, "num_blocks": 64},
    ]
    config = copy.parent / "penstock.yaml"
    common = {"max_model_len": 512, "max_running": 4, "kv_memory": "64MiB"}
    shares = {"server": {"time_slice_s": SLICE_S, "engine_wait_s": 60}}
    config.write_text(json.dumps({**shares, "models": [{**common, **model} for model in models]}))
    server = Server("-c", str(config), defaults=False)
    try:
        server.wait_for("curl http")
        yield server
    finally:
        server.close()


def states(server: Server) -> dict[str, str]:
    return {model["id"]: model["state"] for model in httpx.get(f"{server.url}/v1/models").json()["data"]}


def test_models_that_take_turns_start_asleep_and_the_server_is_ready(server: Server) -> None:
    encoder = {"minilm": "started when asked for"}
    assert states(server) == {"first": "sleeping", "second": "sleeping", "third": "awake", **encoder}
    assert httpx.get(f"{server.url}/health/ready").status_code == 200
    assert server.said("asleep until a request needs it") == 2 + 2  # as it starts, and in the banner


def test_requests_to_both_at_once_are_all_answered_and_only_one_is_awake_at_a_time(server: Server) -> None:
    replies: list[httpx.Response] = []
    seen: list[dict[str, str]] = []
    asking = [
        threading.Thread(target=lambda name=name: replies.append(server.ask(model=name)))
        for name in ("first", "second", "first", "second")
    ]
    for thread in asking:
        thread.start()
    while any(thread.is_alive() for thread in asking):
        seen.append(states(server))
        asking[0].join(0.05)
    assert [reply.status_code for reply in replies] == [200] * 4
    assert all("Paris" in reply.json()["choices"][0]["message"]["content"] for reply in replies)
    turns = [{name for name in ("first", "second") if state[name] in ("awake", "drowsy", "waking")} for state in seen]
    assert all(len(turn) <= 1 for turn in turns)
    assert {"first"} in turns and {"second"} in turns


def test_by_hand_a_model_gives_its_memory_back_and_answers_again(server: Server) -> None:
    engines = server.processes("engine", "third")
    assert len(engines) == 1
    before = memory(engines[0])
    run = [sys.executable, "-m", "penstock", "models"]
    slept = subprocess.run([*run, "sleep", "third", "--url", server.url], capture_output=True, text=True, timeout=180)
    assert slept.returncode == 0 and slept.stdout.startswith("third: sleeping after"), slept.stderr
    assert before - memory(engines[0]) > 50 << 20, "the weights alone are 90 MB"
    refused = server.ask(model="third")
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "model_asleep"
    assert int(refused.headers["retry-after"]) >= 1
    assert "third" in subprocess.run([*run, "list", "--url", server.url], capture_output=True, text=True).stdout
    woken = subprocess.run([*run, "wake", "third", "--url", server.url], capture_output=True, text=True, timeout=300)
    assert woken.stdout.startswith("third: awake after"), woken.stderr
    assert "Paris" in server.ask(model="third").json()["choices"][0]["message"]["content"]
    assert server.processes("engine", "third") == engines, "it is the same process"


def test_a_model_that_takes_turns_is_not_for_hands(server: Server) -> None:
    refused = httpx.post(f"{server.url}/v1/admin/models/first/sleep")
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "time_sliced"
    assert httpx.post(f"{server.url}/v1/admin/models/nobody/wake").status_code == 404
