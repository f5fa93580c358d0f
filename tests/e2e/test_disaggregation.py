"""`penstock serve` with roles: prompts are computed by one engine process and answered by another (R-ENG-11)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Server, free_port
from tests.engine_host.client import eventually

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder, port = tmp_path_factory.mktemp("roles"), free_port()
    (folder / "penstock.yaml").write_text(
        f"models: [{{name: small, source: {default_model}, replicas: 2, replica_roles: [prefill, decode], "
        "handover_tokens: 128, max_model_len: 2048, threads: 1, token_budget: 64}]\n"
        f"server: {{port: {port}, drain_s: 5}}\ngeneration: {{time_limit_s: null}}\nencoders: []\n"
    )
    command = [sys.executable, "-m", "penstock", "serve", "-c", str(folder / "penstock.yaml")]
    process = subprocess.Popen(command)
    running = Server(f"http://127.0.0.1:{port}", process.pid)
    try:
        running.wait_until_ready(180)
        assert eventually(lambda: running.metric("penstock_engine_up") == 2, 60)
        yield running
    finally:
        process.terminate()
        process.wait(60)


def ask(server: Server, question: str) -> dict[str, Any]:
    body = {"model": "small", "prompt": question, "max_tokens": 12, "temperature": 0}
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def story(number: int) -> str:
    return f"Story {number}: " + " ".join(f"In chapter {i} the fox met {i * number} hens." for i in range(40))


def test_an_answer_survives_whatever_becomes_of_the_engine_that_computes_its_prompt(server: Server) -> None:
    handed = ask(server, story(1))
    assert handed["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert eventually(lambda: server.metric("penstock_handovers_total") == 1, 10)
    replicas = httpx.get(f"{server.url}/v1/admin/replicas").json()["data"]
    assert {entry["replica"]: entry["role"] for entry in replicas} == {"0": "prefill", "1": "decode"}

    (prefill,) = [pid for pid in server.children("engine") if "prefill" in _command(pid)]
    answers: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: answers.append(ask(server, story(2))))
    thread.start()
    assert eventually(lambda: server.metric("penstock_handover_waiting") == 1, 30)
    os.kill(prefill, signal.SIGKILL)
    thread.join(300)
    assert eventually(lambda: server.metric("penstock_handover_fallbacks_total") == 1, 10)

    # The supervisor has started it again, and it is used again; its answers are those of the engine alone.
    assert eventually(lambda: server.metric("penstock_engine_up") == 2, 120)
    ask(server, story(3))
    assert eventually(lambda: server.metric("penstock_handovers_total") == 2, 30)
    assert answers[0]["choices"][0]["text"] == ask(server, story(2))["choices"][0]["text"]


def _command(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
