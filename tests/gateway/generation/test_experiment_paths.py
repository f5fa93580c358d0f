"""R-RT-10 with the rest: votes, conversations, responses, caches, access, adapters, remotes, batches, the ledger."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.config.cache import CacheConfig
from penstock.config.experiments import ExperimentConfig
from penstock.gateway.generation import experiment_keeper
from penstock.routing.breaker import BreakerPolicy
from penstock.storage import open_database
from penstock.text import TextModel
from tests.gateway.conftest import Serving, until
from tests.gateway.generation.test_experiments import arm_of, arms, other, split
from tests.gateway.generation.test_remotes import far
from tests.scripted import ScriptedEngine


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment_keeper, "FRESH_S", 0.05)


async def promote(gateway: Any, to: float) -> None:
    reply = await gateway.client.post("/v1/admin/experiments/assistant/promote", json={"to": to})
    assert reply.status_code == 200, reply.text


async def test_votes_count_for_the_arm_and_a_second_thought_replaces_the_first(
    serving: Serving, text: TextModel, tmp_path: Path
) -> None:
    store = f"sqlite:///{tmp_path}/store.db"
    async with serving(more=[other(text)], experiments=(split(1.0),), store_url=store) as gateway:
        reply = await gateway.chat(model="assistant")
        vote = {"response_id": reply.json()["id"], "rating": "up"}
        for rating, share in (("up", 0.0), ("down", 1.0), ("down", 1.0), ("up", 0.0)):
            voted = await gateway.client.post("/v1/feedback", json={**vote, "rating": rating})
            assert voted.status_code == 200 and voted.json()["via"] == "assistant" and voted.json()["arm"] == "v2"
            found = (await arms(gateway))["v2"]["dislikes"]
            assert found["n"] == 1 and found["mean"] == share, rating
        trace = (await gateway.client.get(f"/v1/traces/{reply.headers['x-request-id']}")).json()
        assert trace["experiment"] == "assistant; arm=v2"
    database = await open_database(store)
    rows = await database.fetch("SELECT model, experiment FROM charges_opened")
    assert rows == [("v2", "assistant; arm=v2")]
    await database.close()


async def test_a_conversation_and_a_response_keep_the_arm_that_they_began_with(
    serving: Serving, text: TextModel, tmp_path: Path
) -> None:
    config = split(0.0, canary={"v2": 0.0}, rollback=False)
    async with serving(
        more=[other(text)], experiments=(config,), store_url=f"sqlite:///{tmp_path}/store.db"
    ) as gateway:
        assert arm_of(await gateway.chat(model="assistant", conversation="old")) == "control"
        first = await gateway.client.post("/v1/responses", json={"model": "assistant", "input": "hi", "user": "ann"})
        assert arm_of(first) == "control"
        await promote(gateway, 0.99)  # nearly everybody
        assert arm_of(await gateway.chat(model="assistant", conversation="old")) == "control"
        later = {"model": "assistant", "input": "go on", "user": "ann", "previous_response_id": first.json()["id"]}
        assert arm_of(await gateway.client.post("/v1/responses", json=later)) == "control"
        new = {arm_of(await gateway.chat(model="assistant", conversation=f"new{number}")) for number in range(5)}
        assert "v2" in new
        await promote(gateway, 1.0)  # the control is gone
        assert arm_of(await gateway.chat(model="assistant", conversation="old")) == "v2"
        await gateway.client.post("/v1/admin/experiments/assistant/rollback", json={})
        assert arm_of(await gateway.chat(model="assistant", conversation="old")) == "control"


async def test_sessions_and_tenants_can_be_what_stays_together(serving: Serving, text: TextModel) -> None:
    async with serving(more=[other(text)], experiments=(split(sticky="session"),)) as gateway:
        seen = {}
        for number in range(12):
            headers = {"x-session-id": f"s{number}"}
            body = {"model": "assistant", "messages": [{"role": "user", "content": "hi"}], "user": "one"}
            replies = [await gateway.client.post("/v1/chat/completions", json=body, headers=headers) for _ in range(2)]
            assert len({arm_of(reply) for reply in replies}) == 1
            seen[number] = arm_of(replies[0])
        assert set(seen.values()) == {"control", "v2"}
    async with serving(more=[other(text)], experiments=(split(sticky="tenant"),)) as gateway:
        assert len({arm_of(await gateway.chat(model="assistant", user=f"u{n}")) for n in range(12)}) == 1


async def test_cached_answers_of_one_arm_are_never_given_for_another(serving: Serving, text: TextModel) -> None:
    async with serving(
        more=[other(text)], experiments=(split(0.5, sticky="request"),), cache=CacheConfig(exact="on")
    ) as gateway:
        seen = set()
        for _ in range(100):
            if len(seen) == 4:
                break
            reply = await gateway.chat(model="assistant", temperature=0)
            said = reply.json()["choices"][0]["message"]["content"]
            assert said == {"control": "Hello, world!", "v2": "Other words."}[arm_of(reply)]
            seen.add((arm_of(reply), reply.headers["x-penstock-cache"]))
        assert seen == {("control", "miss"), ("control", "exact"), ("v2", "miss"), ("v2", "exact")}
        for arm in (await arms(gateway)).values():
            assert arm["ttft"]["n"] == 1 < arm["requests"], "cached answers say nothing about latency"


async def test_whoever_may_not_use_the_canary_is_not_in_the_experiment(
    serving: Serving, text: TextModel, tmp_path: Path
) -> None:
    async with serving(
        more=[other(text)],
        experiments=(split(1.0), ExperimentConfig(name="v9", control="tiny", shadow={"v2": 1.0})),
        store_url=f"sqlite:///{tmp_path}/store.db",
    ) as gateway:
        client, root_key = gateway.client, {"tenant": "root", "scopes": ["admin", "inference"]}
        assert (await client.post("/v1/admin/tenants", json={"id": "root"})).status_code < 300
        root = (await client.post("/v1/admin/keys", json=root_key)).json()["key"]
        client.headers["authorization"] = f"Bearer {root}"
        tenant = {"id": "acme", "allow": {"models": ["tiny", "assistant", "v9"]}}
        made = await client.post("/v1/admin/tenants", json=tenant)
        assert made.status_code < 300, made.text
        key = (await client.post("/v1/admin/keys", json={"tenant": "acme"})).json()["key"]
        assert arm_of(await gateway.chat(model="assistant")) == "v2"
        client.headers["authorization"] = f"Bearer {key}"
        reply = await gateway.chat(model="assistant")
        assert reply.status_code == 200 and reply.headers["x-penstock-model"] == "tiny"
        assert "x-penstock-experiment" not in reply.headers and "v2" not in str(reply.headers)
        assert (await gateway.chat(model="v2")).status_code == 404
        assert "v2" not in (await client.get("/v1/models")).text
        assert (await gateway.chat(model="v9")).status_code == 200
        await asyncio.sleep(0.1)
        client.headers["authorization"] = f"Bearer {root}"
        assert (await arms(gateway, "v9"))["v2"]["requests"] == 0, "no shadow where the model must not be used"


async def test_adapters_and_remotes_can_be_arms(serving: Serving, text: TextModel) -> None:
    async with serving(ScriptedEngine(text, "From afar.")) as behind:
        remote = far(behind.port, breaker=BreakerPolicy(failures=100))
        config = split(canary={"fr": 0.4, "far": 0.4}, sticky="request")
        async with serving(others=[remote], experiments=(config,), served={"adapters": ("fr",)}) as gateway:
            seen = {}
            for _ in range(200):
                if len(seen) == 3:
                    break
                reply = await gateway.chat(model="assistant")
                seen[arm_of(reply)] = reply.headers["x-penstock-model"]
            assert seen == {"control": "tiny", "fr": "fr", "far": "far"}
            assert {request.adapter for request in gateway.engine.seen} == {"", "fr"}
            shown = await arms(gateway)
            assert all(arm["requests"] > 0 and arm["served"] for arm in shown.values())
            wrong = await gateway.client.post("/v1/admin/experiments/assistant/promote", json={"to": 0.5})
            assert wrong.status_code == 400 and "Name the arm" in wrong.text
            body = {"arm": "far", "to": 0.9}
            too_much = await gateway.client.post("/v1/admin/experiments/assistant/promote", json=body)
            assert too_much.status_code == 400


async def test_lines_of_a_batch_are_in_the_experiment_and_the_name_works_elsewhere(
    serving: Serving, text: TextModel, tmp_path: Path
) -> None:
    async with serving(
        more=[other(text)], experiments=(split(),), store_url=f"sqlite:///{tmp_path}/store.db"
    ) as gateway:
        body = {"model": "assistant", "messages": [{"role": "user", "content": "hi"}]}
        line = {"method": "POST", "url": "/v1/chat/completions", "body": body}
        lines = "\n".join(json.dumps({"custom_id": str(number), **line}) for number in range(48))
        form = {"purpose": (None, "batch"), "file": ("b.jsonl", lines.encode())}
        file = (await gateway.client.post("/v1/files", files=form)).json()["id"]
        asked = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = (await gateway.client.post("/v1/batches", json=asked)).json()["id"]

        async def state() -> dict[str, Any]:
            found: dict[str, Any] = (await gateway.client.get(f"/v1/batches/{batch}")).json()
            return found

        done = await until(state, lambda found: found["status"] == "completed")
        assert done["request_counts"] == {"total": 48, "completed": 48, "failed": 0}
        shown = await arms(gateway)
        assert shown["v2"]["requests"] + shown["control"]["requests"] == 48 and shown["v2"]["requests"] > 0
        # Where no arm is chosen, the name means the control.
        listed = {model["id"] for model in (await gateway.client.get("/v1/models")).json()["data"]}
        assert "assistant" in listed
        assert (await gateway.client.get("/v1/models/assistant")).json()["id"] == "assistant"
        counted = await gateway.client.post("/tokenize", json={"model": "assistant", "prompt": "hi"})
        assert counted.status_code == 200, counted.text
