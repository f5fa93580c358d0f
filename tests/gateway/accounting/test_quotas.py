"""Limits of tiers, users and models at a real gateway: reserved, settled, told, never exceeded."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.config.schema import CountersConfig, LimitConfig, TierConfig
from penstock.gateway.accounting.quotas import LONG_CHARACTERS
from penstock.gateway.app.dialects import duration
from penstock.gateway.process.settings import ModelSettings
from tests.gateway.conftest import Running, Serving, eventually
from tests.scripted import ScriptedEngine


def settings(tmp_path: Path, *tiers: TierConfig, **more: Any) -> dict[str, Any]:
    return {
        "store_url": f"sqlite:///{tmp_path / 'state.db'}",
        "default_tier": "free",
        "tiers": tiers,
        "models": (ModelSettings("tiny", "", input_price=1.0, output_price=1000.0),),
        **more,
    }


async def sign_in(running: Running, tenant: str = "acme", **key: Any) -> None:
    """Let the client speak for a new tenant."""
    client = running.client
    admin = {"authorization": getattr(running, "admin", "")}
    await client.post("/v1/admin/tenants", json={"id": tenant}, headers=admin)
    made = await client.post(
        "/v1/admin/keys", json={"tenant": tenant, "scopes": ["inference", "admin"], **key}, headers=admin
    )
    assert made.status_code == 200, made.text
    client.headers["authorization"] = f"Bearer {made.json()['key']}"


async def test_requests_per_minute_are_told_and_held(serving: Serving, tmp_path: Path) -> None:
    async with serving(**settings(tmp_path, TierConfig(name="free", requests_per_minute=3))) as running:
        await sign_in(running)
        begun = time.monotonic()
        replies = [await running.chat(max_tokens=1) for _ in range(4)]
        took = time.monotonic() - begun
        assert [reply.status_code for reply in replies] == [200, 200, 200, 429]
        assert [reply.headers["x-ratelimit-remaining-requests"] for reply in replies] == ["2", "1", "0", "0"]
        assert replies[0].headers["x-ratelimit-limit-requests"] == "3"
        refused = replies[-1]
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert refused.headers["x-penstock-reason"] == "rate_limit"
        assert 58 - took <= int(refused.headers["retry-after"]) <= 62


async def test_tokens_are_reserved_and_what_is_left_given_back(serving: Serving, tmp_path: Path, text: Any) -> None:
    engine = ScriptedEngine(text, lambda request: [ord("a")] * 10 + [text.eos_token_ids[0]])
    engine.hold = True
    async with serving(engine, **settings(tmp_path, TierConfig(name="free", tokens_per_minute=200))) as running:
        await sign_in(running)
        first = asyncio.create_task(running.complete(prompt="abcd", max_tokens=150))
        await eventually(lambda: len(engine.seen) == 1)
        assert (await running.complete(prompt="abcd", max_tokens=150)).status_code == 429
        engine.hold = False
        assert (await first).status_code == 200
        again = await running.complete(prompt="abcd", max_tokens=150)
        assert again.status_code == 200, "the first used 15 of its 154 tokens"
        assert again.headers["x-ratelimit-remaining-tokens"] == str(200 - 15 - 154)
        never = await running.complete(prompt="abcd", max_tokens=300)
        assert never.status_code == 400 and "can never run" in never.json()["error"]["message"]


async def test_concurrent_requests(serving: Serving, tmp_path: Path, text: Any) -> None:
    engine = ScriptedEngine(text)
    engine.hold = True
    async with serving(engine, **settings(tmp_path, TierConfig(name="free", concurrent_requests=2))) as running:
        await sign_in(running)
        asked = [asyncio.create_task(running.chat()) for _ in range(5)]
        await eventually(lambda: sum(task.done() for task in asked) == 3)
        engine.hold = False
        statuses = [reply.status_code for reply in await asyncio.gather(*asked)]
        assert sorted(statuses) == [200, 200, 429, 429, 429]
        assert (await running.chat()).status_code == 200


async def test_a_spent_budget_says_not_to_retry(serving: Serving, tmp_path: Path) -> None:
    # A completion token costs a thousandth of a dollar here, an answer 14 of them.
    async with serving(**settings(tmp_path, TierConfig(name="free", daily_budget=0.04))) as running:
        await sign_in(running)
        statuses = [(await running.chat(max_tokens=14)).status_code for _ in range(4)]
        assert statuses == [200, 200, 429, 429]
        refused = await running.chat(max_tokens=14)
        assert refused.json()["error"]["code"] == "insufficient_quota"
        assert refused.headers["x-should-retry"] == "false" and refused.headers["x-penstock-reason"] == "budget"


async def test_tenants_have_limits_of_their_own(serving: Serving, tmp_path: Path) -> None:
    async with serving(**settings(tmp_path, TierConfig(name="free", requests_per_minute=1))) as running:
        await sign_in(running, "acme")
        assert [(await running.chat()).status_code for _ in range(2)] == [200, 429]
        running.admin = running.client.headers["authorization"]  # type: ignore[attr-defined]
        await sign_in(running, "other")
        assert (await running.chat()).status_code == 200


async def test_limits_per_user_and_model(serving: Serving, tmp_path: Path) -> None:
    limits = (LimitConfig(per="user", requests_per_minute=1), LimitConfig(per="model", requests_per_minute=3))
    async with serving(**settings(tmp_path, limits=limits)) as running:
        statuses = [(await running.chat(user=user)).status_code for user in ("ann", "ann", "bob", "carl", "dora")]
        assert statuses == [200, 429, 200, 200, 429]


@pytest.mark.parametrize("characters", [600, LONG_CHARACTERS + 1])
async def test_a_prompt_that_is_too_long_counts_and_the_reply_says_so(
    serving: Serving, tmp_path: Path, characters: int
) -> None:
    tier = TierConfig(name="free", context_tokens=64, requests_per_minute=10, tokens_per_minute=10**6)
    async with serving(**settings(tmp_path, tier)) as running:
        await sign_in(running)
        message = {"role": "user", "content": "x" * characters}
        for left in (9, 8):
            refused = await running.chat(messages=[message])
            assert refused.status_code == 400 and refused.headers["x-ratelimit-remaining-requests"] == str(left)
            assert refused.headers["x-ratelimit-limit-tokens"] == "1000000"


async def test_the_tier_s_share_of_the_context(serving: Serving, tmp_path: Path) -> None:
    async with serving(**settings(tmp_path, TierConfig(name="free", context_tokens=64))) as running:
        await sign_in(running)
        assert (await running.complete(prompt="a" * 30, max_tokens=30)).status_code == 200
        refused = await running.complete(prompt="a" * 60, max_tokens=30)
        assert refused.status_code == 400
        assert refused.headers["x-penstock-reason"] == "context_quota"


async def test_two_gateways_share_limits_through_redis(serving: Serving, tmp_path: Path, valkey: Any) -> None:
    counters = CountersConfig(url=f"redis://127.0.0.1:{valkey.port}")
    options = settings(tmp_path, TierConfig(name="free", requests_per_minute=5), counters=counters)
    async with serving(**options) as one, serving(**options) as two:
        await sign_in(one)
        two.client.headers["authorization"] = one.client.headers["authorization"]
        replies = await asyncio.gather(*(gateway.chat() for gateway in (one, two) for _ in range(6)))
        assert sum(reply.status_code == 200 for reply in replies) == 5


@pytest.mark.parametrize(("seconds", "shown"), [(0.02, "20ms"), (6.4, "6s"), (360.0, "6m0s"), (61.0, "1m1s")])
def test_durations(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


async def test_limits_of_a_tenant_and_a_key_are_changed_while_it_runs(serving: Serving, tmp_path: Path) -> None:
    tier = TierConfig(name="free", requests_per_minute=100, concurrent_requests=7)
    async with serving(**settings(tmp_path, tier)) as running:
        await sign_in(running)
        client = running.client
        key = (await client.get("/v1/admin/keys")).json()["data"][0]["id"]

        async def change(path: str, **limits: Any) -> Any:
            reply = await client.patch(f"/v1/admin/{path}", json={"limits": limits})
            return reply.json() if reply.status_code == 200 else reply

        assert (await change("tenants/acme", requests_per_minute=2))["limits"] == {"requests_per_minute": 2}
        replies = [await running.chat(max_tokens=1) for _ in range(3)]
        assert [reply.status_code for reply in replies] == [200, 200, 429], "instead of the tier's 100"
        assert (await change("tenants/acme", daily_budget=5.0))["limits"]["requests_per_minute"] == 2, "others stay"
        shown = (await client.get("/v1/admin/tenants/acme")).json()
        assert {name: shown["allowed"][name] for name in list(shown["allowed"])[:5]} == {
            "requests_per_minute": 2,
            "tokens_per_minute": None,
            "concurrent_requests": 7,
            "daily_budget": 5.0,
            "monthly_budget": None,
        }
        assert shown["spent"]["today"] == shown["spent"]["month"] > 0
        assert (await client.get("/v1/models")).json()["data"][0]["limits"]["requests_per_minute"] == 2
        await change("tenants/acme", requests_per_minute=None)
        assert (await running.chat(max_tokens=1)).status_code == 200, "the tier's again"

        await change(f"keys/{key}", daily_budget=0.0)
        refused = await running.chat(max_tokens=1)
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "insufficient_quota"
        assert "budget of this key" in refused.json()["error"]["message"]
        made = await client.post("/v1/admin/keys", json={"tenant": "acme", "limits": {"requests_per_minute": 1}})
        other = {"authorization": f"Bearer {made.json()['key']}"}
        body = {"model": "tiny", "prompt": "hi", "max_tokens": 1}
        statuses = [(await client.post("/v1/completions", json=body, headers=other)).status_code for _ in range(2)]
        assert statuses == [200, 429], "a key's hold for that key alone"

        for wrong in ({"requests_per_minute": 0}, {"daily_budget": -1}, {"nothing": 1}, {"tokens_per_minute": "many"}):
            assert (await change("tenants/acme", **wrong)).status_code == 400
        assert (await change("tenants/nobody", daily_budget=1)).status_code == 404
        assert (await change("keys/psk_nothing0", daily_budget=1)).status_code == 404
        assert (await client.get("/v1/admin/tenants/nobody")).status_code == 404
