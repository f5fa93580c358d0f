"""R-RT-10: shadow traffic is measured and graded, and nobody waits for it, pays for it, or sees it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from penstock.config.context import JudgeConfig
from penstock.config.experiments import ExperimentConfig
from penstock.config.schema import LimitConfig
from penstock.gateway.generation import experiment_keeper
from penstock.routing.registry import ServedModel
from penstock.testing.in_process_backend import InProcessBackend
from penstock.text import TextModel
from tests.gateway.conftest import Running, Serving, until
from tests.gateway.generation.test_experiments import PRICES, arms, failing
from tests.scripted import ScriptedEngine


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment_keeper, "FRESH_S", 0.05)


def shadowed(share: float = 1.0, **more: Any) -> ExperimentConfig:
    return ExperimentConfig(**{"name": "tiny", "shadow": {"v2": share}, **more})


def engine_and_model(text: TextModel, **options: Any) -> tuple[ScriptedEngine, ServedModel]:
    engine = ScriptedEngine(text, "A shadow.", **options)
    return engine, ServedModel("v2", text, InProcessBackend(engine))


async def shadow_arm(gateway: Running, requests: int) -> dict[str, Any]:
    async def ask() -> dict[str, Any]:
        return (await arms(gateway, "tiny"))["v2"]

    return await until(ask, lambda arm: arm["requests"] >= requests)


async def test_the_shadow_answers_too_after_everything_else_and_for_free(
    serving: Serving, text: TextModel, tmp_path: Path
) -> None:
    engine, model = engine_and_model(text)
    limits = (LimitConfig(per="tenant", requests_per_minute=4),)
    async with serving(
        more=[model],
        experiments=(shadowed(),),
        store_url=f"sqlite:///{tmp_path}/store.db",
        limits=limits,
        prices=PRICES,
    ) as gateway:
        for path, body in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "stream": True}),
            ("/v1/completions", {"prompt": "hi"}),
            ("/v1/responses", {"input": "hi"}),
            ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}),
        ):
            reply = await gateway.client.post(path, json={"model": "tiny", **body})
            assert reply.status_code == 200 and "shadow." not in reply.text, reply.text
            assert reply.headers["x-penstock-experiment"] == "tiny; arm=control"
        arm = await shadow_arm(gateway, 4)
        assert arm["kind"] == "shadow" and arm["errors"]["mean"] == 0 and arm["cost"]["mean"] > 0
        assert {request.priority for request in engine.seen} == {3} and len(engine.seen) == 4
        # Four requests were counted for the tenant, not eight: the fifth is one too many.
        assert (await gateway.chat()).status_code == 429
        usage = (await gateway.client.get("/v1/usage?by=tenant,feature,model")).json()["data"]
        by = {(row["tenant"], row["feature"], row["model"]): row["requests"] for row in usage}
        assert by == {("default", "", "tiny"): 4, ("(shadow)", "shadow", "v2"): 4}
        assert len((await gateway.client.get("/v1/responses")).json().get("data", [])) <= 1


async def test_a_shadow_that_fails_or_hangs_delays_nobody_and_the_queue_is_bounded(
    serving: Serving, text: TextModel
) -> None:
    engine, model = engine_and_model(text)
    engine.hold = True
    config = shadowed(shadow_queue=3, shadow_at_once=1)
    async with serving(more=[model], experiments=(config,)) as gateway:
        async with asyncio.timeout(60):
            replies = await asyncio.gather(*(gateway.chat() for _ in range(20)))
        assert {reply.status_code for reply in replies} == {200}
        dropped = 'penstock_experiment_shadow_requests_total{experiment="tiny",arm="v2",outcome="dropped"}'
        assert await until(lambda: gateway.metric(dropped), lambda count: count >= 15) <= 17
        engine.hold = False
        await shadow_arm(gateway, 3)
    async with serving(more=[failing(text)], experiments=(shadowed(),)) as gateway:
        replies = await asyncio.gather(*(gateway.chat() for _ in range(5)))
        assert {reply.status_code for reply in replies} == {200}
        assert (await shadow_arm(gateway, 5))["errors"]["mean"] == 1.0


async def test_a_shadow_reads_the_whole_conversation_and_adds_nothing_to_it(
    serving: Serving, text: TextModel, tmp_path: Path
) -> None:
    engine, model = engine_and_model(text)
    async with serving(more=[model], experiments=(shadowed(),), store_url=f"sqlite:///{tmp_path}/store.db") as gateway:
        system = {"role": "system", "content": "Be brief."}
        for said in ("one", "two", "three"):
            messages = [*([system] if said == "one" else []), {"role": "user", "content": said}]
            assert (await gateway.chat(conversation="c1", messages=messages)).status_code == 200
        await shadow_arm(gateway, 3)
        prompt = text.decode(max((request.prompt for request in engine.seen), key=len), skip_special=False)
        for part in ("Be brief.", "one", "two", "three", "Hello, world!"):
            assert part in prompt
        assert "A shadow." not in prompt
        assert text.decode(max((r.prompt for r in gateway.engine.seen), key=len), skip_special=False) == prompt


async def test_arms_and_shadows_are_graded_by_the_judge_at_the_rate_of_the_experiment(
    serving: Serving, text: TextModel
) -> None:
    judge = ServedModel("judge", text, InProcessBackend(ScriptedEngine(text, "yes")))
    _, model = engine_and_model(text)
    async with serving(
        more=[model, judge],
        experiments=(shadowed(judge=1.0),),
        judge=JudgeConfig(rate=0.0, model="judge"),
    ) as gateway:
        for _ in range(3):
            await gateway.chat()

        async def grades() -> dict[str, Any]:
            return {name: arm["grades"] for name, arm in (await arms(gateway, "tiny")).items()}

        found = await until(grades, lambda seen: all(arm["n"] == 3 for arm in seen.values()))
        assert all(arm["mean"] == 1.0 and arm["high"] == 1.0 and arm["low"] < 1 for arm in found.values())
