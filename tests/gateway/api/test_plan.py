"""/v1/admin/plan over real HTTP: what a running server can still take, and what another load would need."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.config.autoscale import AutoscaleConfig
from penstock.gateway.workers.group import SingleWorker
from penstock.planning.capacity import Slo
from penstock.planning.catalogue import load_catalogue
from penstock.planning.model_shape import known_config, model_shape
from penstock.planning.plan import make_plan
from penstock.planning.workload import CURVES, Workload
from penstock.telemetry.load_history import FAMILIES
from penstock.text import TextModel
from tests.gateway.conftest import Running, Serving, eventually
from tests.scripted import ScriptedEngine


class Minutes:
    """Time as the history of a gateway sees it."""

    def __init__(self, gateway: Running) -> None:
        assert isinstance(gateway.parts.workers, SingleWorker)
        self._history, self._registry = gateway.parts.workers.history, gateway.parts.metrics.registry
        self._now = time.time()
        self._history.record(self._now, self._registry.readings(FAMILIES))

    def add(self) -> None:
        """A minute has passed since the last call."""
        self._now += 60
        self._history.record(self._now, self._registry.readings(FAMILIES))


async def plan(gateway: Running, query: str = "") -> dict[str, Any]:
    reply = await gateway.client.get(f"/v1/admin/plan{query}")
    assert reply.status_code == 200, reply.text
    (found,) = reply.json()["data"]
    assert isinstance(found, dict)
    return found


async def test_load_becomes_headroom_cost_and_a_chart(serving: Serving, text: TextModel) -> None:
    engine = ScriptedEngine(text, "x" * 40, step_s=0.001)
    async with serving(engine, served={"cost_per_hour": 3.6}) as gateway:
        idle = await plan(gateway)
        assert idle["headroom"] is None and idle["cost"]["per_hour"] == 3.6
        assert idle["full"]["outlook"] in ("unknown", "not_growing")
        minutes = Minutes(gateway)
        for _ in range(3):
            assert (await gateway.chat()).status_code == 200
        await eventually(lambda: gateway.parts.registry.route("tiny").model.backend.load.generation_tokens >= 123)
        minutes.add()
        found = await plan(gateway)
        headroom = found["headroom"]
        arrived = sum(point["requests"] * point["seconds"] for point in found["history"])
        assert arrived == pytest.approx(3, rel=0.001)
        assert headroom["output_tokens"] / headroom["requests"] == pytest.approx(41, rel=0.001)
        assert headroom["capacity_output_tokens"]["likely"] > headroom["output_tokens"]
        assert 0 < headroom["utilisation"] < 1
        assert headroom["capacity_requests"]["likely"] == pytest.approx(
            headroom["capacity_output_tokens"]["likely"] / 41, rel=0.01
        )
        assert found["mix"]["output_tokens"] == pytest.approx(41, rel=0.01)
        each = 3.6 / 3600 / headroom["output_tokens"] * 1e6
        assert found["cost"]["per_million_output_tokens"] == pytest.approx(each, rel=0.001)
        assert found["price_source"] == "configuration" and found["next_replica"]["per_hour"] == 3.6
        assert found["history"][-1]["capacity_requests"] > 0
        assert found["autoscaler"]["enabled"] is False and found["autoscaler"]["replicas"] == 1


async def test_a_model_by_name_alias_and_a_wrong_one(serving: Serving) -> None:
    async with serving() as gateway:
        assert (await plan(gateway, "?model=small"))["id"] == "tiny"
        wrong = await gateway.client.get("/v1/admin/plan?model=large")
        assert wrong.status_code == 404 and "large" in wrong.json()["error"]["message"]
        assert (await gateway.client.get("/v1/admin/plan?days=3")).status_code == 400


async def test_automatic_scaling_is_shown_with_its_limits(serving: Serving) -> None:
    async with serving(served={"autoscale": AutoscaleConfig(min=2, max=3)}) as gateway:
        minutes = Minutes(gateway)
        minutes.add()
        shown = (await plan(gateway))["autoscaler"]
        assert (shown["enabled"], shown["min"], shown["max"], shown["replicas"]) == (True, 2, 3, 2)
        assert shown["reason"] == "minimum" and "minimum is 2" in shown["detail"]


async def test_only_administrators_see_it(serving: Serving, tmp_path: Path) -> None:
    async with serving(store_url=f"sqlite:///{tmp_path}/store.db") as gateway:
        client = gateway.client
        assert (await client.post("/v1/admin/tenants", json={"id": "acme"})).status_code == 200
        made = await client.post("/v1/admin/keys", json={"tenant": "acme", "scopes": ["inference"]})
        key = {"authorization": f"Bearer {made.json()['key']}"}
        assert (await client.get("/v1/admin/plan", headers=key)).status_code == 403
        assert (await client.get("/v1/admin/plan")).status_code == 401


LOAD = {"users": 100_000, "requests_per_user": 10, "input_tokens": 2000, "output_tokens": 500}


async def test_what_if_answers_as_the_planner_does(serving: Serving) -> None:
    async with serving() as gateway:
        reply = await gateway.client.post(
            "/v1/admin/plan", json={**LOAD, "model": "llama-3-8b", "devices": ["H100"], "curve": "flat"}
        )
        assert reply.status_code == 200, reply.text
        found = reply.json()
        workload = Workload(100_000, 10, 2000, 500, curve=CURVES["flat"])
        device, slo = load_catalogue().device("h100"), Slo(0.5, 0.05)
        own = make_plan(model_shape("llama-3-8b"), [device], workload, slo)
        assert own.best is not None
        assert found["best"]["deployment"] == own.best.label
        assert found["best"]["monthly"] == pytest.approx(own.best.monthly)
        assert found["workload"]["average"]["requests_per_s"] == pytest.approx(1e6 / 86400)
        assert found["assumptions"]


async def test_what_if_takes_a_served_model_by_its_files(serving: Serving, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(known_config("llama-3-8b")))
    async with serving(served={"source": str(tmp_path)}) as gateway:
        for name in ("", "tiny", "small"):
            reply = await gateway.client.post("/v1/admin/plan", json={**LOAD, "model": name, "devices": ["h200"]})
            assert reply.status_code == 200, reply.text
            assert reply.json()["model"]["name"] == (name or "tiny")
            assert reply.json()["model"]["parameters"] == model_shape("llama-3-8b").parameters


BAD: list[tuple[dict[str, Any], str]] = [
    ({"model": "lama-3-8b"}, "the nearest are llama-3"),
    ({"model": "/etc/passwd"}, "unknown model"),
    ({"model": "hf:acme/secret"}, "unknown model"),
    ({"devices": ["h1000"]}, "h100"),
    ({"devices": ["h100"] * 17}, "devices"),
    ({"users": -1}, "users"),
    ({"users": 0}, "users"),
    ({"users": 0.01}, "at least one request a day"),
    ({"utilisation": 0}, "utilisation"),
    ({"input_tokens": 1e7}, "do not fit the context"),
    ({"peak_factor": 1.0}, "peak factor"),
    ({"curve": "weekend"}, "curve"),
    ({"gpu": "h100"}, "gpu"),
]


async def test_what_if_says_what_would_do(serving: Serving) -> None:
    async with serving() as gateway:
        for change, says in BAD:
            body = {**LOAD, "model": "llama-3-8b", "devices": ["h100"], **change}
            reply = await gateway.client.post("/v1/admin/plan", json=body)
            assert reply.status_code == 400, (change, reply.text)
            assert says in reply.json()["error"]["message"], (change, reply.text)


async def test_a_plan_without_a_solution_is_an_answer_with_a_reason(serving: Serving) -> None:
    async with serving() as gateway:
        body = {**LOAD, "model": "llama-3-8b", "devices": ["h100"], "ttft_ms": 0.001}
        found = (await gateway.client.post("/v1/admin/plan", json=body)).json()
        assert found["best"] is None and found["candidates"] == [] and "h100" in found["why_none"]
