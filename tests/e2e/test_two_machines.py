"""A gateway and an engine that share nothing but an encrypted TCP connection, as on two machines."""

import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.cli.command import penstock
from tests.engine_host.client import eventually
from tests.ports import free_port


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "penstock", *arguments]


def new_key(file: Path) -> str:
    return penstock("engine", "--make-curve-key", str(file)).stdout.strip()


@pytest.mark.slow
def test_a_gateway_reaches_its_engine_over_curve_and_a_stranger_does_not(default_model: Path, tmp_path: Path) -> None:
    engine_public = new_key(tmp_path / "engine.key")
    (tmp_path / "clients.txt").write_text(new_key(tmp_path / "gateway.key") + "\n")
    (tmp_path / "engines.txt").write_text(f"tiny {engine_public}\n")
    new_key(tmp_path / "stranger.key")
    (tmp_path / "penstock.yaml").write_text(
        f"models: [{{name: tiny, source: {default_model}, kv_memory: 32MiB, max_model_len: 512, max_running: 4}}]\n"
        "server: {engine_wait_s: 1}\n"
    )
    endpoint, ports = f"tcp://127.0.0.1:{free_port()}", [free_port(), free_port()]
    config = ["-c", str(tmp_path / "penstock.yaml")]
    engine = command("engine", "tiny", *config, "-e", endpoint, "--curve-key", str(tmp_path / "engine.key"))
    commands = [[*engine, "--curve-clients", str(tmp_path / "clients.txt")]]
    for port, key in zip(ports, ("gateway.key", "stranger.key"), strict=True):
        keys = ["--curve-key", str(tmp_path / key), "--curve-engines", str(tmp_path / "engines.txt")]
        commands.append(command("gateway", "-e", f"tiny={endpoint}", *config, "--port", str(port), *keys))
    processes = [subprocess.Popen(arguments) for arguments in commands]
    try:
        friend, stranger = (f"http://127.0.0.1:{port}" for port in ports)
        assert eventually(lambda: _status(f"{friend}/health/ready") == 200, 200)
        body = {"model": "tiny", "prompt": "Hello", "max_tokens": 3}
        assert httpx.post(f"{friend}/v1/completions", json=body, timeout=180).status_code == 200
        assert eventually(lambda: _status(f"{stranger}/health/live") != 0, 30)
        assert httpx.post(f"{stranger}/v1/completions", json=body, timeout=180).status_code == 503
        for process in processes:
            process.terminate()
        assert [process.wait(30) for process in processes] == [0, 0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _status(url: str) -> int:
    try:
        return httpx.get(url, timeout=180).status_code
    except httpx.HTTPError:
        return 0
