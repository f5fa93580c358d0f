"""What stands against a model of a route: window, cost, budget, the wait for a first token; and what is read."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.config.routing import RouteConfig
from penstock.config.schema import LimitConfig, PriceConfig
from penstock.gateway.generation.constraints import estimated_tokens
from penstock.gateway.generation.question import Question
from penstock.routing.registry import ServedModel
from penstock.testing.in_process_backend import InProcessBackend
from penstock.text import TextModel
from tests.gateway.conftest import Running, Serving
from tests.gateway.generation.test_remotes import world
from tests.gateway.rag.test_collections import filled, library
from tests.scripted import ScriptedEngine

HARD = [{"role": "user", "content": "Prove step by step that there is no largest prime, and write a Python function."}]
EASY = [{"role": "user", "content": "What is the capital of Portugal?"}]
PRICES = (
    PriceConfig(model="tiny", input_price=1, output_price=1),
    PriceConfig(model="big", input_price=100, output_price=100),
)


@asynccontextmanager
async def routed(
    serving: Serving,
    text: TextModel,
    *,
    small: int = 512,
    large: int = 4096,
    route: dict[str, Any] | None = None,
    **more: Any,
) -> AsyncIterator[Running]:
    """Routes between `tiny` and `big`, with windows of so many tokens."""
    big = ServedModel("big", text, InProcessBackend(ScriptedEngine(text, "Big words.", max_model_len=large)))
    engine = ScriptedEngine(text, max_model_len=small)
    config = RouteConfig(name="auto", small="tiny", large="big", **route or {})
    async with serving(engine, more=[big], routes=(config,), prices=PRICES, **more) as running:
        yield running


def way(reply: httpx.Response) -> tuple[str, str]:
    """Which model answered, and by which rule."""
    assert reply.status_code == 200, reply.text
    rule = reply.headers["x-penstock-route"].partition("rule=")[2].partition(";")[0]
    return reply.headers["x-penstock-model"], rule


async def ask(
    running: Running, messages: list[dict[str, Any]], headers: dict[str, str] | None = None, **body: Any
) -> httpx.Response:
    body = {"model": "auto", "messages": messages, **body}
    return await running.client.post("/v1/chat/completions", json=body, headers=headers or {})


async def test_the_length_rule_counts_what_the_model_will_read(serving: Serving, text: TextModel) -> None:
    words = "blah " * 60
    tool = {"type": "function", "function": {"name": "f", "description": words, "parameters": {"type": "object"}}}
    async with routed(serving, text, small=4096, route={"long_words": 50}) as it:
        assert way(await ask(it, EASY)) == ("tiny", "score")
        for messages in (
            [{"role": "system", "content": words}, *EASY],
            [{"role": "user", "content": "hi"}, {"role": "assistant", "content": words}, *EASY],
            [
                {"role": "user", "content": [{"type": "text", "text": words}]},
                {"role": "assistant", "content": "ok"},
                *EASY,
            ],
        ):
            assert way(await ask(it, messages)) == ("big", "length"), messages
        assert way(await ask(it, EASY, tools=[tool])) == ("big", "length")
        chinese = [{"role": "system", "content": "请用中文回答所有问题并且保持礼貌" * 10}, *EASY]
        assert way(await ask(it, chinese)) == ("big", "length")
        messages = {"model": "auto", "max_tokens": 5, "system": words, "messages": EASY}
        reply = await it.client.post("/v1/messages", json=messages)
        assert way(reply) == ("big", "length")
        reply = await it.client.post("/v1/responses", json={"model": "auto", "instructions": words, "input": "hello"})
        assert way(reply) == ("big", "length")


async def test_tokens_are_counted_with_the_models_own_tokenizer(serving: Serving, text: TextModel) -> None:
    prompt = "zq " * 40
    exact = len(text.encode(prompt))
    for limit, rule in ((exact, "score"), (exact - 1, "length")):
        async with routed(serving, text, route={"long_tokens": limit}) as it:
            reply = await it.complete(model="auto", prompt=prompt, max_tokens=4)
            assert way(reply)[1] == rule, (limit, exact)


async def test_sources_count_before_they_are_found(
    serving: Serving, text: TextModel, encoder_endpoint: str, tmp_path: Path
) -> None:
    route = RouteConfig(name="auto", small="tiny", large="small", long_tokens=40)
    prices = (PriceConfig(model="minilm", input_price=1000),)
    async with library(
        serving, encoder_endpoint, tmp_path, ScriptedEngine(text, max_model_len=4096), routes=(route,), prices=prices
    ) as it:
        id = await filled(it)
        assert way(await ask(it, EASY))[1] == "score"
        assert way(await ask(it, EASY, rag={"collection": id}))[1] == "length"
        body = {"model": "minilm", "input": "What do the rules say about leave?"}
        for allowed, status in (("1", 200), ("0.001", 402), ("much", 400)):
            reply = await it.client.post("/v1/embeddings", json=body, headers={"x-penstock-max-cost": allowed})
            assert reply.status_code == status, reply.text
        missing = await ask(it, EASY, rag={"collection": "nowhere"})
        assert missing.status_code == 404 and missing.json()["error"]["code"] == "collection_not_found"


async def test_a_request_goes_where_it_fits(serving: Serving, text: TextModel) -> None:
    long = [{"role": "system", "content": "word " * 700}, *EASY]
    async with routed(serving, text, route={"long_words": 5000}) as it:
        assert way(await ask(it, long)) == ("big", "window")
        assert way(await ask(it, EASY, max_tokens=1000)) == ("big", "window")
        assert "instead_of=score" in (await ask(it, long)).headers["x-penstock-route"]
    async with routed(serving, text, small=4096, large=512) as it:
        assert way(await ask(it, [{"role": "system", "content": "word " * 700}, *HARD])) == ("tiny", "window")
    async with routed(serving, text, small=256, large=512) as it:
        too_long = await ask(it, [{"role": "system", "content": "word " * 3000}, *HARD])
        assert too_long.status_code == 400 and too_long.json()["error"]["code"] == "context_length_exceeded"


async def test_the_cost_that_a_request_allows(serving: Serving, text: TextModel) -> None:
    async with routed(serving, text) as it:
        # About 30 prompt and 100 completion tokens: 0.013 dollars with the large model, 0.00013 with the small one.
        assert way(await ask(it, HARD, max_tokens=100)) == ("big", "score")
        assert way(await ask(it, HARD, {"x-penstock-max-cost": "0.02"}, max_tokens=100)) == ("big", "score")
        assert way(await ask(it, HARD, {"x-penstock-max-cost": "0.001"}, max_tokens=100)) == ("tiny", "cost")
        refused = await ask(it, HARD, {"x-penstock-max-cost": "0.00001"}, max_tokens=100)
        error = refused.json()["error"]
        assert refused.status_code == 402 and error["code"] == "max_cost_exceeded"
        assert error["param"] == "x-penstock-max-cost" and "`tiny`" in error["message"] and "`big`" in error["message"]
        for bad in ("", "free", "-1", "nan", "inf", "1e400", "0.1 dollars"):
            reply = await ask(it, HARD, {"x-penstock-max-cost": bad})
            assert reply.status_code == 400 and reply.json()["error"]["param"] == "x-penstock-max-cost", bad


async def test_the_cost_holds_for_a_model_that_is_named(serving: Serving, text: TextModel) -> None:
    def script(request: Any) -> list[int]:
        return [*text.encode("word")] * 400

    big = ServedModel("big", text, InProcessBackend(ScriptedEngine(text, script, max_model_len=512)))
    async with serving(more=[big], prices=PRICES) as it:
        headers = {"x-penstock-max-cost": "0.005"}
        reply = await ask(it, EASY, headers, model="big")
        usage, choice = reply.json()["usage"], reply.json()["choices"][0]
        assert choice["finish_reason"] == "length" and 0 < usage["completion_tokens"] < 50
        assert 0.0045 < usage["total_tokens"] * 100e-6 <= 0.005
        refused = await ask(it, EASY, headers, model="big", max_tokens=50)
        assert refused.status_code == 402 and "50 completion tokens" in refused.json()["error"]["message"]
        refused = await ask(it, EASY, headers, model="big", n=2, max_tokens=20)
        assert refused.status_code == 402
        reply = await it.client.post(
            "/v1/completions", json={"model": "big", "prompt": "hello", "max_tokens": 100}, headers=headers
        )
        assert reply.status_code == 402
        assert (await ask(it, EASY, {"x-penstock-max-cost": "0"}, model="tiny")).status_code == 402


async def test_the_large_model_is_left_out_when_the_budget_does_not_suffice(serving: Serving, text: TextModel) -> None:
    limits = (LimitConfig(per="tenant", daily_budget=0.01),)
    async with routed(serving, text, limits=limits) as it:
        assert way(await ask(it, HARD, max_tokens=2)) == ("big", "score")
        assert way(await ask(it, HARD, max_tokens=20)) == ("tiny", "budget")
    async with routed(
        serving, text, limits=(LimitConfig(per="tenant", daily_budget=0.05),), route={"budget_reserve": 0.9}
    ) as it:
        assert way(await ask(it, HARD, max_tokens=20)) == ("tiny", "budget")
    async with routed(serving, text, limits=(LimitConfig(per="tenant", daily_budget=0.00001),)) as it:
        spent = await ask(it, HARD, max_tokens=200)
        assert spent.status_code == 429 and spent.json()["error"]["code"] == "insufficient_quota"


async def test_a_model_that_would_keep_the_client_waiting_is_left_out(serving: Serving, text: TextModel) -> None:
    async with routed(serving, text, route={"target_ttft_ms": 500}) as it:
        assert way(await ask(it, HARD)) == ("big", "score")
        big = it.parts.registry.route("big").model
        await big.backend.close()
        assert way(await ask(it, HARD)) == ("tiny", "latency")
    async with routed(serving, text) as it:
        await it.parts.registry.route("big").model.backend.close()
        assert way(await ask(it, HARD, {"x-slo-ttft-ms": "500"})) == ("tiny", "latency")
        bad = await ask(it, HARD, {"x-slo-ttft-ms": "soon"})
        assert bad.status_code == 400 and bad.json()["error"]["param"] == "x-slo-ttft-ms"


async def test_a_remote_may_be_the_large_model(serving: Serving) -> None:
    route = RouteConfig(name="auto", small="tiny", large="far")
    prices = (
        PriceConfig(model="tiny", input_price=1, output_price=1),
        PriceConfig(model="far", input_price=100, output_price=100),
    )
    async with world(serving, routes=(route,), prices=prices, remote={"context_window": 300}) as it:
        assert way(await ask(it.front, HARD, max_tokens=50)) == ("far", "score")
        assert way(await ask(it.front, HARD, {"x-penstock-max-cost": "0.001"}, max_tokens=50)) == ("tiny", "cost")
        assert way(await ask(it.front, HARD, max_tokens=400)) == ("tiny", "window")
        assert way(await it.front.complete(model="auto", prompt=HARD[0]["content"], max_tokens=5)) == ("far", "score")
        assert way(await ask(it.front, HARD, prompt_logprobs=1)) == ("tiny", "unable")
        assert way(await it.front.complete(model="auto", prompt=[5, 6, 7], max_tokens=2))[0] == "tiny"
        refused = await ask(it.front, EASY, {"x-penstock-max-cost": "0.001"}, model="far", max_tokens=50)
        assert refused.status_code == 402


async def test_an_adapter_may_be_one_of_the_models(serving: Serving) -> None:
    route = RouteConfig(name="auto", small="tiny", large="tuned")
    async with serving(routes=(route,), served={"adapters": ("tuned",)}) as it:
        assert way(await ask(it, HARD)) == ("tuned", "score")
        assert way(await ask(it, EASY)) == ("tiny", "score")


async def test_a_route_that_is_off_always_gives_its_default(serving: Serving, text: TextModel) -> None:
    async with routed(serving, text, route={"enabled": False}) as it:
        assert way(await ask(it, HARD)) == ("tiny", "off")
        assert (await ask(it, HARD, max_tokens=1000)).status_code == 400


def test_estimates_grow_with_the_script() -> None:
    def tokens(text: str) -> int:
        return estimated_tokens(Question(said=[text], read=[text]))

    assert tokens("four") == 1 and tokens("a" * 400) == 100
    assert tokens("привет") == 3 and tokens("你好世界") == 3
    assert tokens("\ud800") == 1


@pytest.mark.parametrize("said", [[], ["ok"]])
def test_a_question_without_words_is_empty(said: list[str]) -> None:
    assert Question(said=said, read=said).text == (said[-1] if said else "")
