"""`model: auto` through the API: the header says who answered and why; an operator can turn it off."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config.routing import RouteConfig
from penstock.errors import ConfigError
from tests.gateway.conftest import Serving

ROUTE = RouteConfig(name="auto", small="tiny", large="small")  # `small` is an alias of the same model
HARD = [{"role": "user", "content": "Prove step by step that there is no largest prime, and write a Python function."}]


async def test_a_route_answers_says_why_and_can_be_switched_off(serving: Serving, tmp_path: Path) -> None:
    async with serving(routes=(ROUTE,), store_url=f"sqlite:///{tmp_path}/store.db") as gateway:
        listed = {model["id"]: model for model in (await gateway.client.get("/v1/models")).json()["data"]}
        assert listed["auto"]["routes_to"] == ["tiny", "small"] and listed["auto"]["capabilities"]["chat"]
        assert (await gateway.client.get("/v1/models/auto")).json()["id"] == "auto"
        hard = await gateway.chat(model="auto", messages=HARD)
        assert hard.status_code == 200 and hard.headers["x-penstock-model"] == "tiny"
        assert hard.headers["x-penstock-route"].startswith("auto; rule=score; score=0.")
        assert "rule=unknown" in (await gateway.chat(model="auto")).headers["x-penstock-route"]
        completed = await gateway.complete(model="auto", prompt="Debug this SQL query and refactor the function.")
        assert "reasons=code" in completed.headers["x-penstock-route"]

        switched = await gateway.client.patch("/v1/admin/routes/auto", json={"enabled": False})
        assert switched.status_code == 200 and switched.json()["enabled"] is False
        assert "rule=off" in (await gateway.chat(model="auto", messages=HARD)).headers["x-penstock-route"]
        assert (await gateway.client.get("/v1/admin/routes")).json()["data"][0]["enabled"] is False
        for path, body in (("auto", {}), ("auto", {"share": 2}), ("auto", {"x": 1})):
            assert (await gateway.client.patch(f"/v1/admin/routes/{path}", json=body)).status_code == 400, body
        assert (await gateway.client.patch("/v1/admin/routes/none", json={"enabled": True})).status_code == 404
        decided = 'penstock_route_decisions_total{route="auto",model_name="tiny",rule="unknown"}'
        assert await gateway.metric(decided) == 1

    # The switch outlives the process.
    async with serving(routes=(ROUTE,), store_url=f"sqlite:///{tmp_path}/store.db") as gateway:
        assert "rule=off" in (await gateway.chat(model="auto", messages=HARD)).headers["x-penstock-route"]


@pytest.mark.parametrize(
    ("route", "problem"),
    [
        (RouteConfig(name="tiny", small="tiny", large="small"), "already the name"),
        (RouteConfig(name="auto", small="tiny", large="huge"), "no model is called that"),
    ],
)
async def test_a_route_that_leads_nowhere_is_refused_at_start(
    serving: Serving, route: RouteConfig, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        async with serving(routes=(route,)):
            pass
