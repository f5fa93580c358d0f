"""Engines of encoders register in a fleet and gateways follow them (R-OPS-3): `penstock engine` twice, a gateway that
names neither, a real Valkey. One engine is killed under requests."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.protocol import fleet_secret
from tests.ports import free_port
from tests.services import valkey

__all__ = ["valkey"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def wait_for(condition: Callable[[], bool], within: float = 120.0) -> None:
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_encoders_of_a_fleet(tmp_path: Path, valkey: Any) -> None:
    fleet_secret.write(tmp_path / "fleet.secret")
    first = 20_000 + free_port() % 10_000
    config = tmp_path / "penstock.yaml"
    config.write_text(
        "encoders: [{source: minilm, aliases: [embed], threads: 1, wait_s: 20}]\n"
        f"store: {{url: 'sqlite:///{tmp_path / 'ledger.db'}'}}\n"
        f"fleet: {{url: 'redis://127.0.0.1:{valkey.port}', secret_file: {tmp_path / 'fleet.secret'}, lease_s: 3, "
        f"ports: {first}-{first + 9}}}\n"
    )
    bare = tmp_path / "gateway.yaml"
    bare.write_text(
        config.read_text().replace(
            "encoders: [{source: minilm, aliases: [embed], threads: 1, wait_s: 20}]", "encoders: []"
        )
    )
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    processes: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str) -> subprocess.Popen[bytes]:
        with (tmp_path / f"{len(processes)}.log").open("wb") as log:
            command = [sys.executable, "-m", "penstock", *arguments]
            processes.append(
                subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
            )
        return processes[-1]

    def embed(index: int = 0, model: str = "minilm") -> httpx.Response:
        body = {"model": model, "input": [f"text {index}", "another"]}
        return httpx.post(f"{url}/v1/embeddings", json=body, timeout=180)

    def answers() -> bool:
        try:
            return embed().status_code == 200
        except httpx.HTTPError:
            return False

    try:
        start("gateway", "-c", str(bare), "--port", str(port))
        engines = [start("engine", "minilm", "-c", str(config), "--set", f"fleet.machine={name}") for name in "ab"]
        wait_for(answers)
        listed = httpx.get(f"{url}/v1/models", timeout=180).json()["data"]
        assert "minilm" in [one["id"] for one in listed]
        assert embed(model="embed").status_code == 200, "its alias is known from its description"
        wait_for(lambda: len(httpx.get(f"{url}/v1/admin/fleet", timeout=180).json()["engines"]) == 2)
        expected = embed(7).json()["data"]
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(embed, 7) for _ in range(40)]
            engines[0].kill()
            found = [one.result() for one in asked]
        assert [one.status_code for one in found] == [200] * 40, [
            one.text[:300] for one in found if one.status_code != 200
        ]
        assert all(one.json()["data"] == expected for one in found), "the same vectors from either engine"
        wait_for(lambda: len(httpx.get(f"{url}/v1/admin/fleet", timeout=180).json()["engines"]) == 1)
        assert embed().status_code == 200
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
