"""The server of examples/pools.yaml: requests find their pools, a pool that dies loses none, and a pool is scaled."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cli.command import penstock
from tests.e2e.test_supervisor import Server
from tests.engine_host.client import eventually

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "pools.yaml"
SMALL = {"models.0.kv_memory": "64MiB", "models.0.threads": "1", "models.0.deterministic": "true", "encoders": "[]"}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_example_with_pools(default_model: Path, tmp_path: Path) -> None:
    settings = {**SMALL, "models.0.source": str(default_model), "models.0.name": "m"}
    settings |= {"store.url": f"sqlite:///{tmp_path / 'state.db'}", "resilience.resume_s": "300"}
    flags = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    server = Server("-c", str(EXAMPLE), *flags, defaults=False)

    def ask(prompt: str = "Once upon a time", tokens: int = 4, **headers: str) -> httpx.Response:
        body: dict[str, Any] = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        body |= {"ignore_eos": True}
        return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=300)

    def replicas() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = httpx.get(f"{server.url}/v1/admin/replicas", timeout=180).json()["data"]
        return found

    try:
        server.wait_for("curl http")
        assert eventually(
            lambda: [one["pool"] for one in replicas() if one["ready"]] == ["interactive", "batch", "long"], 120
        )
        assert ask().headers["x-penstock-pool"] == "interactive"
        assert ask(**{"x-priority": "batch"}).headers["x-penstock-pool"] == "batch"
        assert ask("word " * 600).headers["x-penstock-pool"] == "long"
        expected = ask(tokens=300).json()["choices"][0]["text"]
        listed = penstock("replicas", "--url", server.url).stdout
        assert "interactive" in listed and "batch" in listed

        # The interactive pool dies under streams; they end in the pool that their rule lets them spill over to.
        with ThreadPoolExecutor(4) as pool:
            streams = [pool.submit(ask, tokens=300) for _ in range(4)]
            assert eventually(lambda: replicas()[0]["running"] > 0, 60)
            (engine,) = server.processes("engine", "--pool", "interactive")
            os.kill(engine, signal.SIGKILL)
            assert [stream.result().json()["choices"][0]["text"] for stream in streams] == [expected] * 4

        done = penstock("scale", "m", "2", "--pool", "batch", "--url", server.url)
        assert "done after" in done.stdout
        assert sorted(one["pool"] for one in replicas()) == ["batch", "batch", "interactive", "long"]
        refused = penstock("scale", "m", "2", "--url", server.url)
        assert refused.returncode != 0 and "interactive, batch, long" in refused.stderr
    finally:
        server.close()
