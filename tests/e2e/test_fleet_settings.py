"""Pools in a fleet, and settings that change while it runs (R-OPS-4, R-RT-11): `penstock serve`, machines that join it,
and a real Valkey. Replicas are replaced under streams, of which none is lost."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cli.command import penstock
from tests.e2e.test_fleet_machines import FleetOfProcesses, fleet, streams
from tests.services import valkey

__all__ = ["valkey"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

POOLS = (
    "pools: [{name: chat, replicas: 2}, {name: batch, replicas: 1, max_running: 4}], "
    "pool_rules: [{pool: batch, classes: [batch]}, {pool: chat}]"
)


def engines(running: FleetOfProcesses) -> list[dict[str, Any]]:
    return [one for one in running.state()["engines"] if one["state"] == "ready"]


def edit(running: FleetOfProcesses, old: str, new: str) -> None:
    text = running.config.read_text()
    assert old in text
    running.config.write_text(text.replace(old, new))


def pool_of(running: FleetOfProcesses, **headers: str) -> str:
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 4}
    answer = httpx.post(f"{running.url}/v1/completions", json=body, headers=headers, timeout=300)
    assert answer.status_code == 200, answer.text
    return answer.headers["x-penstock-pool"]


def test_pools_of_a_fleet_and_settings_that_change_under_streams(tmp_path: Path, valkey: Any) -> None:
    with fleet(tmp_path, valkey, POOLS) as running:
        running.wait_for(lambda: sorted(one["pool"] for one in engines(running)) == ["batch", "chat", "chat"])
        assert pool_of(running) == "chat" and pool_of(running, **{"x-priority": "batch"}) == "batch"
        grown = penstock("scale", "tiny", "2", "--pool", "batch", "--url", running.url)
        assert grown.returncode == 0, grown.stderr
        assert sorted(one["pool"] for one in engines(running)) == ["batch", "batch", "chat", "chat"]

        # Another setting of one pool: its replicas are replaced, those of the other stay.
        quiet = asyncio.run(streams(running.url, None))
        before = {one["id"]: one["pool"] for one in engines(running)}
        edit(running, "{name: chat, replicas: 2}", "{name: chat, replicas: 2, max_running: 48}")
        said: list[str] = []

        def change() -> None:
            said.append(penstock("fleet", "apply", "--wait", "-c", str(running.config)).stderr)

        changer = threading.Thread(target=change)
        heard = asyncio.run(streams(running.url, changer.start))
        while changer.is_alive():
            heard += asyncio.run(streams(running.url, None, 4))
        changer.join()
        assert said == [""], said
        assert all(one.done and one.usage is not None for one in heard), "every stream ended whole"
        assert [one.texts for one in heard[: len(quiet)]] == [one.texts for one in quiet], "token for token"
        after = {one["id"]: one["pool"] for one in engines(running)}
        assert {id for id, pool in before.items() if pool == "batch"} <= after.keys()
        running.wait_for(lambda: not running.state()["models"][0]["rollout"])
        replicas = httpx.get(f"{running.url}/v1/admin/replicas", timeout=180).json()["data"]
        chat = [one for one in replicas if one["pool"] == "chat" and one["ready"]]
        assert {one["memory"]["sequences"] for one in chat} == {48}, replicas

        # What only gateways read reaches them too, and no engine is touched.
        edit(running, "name: tiny,", "name: tiny, aliases: [small],")
        applied = penstock("fleet", "apply", "--wait", "-c", str(running.config))
        assert applied.returncode == 0, applied.stderr
        running.wait_for(lambda: "small" in json.dumps(httpx.get(f"{running.url}/v1/models", timeout=180).json()))
        assert {one["id"] for one in engines(running)} == after.keys()

        # Settings that no engine can start with: the old replicas go on, and it is said why.
        edit(running, "max_running: 48", "max_running: 48, kv_memory: 900000GiB")
        refused = penstock("fleet", "apply", "--wait", "-c", str(running.config))
        assert refused.returncode != 0 and "cannot start them" in refused.stderr, (refused.stdout, refused.stderr)
        heard = asyncio.run(streams(running.url, None))
        assert all(one.done for one in heard)
