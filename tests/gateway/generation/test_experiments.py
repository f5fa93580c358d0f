"""R-RT-10 through the API: splits, sticky arms, figures per arm, promote and roll back, by hand and by itself."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from penstock.config.experiments import ExperimentConfig
from penstock.config.routing import RouteConfig
from penstock.config.schema import PriceConfig
from penstock.engine.request import Delta
from penstock.errors import ConfigError
from penstock.gateway.generation import experiment_keeper
from penstock.routing.registry import ServedModel
from penstock.testing.in_process_backend import InProcessBackend
from penstock.text import TextModel
from tests.gateway.conftest import Running, Serving
from tests.scripted import ScriptedEngine

PRICES = (
    PriceConfig(model="tiny", input_price=1.0, output_price=2.0),
    PriceConfig(model="v2", input_price=4.0, output_price=8.0),
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment_keeper, "FRESH_S", 0.05)


def other(text: TextModel, name: str = "v2", script: Any = "Other words.") -> ServedModel:
    return ServedModel(name, text, InProcessBackend(ScriptedEngine(text, script)))


def split(share: float = 0.5, **more: Any) -> ExperimentConfig:
    """Times are not compared: a busy machine may well be slower with one arm."""
    base = {"name": "assistant", "control": "tiny", "canary": {"v2": share}, "worse_ttft": None}
    return ExperimentConfig(**{**base, **more})


def arm_of(reply: Any) -> str:
    return str(reply.headers["x-penstock-experiment"]).partition("; arm=")[2]


async def arms(gateway: Running, name: str = "assistant") -> dict[str, Any]:
    reply = await gateway.client.get(f"/v1/admin/experiments/{name}")
    assert reply.status_code == 200, reply.text
    return {arm["arm"]: arm for arm in reply.json()["arms"]}


async def test_requests_are_split_by_user_and_every_reply_says_which_arm(
    serving: Serving, text: TextModel, tmp_path: Path
) -> None:
    store = f"sqlite:///{tmp_path}/store.db"
    async with serving(more=[other(text)], experiments=(split(0.3),), store_url=store, prices=PRICES) as gateway:
        seen = {}
        for user in range(40):
            first = await gateway.chat(model="assistant", user=f"u{user}")
            again = await gateway.chat(model="assistant", user=f"u{user}", messages=[{"role": "user", "content": "?"}])
            assert first.status_code == 200 and arm_of(first) == arm_of(again)
            seen[user] = arm_of(first)
            model = {"control": "tiny", "v2": "v2"}[arm_of(first)]
            assert first.headers["x-penstock-model"] == model
            assert first.headers["x-penstock-route"] == f"assistant; arm={arm_of(first)}"
            said = first.json()["choices"][0]["message"]["content"]
            assert said == {"tiny": "Hello, world!", "v2": "Other words."}[model]
        counted = Counter(seen.values())
        assert 4 <= counted["v2"] <= 22

        # Growing keeps everybody who is in the canary.
        grown = await gateway.client.post("/v1/admin/experiments/assistant/promote", json={"to": 0.6})
        assert grown.status_code == 200 and grown.json()["stage"] == 2
        later = {user: arm_of(await gateway.chat(model="assistant", user=f"u{user}")) for user in seen}
        assert all(later[user] == "v2" for user, arm in seen.items() if arm == "v2")
        assert Counter(later.values())["v2"] > counted["v2"]

        shown = await arms(gateway)
        assert shown["v2"]["share"] == 0.6 and shown["control"]["share"] == pytest.approx(0.4)
        assert shown["v2"]["requests"] + shown["control"]["requests"] == 40  # of this stage
        for arm in shown.values():
            assert arm["errors"]["mean"] == 0 and arm["errors"]["high"] < 1 and arm["ttft"]["mean"] > 0
        # v2 costs four times as much for fewer words.
        assert shown["v2"]["cost"]["mean"] > 3 * shown["control"]["cost"]["mean"]
        line = 'penstock_experiment_requests_total{experiment="assistant",arm="v2",outcome="answered"}'
        assert await gateway.metric(line) == 2 * counted["v2"] + Counter(later.values())["v2"]
        assert await gateway.metric('penstock_experiment_share{experiment="assistant",arm="v2"}') == 0.6

    # The shares outlive the process, though the configuration says 30%.
    async with serving(more=[other(text)], experiments=(split(0.3),), store_url=store) as gateway:
        assert (await arms(gateway))["v2"]["share"] == 0.6
        assert {user: arm_of(await gateway.chat(model="assistant", user=f"u{user}")) for user in seen} == later
        back = await gateway.client.post("/v1/admin/experiments/assistant/rollback", json={"why": "not today"})
        assert back.status_code == 200 and back.json()["status"] == "rolled back"
        assert {arm_of(await gateway.chat(model="assistant", user=f"u{user}")) for user in seen} == {"control"}
        assert (await arms(gateway))["v2"]["rolled_back"] == "not today"
        events = (await gateway.client.get("/v1/admin/experiments/assistant")).json()["events"]
        assert [event["what"] for event in events] == ["v2 rolled back", "v2 gets 60%", "v2 30%"]

    # Another share in the configuration begins anew, with the same users first.
    async with serving(more=[other(text)], experiments=(split(0.35),), store_url=store) as gateway:
        now = {user: arm_of(await gateway.chat(model="assistant", user=f"u{user}")) for user in seen}
        assert all(now[user] == "v2" for user, arm in seen.items() if arm == "v2")


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("assistant/promote", {"to": 1.2}, 400),
        ("assistant/promote", {"to": -1}, 400),
        ("assistant/promote", {"to": "5%"}, 400),
        ("assistant/promote", {"arm": "tiny"}, 400),
        ("assistant/promote", {"arm": "nobody"}, 400),
        ("assistant/promote", {"share": 1}, 400),
        ("assistant/rollback", {"arm": "nobody"}, 404),
        ("nothing/promote", {}, 404),
        ("nothing/rollback", {}, 404),
    ],
)
async def test_what_cannot_be_changed_is_refused(
    serving: Serving, text: TextModel, path: str, body: dict[str, Any], status: int
) -> None:
    async with serving(more=[other(text)], experiments=(split(),)) as gateway:
        reply = await gateway.client.post(f"/v1/admin/experiments/{path}", json=body)
        assert reply.status_code == status and "error" in reply.json(), reply.text


def failing(text: TextModel, name: str = "v2") -> ServedModel:
    """A model whose engine says that every request failed."""

    class Failing(ScriptedEngine):
        def _advance(self, id: str) -> None:
            self._left.pop(id)
            self._deltas.append(Delta(id, finish_reason="abort"))

    return ServedModel(name, text, InProcessBackend(Failing(text)))


@pytest.mark.parametrize("covered", [True, False])
async def test_a_broken_canary_is_rolled_back_by_itself(
    serving: Serving, text: TextModel, tmp_path: Path, covered: bool
) -> None:
    config = split(0.2, sticky="request", fallback=covered)
    async with serving(
        more=[failing(text)], experiments=(config,), store_url=f"sqlite:///{tmp_path}/store.db"
    ) as gateway:
        statuses: Counter[int] = Counter()
        for _ in range(60):
            replies = await asyncio.gather(*(gateway.chat(model="assistant") for _ in range(8)))
            statuses.update(reply.status_code for reply in replies)
            assert all(reply.status_code == 200 or arm_of(reply) == "v2" for reply in replies)
            if covered:
                assert all(reply.json()["choices"][0]["message"]["content"] for reply in replies)
            if (await arms(gateway))["v2"]["rolled_back"]:
                break
        shown = await arms(gateway)
        assert shown["v2"]["share"] == 0 and "errors" in shown["v2"]["rolled_back"], shown
        assert "confidence 0.99" in shown["v2"]["rolled_back"]
        if covered:
            assert statuses == {200: sum(statuses.values())}, "nobody has noticed"
        else:
            assert statuses[503] + statuses[500] > 0
        listed = (await gateway.client.get("/v1/admin/experiments")).json()["data"][0]
        assert listed["status"] == "rolled back" and listed["events"][0]["who"] == "automatic"
        assert {arm_of(await gateway.chat(model="assistant")) for _ in range(8)} == {"control"}
        changes = (
            'penstock_experiment_changes_total{experiment="assistant",arm="v2",change="rolled back",by="automatic"}'
        )
        assert await gateway.metric(changes) == 1


async def test_a_canary_that_does_well_is_promoted_step_by_step(serving: Serving, text: TextModel) -> None:
    config = split(0.3, sticky="request", stages=(0.3, 0.6, 1.0), stage_requests=20, stage_s=0.0, stage_margin=0.9)
    async with serving(more=[other(text)], experiments=(config,)) as gateway:
        for _ in range(60):
            await asyncio.gather(*(gateway.chat(model="assistant") for _ in range(10)))
            shown = await arms(gateway)
            if shown["v2"]["share"] == 1:
                break
        found = (await gateway.client.get("/v1/admin/experiments/assistant")).json()
        assert found["status"] == "promoted"
        assert [event["what"] for event in found["events"]] == ["v2 gets 100%", "v2 gets 60%", "v2 30%"]
        assert {arm_of(await gateway.chat(model="assistant")) for _ in range(5)} == {"v2"}


async def test_an_existing_name_is_split_with_its_aliases_and_routes_lead_to_the_arms(
    serving: Serving, text: TextModel
) -> None:
    config = ExperimentConfig(name="tiny", canary={"v2": 1.0})
    route = RouteConfig(name="auto", small="tiny", large="v3")
    async with serving(
        more=[other(text), other(text, "v3", "Large.")], experiments=(config,), routes=(route,)
    ) as gateway:
        for name in ("tiny", "small", "auto"):
            reply = await gateway.chat(model=name)
            assert reply.headers["x-penstock-experiment"] == "tiny; arm=v2", name
            assert reply.headers["x-penstock-model"] == "v2"
        assert reply.headers["x-penstock-route"].startswith("auto; rule=")
        direct = await gateway.chat(model="v3")
        assert "x-penstock-experiment" not in direct.headers
        for path, body in (
            ("/v1/completions", {"prompt": "hi"}),
            ("/v1/responses", {"input": "hi", "store": False}),
            ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}),
            ("/api/chat", {"messages": [{"role": "user", "content": "hi"}], "stream": False}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "stream": True}),
        ):
            reply = await gateway.client.post(path, json={"model": "tiny", **body})
            assert reply.status_code == 200, reply.text
            assert reply.headers["x-penstock-experiment"] == "tiny; arm=v2", path


async def test_a_route_and_a_model_can_be_compared(serving: Serving, text: TextModel) -> None:
    route = RouteConfig(name="auto", small="tiny", large="v3")
    config = ExperimentConfig(name="auto", canary={"v2": 0.5}, sticky="request")
    async with serving(
        more=[other(text), other(text, "v3", "Large.")], experiments=(config,), routes=(route,)
    ) as gateway:
        seen = {}
        for _ in range(100):
            if len(seen) == 2:
                break
            reply = await gateway.chat(model="auto")
            seen[arm_of(reply)] = (
                reply.headers["x-penstock-model"],
                reply.headers["x-penstock-route"].partition(";")[0],
            )
        assert seen == {"control": ("tiny", "auto"), "v2": ("v2", "auto")}


@pytest.mark.parametrize(
    ("configs", "problem"),
    [
        ([split(), ExperimentConfig(name="tiny", canary={"v2": 0.1})], "splits"),
        (
            [ExperimentConfig(name="auto", canary={"v2": 0.1}), ExperimentConfig(name="tiny", canary={"v2": 0.1})],
            "splits",
        ),
        ([ExperimentConfig(name="tiny", shadow={"auto": 0.1})], "cannot be a shadow"),
    ],
)
async def test_experiments_inside_experiments_are_refused(
    serving: Serving, text: TextModel, configs: list[ExperimentConfig], problem: str
) -> None:
    route = RouteConfig(name="auto", small="tiny", large="v3")
    with pytest.raises(ConfigError, match=problem):
        async with serving(more=[other(text), other(text, "v3")], experiments=tuple(configs), routes=(route,)):
            pass


async def test_a_request_that_only_the_canary_refuses_is_answered_by_the_control(
    serving: Serving, text: TextModel
) -> None:
    """The canary's window is smaller; wrong requests are wrong everywhere and count for nobody."""
    small = ServedModel("v2", text, InProcessBackend(ScriptedEngine(text, max_model_len=64)))
    async with serving(more=[small], experiments=(split(1.0, rollback=False),)) as gateway:
        long = [{"role": "user", "content": "x" * 200}]
        reply = await gateway.chat(model="assistant", messages=long)
        assert reply.status_code == 200 and reply.headers["x-penstock-model"] == "tiny"
        assert reply.headers["x-penstock-route"] == "fallback; assistant; arm=v2" and arm_of(reply) == "v2"
        wrong = await gateway.chat(model="assistant", temperature=-3)
        assert wrong.status_code == 400
        huge = await gateway.chat(model="assistant", messages=[{"role": "user", "content": "x" * 2000}])
        assert huge.status_code == 400
        shown = (await arms(gateway))["v2"]
        assert shown["errors"]["n"] == 1 and shown["errors"]["mean"] == 1.0
        assert shown["outcomes"]["refused"] == 1 and shown["outcomes"]["failed"] == 1
