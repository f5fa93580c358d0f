"""R-CACHE-1, R-CACHE-2: answers given again: which requests, whose, at what price, and how to be rid of them."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from penstock.backends.embedder import Embedder
from penstock.backends.encoder import EncoderBackend
from penstock.config.cache import CacheConfig
from penstock.config.encoders import EncoderConfig
from penstock.config.guardrails import GuardrailConfig
from penstock.config.schema import PriceConfig, TierConfig
from penstock.engine.request import Request
from penstock.gateway.response_cache.cache import HEADER, ResponseCache
from penstock.routing.encoders import Encoders
from penstock.text import TextModel
from tests.gateway.conftest import Running, Serving, events, eventually
from tests.scripted import ScriptedEngine

CACHE = HEADER.decode()
EXACT = CacheConfig(exact="on")


@pytest.fixture
def counting(text: TextModel) -> ScriptedEngine:
    """Says something else every time it is asked."""
    count = 0

    def script(request: Request) -> list[int]:
        nonlocal count
        count += 1
        return [*text.encode(f"answer number {count}, which is long enough for several events"), text.eos_token_ids[0]]

    return ScriptedEngine(text, script)


@pytest.fixture
def encoders(encoder_endpoint: str) -> Callable[[], Encoders]:
    def make() -> Encoders:
        embedder = Embedder("minilm", "minilm", EncoderBackend(encoder_endpoint), wait_s=60)
        return Encoders([embedder], [EncoderConfig(name="minilm")])

    return make


async def ask(running: Running, content: str = "hi", **options: Any) -> tuple[str, str | None]:
    """What was said, and what the header says of where it came from."""
    headers = options.pop("headers", {})
    body = {"model": "tiny", "temperature": 0, "messages": [{"role": "user", "content": content}], **options}
    reply = await running.client.post("/v1/chat/completions", json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    await settled(running)
    return reply.json()["choices"][0]["message"]["content"], reply.headers.get(CACHE)


async def settled(running: Running) -> None:
    """Until what follows an answer is done."""
    await eventually(lambda: not running.parts.background)


async def test_the_same_request_gets_the_same_answer_without_the_engine(
    serving: Serving, counting: ScriptedEngine
) -> None:
    async with serving(counting, cache=EXACT) as running:
        first = await ask(running)
        assert first == ("answer number 1, which is long enough for several events", "miss")
        assert await ask(running) == (first[0], "exact")
        assert len(counting.seen) == 1
        assert await running.metric('penstock_cache_lookups_total{cache="exact",outcome="hit"}') == 1
        assert await running.metric('penstock_cache_lookups_total{cache="exact",outcome="miss"}') == 1
        assert await running.metric("penstock_cache_saved_tokens_total") == len(first[0]) + 1


async def test_anything_that_decides_the_answer_makes_another_request(
    serving: Serving, counting: ScriptedEngine
) -> None:
    async with serving(counting, cache=EXACT) as running:
        await ask(running)
        changes: list[dict[str, Any]] = [
            {"content": "ho"}, {"max_tokens": 20}, {"stop": ["zebra"]}, {"logit_bias": {"3": 1}}, {"n": 2},
            {"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "hi"}]},
            {"presence_penalty": 1}, {"response_format": {"type": "json_object"}}, {"min_tokens": 2},
        ]  # fmt: skip
        for change in changes:
            assert (await ask(running, **change))[1] == "miss", change
        for same in ({"user": "ann"}, {"metadata": {"a": "b"}}, {"seed": 7}, {"service_tier": "flex"}):
            assert (await ask(running, **same))[1] == "exact", same


async def test_an_answer_with_chance_in_it_is_kept_only_when_the_client_asks(
    serving: Serving, counting: ScriptedEngine
) -> None:
    async with serving(counting, cache=EXACT) as running:
        assert (await ask(running, temperature=1))[1] is None
        wanted = {"headers": {CACHE: "exact"}}
        assert (await ask(running, temperature=1, **wanted))[1] == "miss"
        assert (await ask(running, temperature=1, **wanted))[1] == "exact"
        assert (await ask(running, temperature=1))[1] is None
        assert (await ask(running, temperature=1, seed=5))[1] == "miss"
        assert (await ask(running, temperature=1, seed=5))[1] == "exact"
        assert (await ask(running, temperature=1, seed=6))[1] == "miss"


async def test_the_header_turns_it_off_and_computes_anew(serving: Serving, counting: ScriptedEngine) -> None:
    async with serving(counting, cache=EXACT) as running:
        await ask(running)
        assert await ask(running, headers={CACHE: "off"}) == (
            "answer number 2, which is long enough for several events",
            None,
        )
        renewed, source = await ask(running, headers={CACHE: "refresh"})
        assert source == "miss" and "number 3" in renewed
        assert await ask(running) == (renewed, "exact")
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
        for wish in ("sometimes", "semantic"):
            reply = await running.client.post("/v1/chat/completions", json=body, headers={CACHE: wish})
            assert reply.status_code == 400 and reply.json()["error"]["param"] == CACHE
    async with serving(counting) as running:
        reply = await running.client.post("/v1/chat/completions", json=body, headers={CACHE: "exact"})
        assert reply.status_code == 400 and "cache.exact" in reply.json()["error"]["message"]
        assert (await running.client.get("/v1/cache")).status_code == 404
        assert (await ask(running, headers={CACHE: "off"}))[1] is None


async def test_a_kept_answer_streams_and_serves_every_api_family(serving: Serving, counting: ScriptedEngine) -> None:
    async with serving(counting, cache=EXACT) as running:
        said, _ = await ask(running)
        body = {
            "model": "tiny", "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
            "messages": [{"role": "user", "content": "hi"}],
        }  # fmt: skip
        reply = await running.client.post("/v1/chat/completions", json=body)
        assert reply.headers[CACHE] == "exact"
        *chunks, usage, done = events(reply.text)
        assert done == "[DONE]"
        deltas = [json.loads(chunk)["choices"][0] for chunk in chunks]
        assert "".join(delta["delta"].get("content") or "" for delta in deltas) == said
        assert len(deltas) > 3 and deltas[-1]["finish_reason"] == "stop"
        used = json.loads(usage)["usage"]
        assert used["completion_tokens"] == len(said) + 1
        assert used["prompt_tokens_details"]["cached_tokens"] == used["prompt_tokens"]
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{running.port}/v1", api_key="none", max_retries=0)
        response = await client.responses.create(model="tiny", input="hi", temperature=0, store=False)
        assert response.output_text == said
        await client.close()
        assert len(counting.seen) == 1


async def test_logprobs_and_text_completions_are_kept_too(serving: Serving, counting: ScriptedEngine) -> None:
    async with serving(counting, cache=EXACT) as running:
        body = {"temperature": 0, "logprobs": 2, "max_tokens": 8, "echo": True}
        first = (await running.complete(**body)).json()
        await settled(running)
        again = await running.complete(**body)
        assert again.headers[CACHE] == "exact"
        assert again.json()["choices"] == first["choices"]
        assert len(counting.seen) == 1


async def test_tenants_never_share_and_evict_only_their_own(
    serving: Serving, counting: ScriptedEngine, tmp_path: Path
) -> None:
    settings = {
        "store_url": f"sqlite:///{tmp_path}/s.db", "cache": EXACT, "tiers": (TierConfig(name="standard"),),
        "default_tier": "standard",
    }  # fmt: skip
    async with serving(counting, **settings) as running:
        keys = await make_keys(running, "acme", "other")
        acme, other = ({"authorization": f"Bearer {keys[name]}"} for name in ("acme", "other"))
        assert (await ask(running, headers=acme))[1] == "miss"
        assert (await ask(running, headers=other))[1] == "miss"
        assert (await ask(running, headers=acme))[1] == "exact"
        shown = (await running.client.get("/v1/cache", headers=acme)).json()
        assert shown["answers"] == 1 and shown["exact"] == "on"
        gone = await running.client.delete("/v1/cache", headers=acme)
        assert gone.json() == {"object": "cache.evicted", "answers": 1}
        assert (await ask(running, headers=acme))[1] == "miss"
        assert (await ask(running, headers=other))[1] == "exact"
        everybody = await running.client.delete("/v1/admin/cache?tenant=other", headers=acme)
        assert everybody.status_code == 403
        admin = {"authorization": f"Bearer {keys['admin']}"}
        assert (await running.client.get("/v1/admin/cache", headers=admin)).json()["answers"] == 2
        assert (await running.client.delete("/v1/admin/cache?model=tiny", headers=admin)).json()["answers"] == 2
        assert (await running.client.delete("/v1/admin/cache?colour=red", headers=admin)).status_code == 400


async def make_keys(running: Running, *tenants: str) -> dict[str, str]:
    """A key per tenant, and one that may do everything; made first, while nobody needs one."""
    keys = {}
    headers: dict[str, str] = {}
    for name in ("admin", *tenants):
        await running.client.post("/v1/admin/tenants", json={"id": name, "tier": "standard"}, headers=headers)
        scopes = ["inference", "admin"] if name == "admin" else ["inference"]
        made = await running.client.post("/v1/admin/keys", json={"tenant": name, "scopes": scopes}, headers=headers)
        assert made.status_code in (200, 201), made.text
        keys[name] = made.json()["key"]
        headers = {"authorization": f"Bearer {keys['admin']}"}
    return keys


async def test_a_kept_answer_costs_the_cached_price(serving: Serving, counting: ScriptedEngine, tmp_path: Path) -> None:
    settings = {
        "store_url": f"sqlite:///{tmp_path}/s.db", "cache": EXACT,
        "prices": (PriceConfig(model="tiny", input_price=10.0, cached_price=1.0, output_price=100.0),),
    }  # fmt: skip
    async with serving(counting, **settings) as running:
        said, _ = await ask(running)
        usage = (await running.client.get("/v1/usage?by=model")).json()["data"][0]
        first = float(usage["cost"])
        assert await ask(running) == (said, "exact")
        both = (await running.client.get("/v1/usage?by=model")).json()["data"][0]
        tokens = usage["prompt_tokens"] + usage["completion_tokens"]
        assert float(both["cost"]) - first == pytest.approx(tokens * 1.0 / 1e6)
        assert both["requests"] == 2


async def test_guardrails_of_today_apply_to_an_answer_of_yesterday(serving: Serving, counting: ScriptedEngine) -> None:
    rule = GuardrailConfig(name="no numbers", stage="output", action="redact", words=("number",), replacement="[…]")
    async with serving(counting, cache=EXACT, guardrails=(rule,)) as running:
        first = await ask(running)
        assert first[0].startswith("answer […] 1")
        assert await ask(running) == (first[0], "exact")


async def test_an_answer_that_broke_off_is_not_kept(serving: Serving, text: TextModel) -> None:
    engine = ScriptedEngine(text)
    engine.hold = True
    async with serving(engine, cache=EXACT) as running:
        body = {"model": "tiny", "temperature": 0, "messages": [{"role": "user", "content": "hi"}]}
        asking = asyncio.create_task(running.client.post("/v1/chat/completions", json=body))
        await eventually(lambda: bool(engine.seen))
        asking.cancel()
        await eventually(lambda: bool(engine.aborted))
        engine.hold = False
        await settled(running)
        assert (await ask(running))[1] == "miss"


async def test_the_same_question_in_other_words_is_found_and_a_different_one_is_not(
    serving: Serving, counting: ScriptedEngine, encoders: Callable[[], Encoders]
) -> None:
    async with serving(counting, encoders=encoders(), cache=CacheConfig(semantic="on", lookup_s=5)) as running:
        assert (await ask(running, "warm up"))[1] == "miss"  # nobody waits for the encoder to start
        await eventually(lambda: running.parts.encoders.find("minilm").up)
        said, source = await ask(running, "How do I reset my password?")
        assert source == "miss"
        assert await ask(running, "What is the best way to reset my password?") == (said, "semantic")
        assert await ask(running, "how can i reset my password") == (said, "semantic")
        different = ["How do I never reset my password?", "How do I reset my 2 passwords?", "How do I reset my router?"]
        for other in different:
            assert (await ask(running, other))[1] == "miss", other
        for sign in "+-":  # files whose words are the same
            data = base64.b64encode(f"x = a {sign} b".encode()).decode()
            file = {"type": "file", "file": {"filename": "a.py", "file_data": data}}
            about = [{"role": "user", "content": [file, {"type": "text", "text": "What does this print?"}]}]
            assert (await running.chat(temperature=0, messages=about)).headers[CACHE] == "miss"
        question = {"role": "user", "content": "How can I reset my password?"}
        walls: list[dict[str, Any]] = [
            {"messages": [{"role": "system", "content": "Be rude."}, question]},
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, question]},
            {"max_tokens": 9},
            {"stop": "zebra"},
        ]
        for wall in walls:
            assert (await ask(running, "How can I reset my password?", **wall))[1] == "miss", wall
        assert (await ask(running, "How could I reset my password?", headers={CACHE: "off"}))[1] is None
        assert await running.metric('penstock_cache_lookups_total{cache="semantic",outcome="hit"}') == 2
        assert await running.metric('penstock_cache_refusals_total{reason="negation"}') == 1


async def test_what_was_answered_before_the_encoder_was_up_is_found_in_other_words_too(
    serving: Serving, counting: ScriptedEngine, encoders: Callable[[], Encoders]
) -> None:
    both = CacheConfig(exact="on", semantic="on", lookup_s=5)
    async with serving(counting, encoders=encoders(), cache=both) as running:
        said, source = await ask(running, "How do I reset my password?")
        assert source == "miss" and await ask(running, "How do I reset my password?") == (said, "exact")
        cache = running.parts.cache
        assert isinstance(cache, ResponseCache)
        await eventually(lambda: cache._opening is not None and cache._opening.done() and not cache._unindexed)
        assert await ask(running, "What is the best way to reset my password?") == (said, "semantic")


async def test_a_semantic_hit_that_a_user_dislikes_is_forgotten(
    serving: Serving, counting: ScriptedEngine, encoders: Callable[[], Encoders], tmp_path: Path
) -> None:
    settings = {"store_url": f"sqlite:///{tmp_path}/s.db", "cache": CacheConfig(semantic="asked", lookup_s=5)}
    async with serving(counting, encoders=encoders(), **settings) as running:
        await running.parts.encoders.find("minilm").open()
        wanted = {"headers": {CACHE: "semantic"}}
        assert (await ask(running, "Who wrote Hamlet?"))[1] is None
        await ask(running, "Who wrote Hamlet?", **wanted)
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Who is the author of Hamlet?"}]}
        body["temperature"] = 0
        hit = await running.client.post("/v1/chat/completions", json=body, **wanted)
        assert hit.headers[CACHE] == "semantic"
        await settled(running)
        cache = running.parts.cache
        assert isinstance(cache, ResponseCache)
        assert not await cache.suspect("somebody else", hit.json()["id"])
        for rating, suspected in (("up", 0), ("down", 1), ("down", 1)):
            vote = {"response_id": hit.json()["id"], "rating": rating}
            assert (await running.client.post("/v1/feedback", json=vote)).status_code == 200
            assert await running.metric("penstock_cache_suspected_false_hits_total") == suspected
        assert await running.metric("penstock_cache_suspected_false_hits_total") == 1
        assert (await ask(running, "Who is the author of Hamlet?", **wanted))[1] == "miss"
