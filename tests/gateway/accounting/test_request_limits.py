"""What a single request may ask for, by tier, tenant and key: every API says which limit applied, and whose it is
(R-GW-10)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.config.schema import LimitConfig, TierConfig
from penstock.gateway.accounting.request_limits import RequestLimits
from penstock.identity import Caller
from penstock.identity.allowance import NO_ALLOWANCE, Allowance
from penstock.text import TextModel
from tests.gateway.accounting.test_quotas import settings, sign_in
from tests.gateway.conftest import Serving
from tests.scripted import ScriptedEngine

FREE = TierConfig(
    name="free", context_tokens=200, output_tokens=20, time_limit_s=30.0, choices=2, tools=1, tool_rounds=2
)
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "one", "parameters": {"type": "object"}}}


def test_the_lowest_limit_that_applies_is_the_cap_and_knows_whose_it_is() -> None:
    entries = (LimitConfig(per="model", model="big", output_tokens=5), LimitConfig(tenant="acme", choices=1))
    limits = RequestLimits([FREE], entries)

    def cap(name: Any, model: str = "tiny", own: Allowance = NO_ALLOWANCE, key: Allowance = NO_ALLOWANCE) -> Any:
        found = limits.cap(Caller("acme", key="k", tier="free", limits=own, key_limits=key), name, model)
        return found and (found.value, found.scope)

    assert cap("output_tokens") == (20, "tier")
    assert cap("output_tokens", own=Allowance(output_tokens=50)) == (50, "tenant"), "it replaces the tier's"
    assert cap("output_tokens", own=Allowance(output_tokens=50), key=Allowance(output_tokens=10)) == (10, "key")
    assert cap("output_tokens", key=Allowance(output_tokens=90)) == (20, "tier"), "a key cannot have more"
    assert cap("output_tokens", model="big") == (5, "limits")
    assert cap("choices") == (1, "limits")
    assert limits.cap(Caller("beta", tier="free"), "output_tokens") is None, "without keys there are no tiers"


def refused(reply: httpx.Response, limit: str, scope: str, *words: str) -> None:
    assert reply.status_code == 400, reply.text
    message = str(reply.json()["error"]["message"] if "error" in reply.json() else reply.json())
    assert all(word in message for word in words), message
    assert reply.headers["x-penstock-limit"] == limit and reply.headers["x-penstock-limit-scope"] == scope
    assert "this model" not in message.lower()


@pytest.fixture
def wordy(text: TextModel) -> ScriptedEngine:
    return ScriptedEngine(text, "word " * 500)


async def test_every_api_refuses_more_than_the_tier_allows_and_says_so(
    serving: Serving, tmp_path: Path, wordy: ScriptedEngine
) -> None:
    async with serving(wordy, **settings(tmp_path, FREE)) as running:
        await sign_in(running)
        long, hello = "x" * 400, [{"role": "user", "content": "hi"}]
        client = running.client
        told = ("tier `free`", "200", "context_tokens")
        refused(await running.chat(messages=[{"role": "user", "content": long}]), "context_tokens", "tier", *told)
        refused(await running.complete(prompt=long), "context_tokens", "tier", *told)
        huge = [{"role": "user", "content": "x" * 200_000}]
        refused(await running.chat(messages=huge), "context_tokens", "tier", *told)
        refused(await running.complete(prompt="x" * 200_000), "context_tokens", "tier", *told)
        body: dict[str, Any] = {"model": "tiny", "input": long}
        refused(await client.post("/v1/responses", json=body), "context_tokens", "tier", *told)
        body = {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": long}]}
        reply = await client.post("/v1/messages", json=body)
        assert reply.status_code == 400 and reply.headers["x-penstock-limit"] == "context_tokens"
        body = {"model": "tiny", "stream": False, "messages": [{"role": "user", "content": long}]}
        reply = await client.post("/api/chat", json=body)
        assert reply.status_code == 400 and reply.headers["x-penstock-limit"] == "context_tokens"

        asked = ("tier `free`", "20", "output_tokens", "21")
        refused(await running.chat(max_tokens=21), "output_tokens", "tier", *asked)
        refused(await running.chat(max_completion_tokens=21), "output_tokens", "tier", "max_completion_tokens", *asked)
        refused(await running.complete(max_tokens=21), "output_tokens", "tier", *asked)
        body = {"model": "tiny", "input": "hi", "max_output_tokens": 21}
        refused(await client.post("/v1/responses", json=body), "output_tokens", "tier", *asked)

        refused(await running.chat(n=3, max_tokens=1), "choices", "tier", "`n` is 3", "tier `free`", "2")
        refused(await running.complete(prompt=["a", "b", "c"]), "choices", "tier", "3 prompts")
        refused(await running.complete(best_of=3), "choices", "tier")
        two = [TOOL, {**TOOL, "function": {**TOOL["function"], "name": "two"}}]
        refused(await running.chat(tools=two), "tools", "tier", "2 functions", "tier `free`")
        body = {"model": "tiny", "max_tokens": 5, "messages": hello, "tools": [
            {"name": name, "input_schema": {"type": "object"}} for name in ("a", "b")
        ]}  # fmt: skip
        reply = await client.post("/v1/messages", json=body)
        assert reply.status_code == 400 and reply.headers["x-penstock-limit"] == "tools"
        assert wordy.seen == [], "nothing of it reached an engine"


async def test_an_answer_names_the_limit_that_ended_it_and_whose_it_is(
    serving: Serving, tmp_path: Path, wordy: ScriptedEngine
) -> None:
    async with serving(wordy, **settings(tmp_path, FREE)) as running:
        await sign_in(running)
        reply = await running.chat()
        assert reply.json()["usage"]["completion_tokens"] == 20
        assert reply.headers["x-penstock-limit"] == "output_tokens"
        assert reply.headers["x-penstock-limit-scope"] == "tier"
        streamed = await running.chat(stream=True)
        assert ": x-penstock-limit: output_tokens\n: x-penstock-limit-scope: tier\n\n" in streamed.text
        # Clients of these APIs always name a limit, and a large one: it is lowered, and the answer says so.
        body = {"model": "tiny", "max_tokens": 4096, "messages": [{"role": "user", "content": "hi"}]}
        reply = await running.client.post("/v1/messages", json=body)
        assert reply.status_code == 200 and reply.json()["usage"]["output_tokens"] == 20
        assert reply.headers["x-penstock-limit"] == "output_tokens"
        assert (await running.complete()).status_code == 200, "nobody asked for the default of 16 tokens"
        [model] = (await running.client.get("/v1/models")).json()["data"]
        assert model["max_output_tokens"] == 20 and model["limits"]["tools"] == 1


async def test_a_tenants_own_limits_and_its_keys(serving: Serving, tmp_path: Path, wordy: ScriptedEngine) -> None:
    async with serving(wordy, **settings(tmp_path, FREE)) as running:
        await sign_in(running)
        client = running.client
        change = {"limits": {"output_tokens": 40, "context_tokens": 100, "priority": 2}}
        changed = await client.patch("/v1/admin/tenants/acme", json=change)
        assert changed.status_code == 200 and changed.json()["limits"]["output_tokens"] == 40
        assert (await running.chat(max_tokens=40)).status_code == 200
        assert wordy.seen[-1].priority == 1, "batch: after all others"
        refused(await running.chat(max_tokens=41), "output_tokens", "tenant", "tenant `acme`")
        long = [{"role": "user", "content": "x" * 100}]
        refused(await running.chat(messages=long), "context_tokens", "tenant", "tenant `acme`", "100")
        running.admin = client.headers["authorization"]  # type: ignore[attr-defined]
        await sign_in(running, limits={"output_tokens": 7, "time_limit_s": 0.5, "tools": 0})
        refused(await running.chat(max_tokens=8), "output_tokens", "key", "this key")
        refused(await running.chat(tools=[TOOL]), "tools", "key")
        account = (await client.get("/v1/account")).json()
        assert account["allowed"]["output_tokens"] == 40
        wrong = await client.patch("/v1/admin/tenants/acme", json={"limits": {"priority": 3}})
        assert wrong.status_code == 400
