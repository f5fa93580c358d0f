"""`penstock serve` with roles: prompts are computed by one engine process and answered by another (R-ENG-11)."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.text.byte_tokenizer import write_tokenizer
from tests.e2e.conftest import Server
from tests.e2e.test_parallel import ranks
from tests.engine.harness import generate, greedy, make_engine
from tests.engine.tiny import write_checkpoint
from tests.engine_host.client import eventually
from tests.ports import free_port

pytestmark = pytest.mark.slow


@pytest.fixture
def server(default_model: Path, tmp_path: Path) -> Iterator[Server]:
    with serving(default_model, tmp_path, ", deterministic: true") as running:
        yield running


@contextmanager
def serving(model: Path, folder: Path, more: str = "") -> Iterator[Server]:
    port = free_port()
    (folder / "penstock.yaml").write_text(
        f"models: [{{name: small, source: {model}, replicas: 2, replica_roles: [prefill, decode], "
        f"handover_tokens: 128, max_model_len: 2048, threads: 1, token_budget: 64{more}}}]\n"
        f"server: {{port: {port}, drain_s: 5, engine_wait_s: 180}}\ngeneration: {{time_limit_s: null}}\nencoders: []\n"
        "resilience: {resume_s: 180}\n"
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
    assert eventually(lambda: server.metric("penstock_handovers_total") == 1, 60)
    replicas = httpx.get(f"{server.url}/v1/admin/replicas").json()["data"]
    assert {entry["replica"]: entry["role"] for entry in replicas} == {"0": "prefill", "1": "decode"}

    (prefill,) = [pid for pid in server.children("engine") if "prefill" in _command(pid)]
    answers: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: answers.append(ask(server, story(2))))
    thread.start()
    assert eventually(lambda: server.metric("penstock_handover_waiting") == 1, 30)
    os.kill(prefill, signal.SIGKILL)
    thread.join(300)
    assert eventually(lambda: server.metric("penstock_handover_fallbacks_total") == 1, 60)

    # The supervisor has started it again, and it is used again; its answers are those of the engine alone.
    assert eventually(lambda: server.metric("penstock_engine_up") == 2, 120)
    ask(server, story(3))
    assert eventually(lambda: server.metric("penstock_handovers_total") == 2, 30)
    assert answers[0]["choices"][0]["text"] == ask(server, story(2))["choices"][0]["text"]


def test_a_rank_that_dies_on_either_side_of_a_handover_loses_nothing(default_model: Path, tmp_path: Path) -> None:
    """Both replicas on three ranks, and host memory behind them."""
    more = ", deterministic: true, tensor_parallel: 3, host_memory: 64MiB, watchdog_s: 120"
    with serving(default_model, tmp_path, more) as server:
        expected = ask(server, story(1))["choices"][0]["text"]
        assert eventually(lambda: server.metric("penstock_handovers_total") == 1, 60)
        assert server.metric("penstock_handover_blocks_received_total") > 10
        for number, role in ((2, "prefill"), (3, "decode")):
            (engine,) = [pid for pid in server.children("engine") if role in _command(pid)]
            replies: list[dict[str, Any]] = []
            thread = threading.Thread(target=lambda n, to: to.append(ask(server, story(n))), args=(number, replies))
            thread.start()
            assert eventually(lambda: server.metric("penstock_handover_waiting") == 1, 60)
            os.kill(ranks(engine)[0], signal.SIGKILL)
            thread.join(300)
            assert len(replies) == 1 and replies[0]["usage"]["completion_tokens"] == 12
            assert eventually(lambda: server.metric("penstock_engine_up") == 2, 180)
            assert replies[0]["choices"][0]["text"] == ask(server, story(number))["choices"][0]["text"]
        assert ask(server, story(1))["choices"][0]["text"] == expected


def test_replicas_of_different_grids_hand_over(default_model: Path, tmp_path: Path) -> None:
    with serving(default_model, tmp_path, ", replica_grids: [3x1, 1x2], watchdog_s: 120") as server:
        found = ask(server, story(1))["choices"][0]["text"]
        assert eventually(lambda: server.metric("penstock_handovers_total") == 1, 60)
        assert server.metric("penstock_handover_blocks_received_total") > 10
        lines = {len(ranks(pid)): _command(pid) for pid in server.children("engine")}
        assert "prefill" in lines[2] and "decode" in lines[1]
        assert ask(server, story(1))["choices"][0]["text"] == found


def test_the_state_of_recurrent_layers_goes_with_the_blocks(tmp_path: Path) -> None:
    """Pools of a model with delta nets, on different grids; the answers are those of an engine alone."""
    (tmp_path / "text").mkdir()
    tokens = write_tokenizer(tmp_path / "text")
    sizes = {"vocab_size": tokens.get_vocab_size(), "max_position_embeddings": 4096}
    folder = write_checkpoint("qwen3-next", tmp_path / "hybrid", spread=0.3, **sizes)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tmp_path / "text" / name, folder / name)
    with serving(folder, tmp_path, ", dtype: float32, replica_grids: [1x1, 2x1], watchdog_s: 120") as server:
        answers = [ask(server, story(number)) for number in (1, 2)]
        assert eventually(lambda: server.metric("penstock_handovers_total") == 2, 30)
        assert server.metric("penstock_handover_fallbacks_total") == 0
        assert ask(server, story(1))["choices"] == answers[0]["choices"]
    alone = make_engine(folder, max_model_len=2048)
    for number, answer in zip((1, 2), answers, strict=True):
        prompt = tokens.encode(story(number)).ids
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        expected = generate(alone, greedy("r", prompt, 12))["r"]
        assert answer["choices"][0]["text"] == tokens.decode(expected)


def test_shards_with_sequences_of_their_own_hand_over_and_outlive_a_restart(tmp_path: Path) -> None:
    """Both replicas attend by sequences (`attention_parallel: data`), with host memory and a disk that keeps blocks."""
    (tmp_path / "text").mkdir()
    tokens = write_tokenizer(tmp_path / "text")
    sizes = {"vocab_size": tokens.get_vocab_size(), "max_position_embeddings": 4096}
    folder = write_checkpoint("qwen3-moe", tmp_path / "experts", spread=0.3, **sizes)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tmp_path / "text" / name, folder / name)
    spread = "tensor_parallel: 2, expert_parallel: true, attention_parallel: data, dtype: float32, watchdog_s: 120"
    tiers = f"host_memory: 64MiB, disk_memory: 64MiB, disk_path: {tmp_path / 'disk'}, disk_persistent: true"
    numbers = range(1, 5)
    with serving(folder, tmp_path, f", {spread}, {tiers}") as server:
        answers: dict[int, dict[str, Any]] = {}
        threads = [
            threading.Thread(target=lambda n: answers.update({n: ask(server, story(n))}), args=(n,)) for n in numbers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        assert eventually(lambda: server.metric("penstock_handovers_total") == len(numbers), 30)
        assert server.metric("penstock_handover_fallbacks_total") == 0
        (engine,) = [pid for pid in server.children("engine") if "decode" in _command(pid)]
        os.kill(ranks(engine)[0], signal.SIGKILL)  # the replica starts again, with what is on its disk
        assert ask(server, story(1))["choices"] == answers[1]["choices"]
    with serving(folder, tmp_path, f", {spread}, {tiers}") as server:
        for number in numbers:
            again = ask(server, story(number))
            assert again["choices"] == answers[number]["choices"]
            assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 500
    alone = make_engine(folder, max_model_len=2048)
    for number, answer in answers.items():
        expected = generate(alone, greedy("r", tokens.encode(story(number)).ids, 12))["r"]
        assert answer["choices"][0]["text"] == tokens.decode(expected)


def _command(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
