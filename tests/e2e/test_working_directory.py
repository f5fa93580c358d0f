"""`penstock serve` where the working directory holds modules with the names of libraries: none of them is run."""

import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from penstock.fleet.drills.model import write_model
from tests.e2e.conftest import Server
from tests.ports import free_port
from tests.test_interpreter import environment, imported, stray_modules

pytestmark = pytest.mark.slow
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}


def test_gateway_engine_and_sandbox_ignore_stray_modules(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    folder = tmp_path / "here"
    folder.mkdir()
    stray_modules(folder)
    port = free_port()
    command = [sys.executable, "-m", "penstock", "serve", str(tmp_path / "model"), "--port", str(port)]
    log = tmp_path / "log"
    with log.open("wb") as output:
        state = environment(PENSTOCK_STATE=str(tmp_path / "state"))
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output, env=state)
    try:
        server = Server(f"http://127.0.0.1:{port}", process.pid)
        server.wait_until_ready(120)
        model = httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]
        shape = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
        body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json={**body, "response_format": shape}, timeout=180)
        assert answer.status_code == 200, answer.text
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()[-3000:]
    assert imported(folder) == []
