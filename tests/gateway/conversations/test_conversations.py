"""Conversations by session id through the API: clients send what is new, the gateway remembers the rest."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.config.context import ConversationsConfig
from penstock.config.schema import TierConfig
from penstock.engine.request import Request
from penstock.text import TextModel
from tests.gateway.accounting.test_quotas import sign_in
from tests.gateway.api.test_responses import prompt, sdk, stored
from tests.gateway.conftest import Running, Serving, events, eventually
from tests.gateway.generation.test_tool_choice import CALL, CLOCK, WEATHER, says
from tests.scripted import ScriptedEngine


async def say(running: Running, words: str, session: str = "s", **body: Any) -> httpx.Response:
    return await running.chat(messages=[{"role": "user", "content": words}], conversation=session, **body)


async def kept(running: Running, session: str = "s", **query: str) -> dict[str, Any]:
    found: dict[str, Any] = (await running.client.get(f"/v1/conversations/{session}", params=query)).json()
    return found


async def test_the_next_turn_knows_the_ones_before(serving: Serving, text: TextModel, tmp_path: Path) -> None:
    async with serving(**stored(tmp_path)) as running:
        system = {"role": "system", "content": "Be kind."}
        first = await running.chat(messages=[system, {"role": "user", "content": "hi"}], conversation="s")
        assert first.json()["conversation"] == {"id": "s", "turns": 1, "dropped_turns": 0, "summarised_turns": 0}
        assert first.headers["x-penstock-context"] == "turns=1, dropped_turns=0, summarised_turns=0"
        streamed = await running.client.post(
            "/v1/chat/completions",
            json={"model": "tiny", "stream": True, "messages": [{"role": "user", "content": "again"}]},
            headers={"x-session-id": "s"},
        )
        opening, *_ = events(streamed.text)
        assert json.loads(opening)["conversation"]["turns"] == 2
        await sdk(running).responses.create(model="tiny", input="third", conversation="s", instructions="Be brief.")
        assert prompt(running, text) == (
            "<|system|>Be brief.<|end|><|user|>hi<|end|><|assistant|>Hello, world!<|end|>"
            "<|user|>again<|end|><|assistant|>Hello, world!<|end|><|user|>third<|end|><|assistant|>"
        )
        await say(running, "fourth")
        assert prompt(running, text).startswith("<|system|>Be kind.<|end|>"), "instructions are for one answer"
        assert await running.metric("penstock_conversation_turns_total") == 4


async def test_it_can_be_listed_read_and_deleted(serving: Serving, text: TextModel, tmp_path: Path) -> None:
    async with serving(**stored(tmp_path)) as running:
        await say(running, "hi")
        await say(running, "other", "t")
        listed = (await running.client.get("/v1/conversations")).json()["data"]
        assert [(entry["id"], entry["turns"], entry["object"]) for entry in listed] == [
            ("t", 1, "conversation"),
            ("s", 1, "conversation"),
        ]
        assert listed[0]["expires_at"] - listed[0]["updated_at"] == 3600
        assert (await kept(running))["messages"] == [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "Hello, world!"},
        ]
        deleted = await running.client.delete("/v1/conversations/s")
        assert deleted.json() == {"id": "s", "object": "conversation.deleted", "deleted": True}
        for reply in (
            await running.client.get("/v1/conversations/s"),
            await running.client.delete("/v1/conversations/s"),
        ):
            assert reply.status_code == 404
        await say(running, "fresh")
        assert prompt(running, text) == "<|user|>fresh<|end|><|assistant|>"
        for query in ("limit=0", "limit=x", "page=2"):
            assert (await running.client.get(f"/v1/conversations?{query}")).status_code == 400


async def test_tenants_and_users_share_no_session(serving: Serving, text: TextModel, tmp_path: Path) -> None:
    async with serving(**stored(tmp_path)) as running:
        await sign_in(running, "acme")
        running.admin = running.client.headers["authorization"]  # type: ignore[attr-defined]
        await say(running, "a secret", user="ann")
        for user in ({"user": "bob"}, {}):
            await say(running, "what?", **user)
            assert "secret" not in prompt(running, text)
        assert (await running.client.get("/v1/conversations/s", params={"user": "ann"})).status_code == 200
        await sign_in(running, "rival", user="ann")
        await say(running, "what?")
        assert "secret" not in prompt(running, text)
        assert len((await kept(running))["messages"]) == 2
        assert (await running.client.get("/v1/conversations?user=bob")).status_code == 403
        await say(running, "still me", user="bob")
        assert "what?" in prompt(running, text), "a key that belongs to a user says who it is"


async def test_function_calls_are_answered_over_turns(serving: Serving, text: TextModel, tmp_path: Path) -> None:
    async with serving(says(text, CALL), **stored(tmp_path)) as running:
        made = (await say(running, "Weather?", tools=[WEATHER, CLOCK])).json()["choices"][0]["message"]["tool_calls"]
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "sunny"} for call in made]
        reply = await running.chat(messages=results, conversation="s", tools=[WEATHER, CLOCK])
        assert reply.status_code == 200 and reply.json()["conversation"]["turns"] == 1
        stray = [{"role": "tool", "tool_call_id": "nobody", "content": "x"}]
        assert (await running.chat(messages=stray, conversation="s", tools=[WEATHER])).status_code == 400
        outputs = [{"type": "function_call_output", "call_id": call["id"], "output": "hot"} for call in made]
        echoed = [{"type": "function_call", "call_id": call["id"], **call["function"]} for call in made]
        second = await sdk(running).responses.create(model="tiny", input=[*echoed, *outputs], conversation="s")  # type: ignore[arg-type]
        assert second.status == "completed"
        assert (await kept(running))["turns"] == 1


async def test_a_turn_that_fails_or_is_left_never_happened(serving: Serving, text: TextModel, tmp_path: Path) -> None:
    engine = ScriptedEngine(text, step_s=0.005)
    async with serving(engine, **stored(tmp_path)) as running:
        assert (await say(running, "x" * 600)).status_code == 400
        assert (await say(running, "hi", n=2)).json()["error"]["param"] == "n"
        async with running.client.stream(
            "POST",
            "/v1/chat/completions",
            json={
                "model": "tiny",
                "messages": [{"role": "user", "content": "left"}],
                "stream": True,
                "conversation": "s",
            },
        ) as stream:
            async for _ in stream.aiter_bytes():
                engine.hold = True
                break
        await eventually(lambda: bool(engine.aborted))
        engine.hold = False
        assert (await running.client.get("/v1/conversations/s")).status_code == 404
        await say(running, "hello")
        assert (await kept(running))["turns"] == 1


async def test_turns_sent_at_once_are_answered_in_order_or_refused(
    serving: Serving, text: TextModel, tmp_path: Path
) -> None:
    engine = ScriptedEngine(text, max_model_len=4096)
    patient, impatient = ConversationsConfig(wait_s=120.0), ConversationsConfig(wait_s=0.3)
    async with serving(engine, conversations=patient, **stored(tmp_path)) as running:
        replies = await asyncio.gather(*(say(running, f"turn {i}") for i in range(4)))
        assert sorted(reply.json()["conversation"]["turns"] for reply in replies) == [1, 2, 3, 4]
        assert (await kept(running))["turns"] == 4
    engine.hold = True
    async with serving(engine, conversations=impatient, **stored(tmp_path)) as running:
        slow = asyncio.create_task(say(running, "slow"))
        await eventually(lambda: len(engine.seen) == 5)
        refused = await say(running, "impatient")
        assert refused.status_code == 409 and refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "conversation_busy"
        engine.hold = False
        assert (await slow).status_code == 200


async def test_a_client_that_keeps_its_own_history_is_not_told_it_twice(
    serving: Serving, text: TextModel, tmp_path: Path
) -> None:
    async with serving(**stored(tmp_path)) as running:
        await say(running, "hi")
        own = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "Hello, world!"},
            {"role": "user", "content": "more"},
        ]
        await running.chat(messages=own, conversation="s")
        assert prompt(running, text).count("hi<|end|>") == 1
        assert (await kept(running))["turns"] == 2


async def test_the_oldest_turns_leave_when_the_window_is_full(
    serving: Serving, text: TextModel, tmp_path: Path
) -> None:
    engine = ScriptedEngine(text, max_model_len=400)
    async with serving(engine, **stored(tmp_path)) as running:
        system = {"role": "system", "content": "Be kind."}
        starts = []
        for i in range(20):
            words = {"role": "user", "content": f"this is turn {i:2}"}
            reply = await running.chat(messages=[system, words], conversation="s", max_tokens=100)
            assert reply.status_code == 200
            report = reply.json()["conversation"]
            spoken = prompt(running, text)
            assert len(engine.seen[-1].prompt) + 100 <= 400
            assert spoken.startswith("<|system|>Be kind.<|end|>") and f"turn {i:2}" in spoken
            assert report["turns"] == i + 1 and spoken.count("<|user|>") == i + 1 - report["dropped_turns"]
            starts.append(report["dropped_turns"])
        assert starts[0] == 0 and starts[-1] > 10
        assert len(set(starts)) < 10, "the window moves in leaps, so that prompts find their prefix in the cache"
        dropped = 'penstock_conversation_dropped_turns_total{how="truncated"}'
        assert await running.metric(dropped) == starts[-1]


async def test_turns_that_were_left_out_come_back_in_a_larger_window(
    serving: Serving, text: TextModel, tmp_path: Path
) -> None:
    async with serving(ScriptedEngine(text, max_model_len=500), **stored(tmp_path)) as running:
        for i in range(5):
            narrow = await say(running, f"this is turn {i}", max_tokens=400)
        assert narrow.json()["conversation"]["dropped_turns"] == 2
        wide = await say(running, "and now?", max_tokens=50)
        assert wide.json()["conversation"]["dropped_turns"] == 0 and "turn 0" in prompt(running, text)


async def test_tools_of_the_client_and_long_histories(serving: Serving, text: TextModel, tmp_path: Path) -> None:
    """A conversation whose window is full still takes results of calls, with the call they answer."""
    engine = says(text, CALL)
    async with serving(engine, **stored(tmp_path)) as running:
        engine.info = dataclasses.replace(engine.info, max_model_len=4096)
        for i in range(4):
            made = (await say(running, f"{i} " + "Weather? " * 60, tools=[WEATHER, CLOCK])).json()
            calls = made["choices"][0]["message"]["tool_calls"]
            results = [{"role": "tool", "tool_call_id": call["id"], "content": "sun " * 40} for call in calls]
            reply = await running.chat(messages=results, conversation="s", tools=[WEATHER, CLOCK], max_tokens=1500)
            assert reply.status_code == 200, reply.text
            assert prompt(running, text).count("sun sun") >= 2
        assert reply.json()["conversation"]["dropped_turns"] > 0


async def test_the_tier_s_context_is_what_must_hold_it(serving: Serving, text: TextModel, tmp_path: Path) -> None:
    tier = TierConfig(name="free", context_tokens=200)
    async with serving(tiers=(tier,), default_tier="free", **stored(tmp_path)) as running:
        await sign_in(running)
        for i in range(10):
            reply = await say(running, f"this is turn {i}", max_tokens=50)
            assert reply.status_code == 200 and len(running.engine.seen[-1].prompt) <= 150
        assert reply.json()["conversation"]["dropped_turns"] > 0


class Forgetful:
    """An engine that knows a name only if it is in its prompt, and writes notes on names it sees."""

    def __init__(self, text: TextModel, window: int) -> None:
        self.text = text
        self.notes = 0
        self.engine = ScriptedEngine(text, self.reply, max_model_len=window)

    def reply(self, request: Request) -> list[int]:
        words = self.text.decode(request.prompt, skip_special=False)
        found = re.search(r"my name is (\w+)", words, re.IGNORECASE)
        if "Summarize what the user said" in words:
            self.notes += 1
            said = f"The user said: my name is {found[1]}." if found else "Nothing of note."
        else:
            said = f"You are {found[1]}." if found else "I do not know you."
        return [*self.text.encode(said), self.text.eos_token_ids[0]]


@pytest.mark.parametrize("overflow", ["truncate", "summarise"])
async def test_forty_turns_in_a_window_of_2048(
    serving: Serving, text: TextModel, tmp_path: Path, overflow: str
) -> None:
    model = Forgetful(text, 2048)
    config = ConversationsConfig(reply_tokens=200)
    async with serving(model.engine, conversations=config, **stored(tmp_path)) as running:
        named = {"id": "s", "overflow": overflow}
        for i in range(40):
            words = "My name is Zebedee." if i == 0 else f"Turn {i}: what do you think of {'this ' * 12}?"
            reply = await running.chat(messages=[{"role": "user", "content": words}], conversation=named)
            assert reply.status_code == 200, reply.text
        asked = await running.chat(messages=[{"role": "user", "content": "Who am I?"}], conversation=named)
        answer, report = asked.json()["choices"][0]["message"]["content"], asked.json()["conversation"]
        assert report["turns"] == 41 and report["dropped_turns"] > 15
        if overflow == "truncate":
            assert answer == "I do not know you." and report["summarised_turns"] == 0 and not model.notes
            return
        assert answer == "You are Zebedee."
        assert report["summarised_turns"] == report["dropped_turns"], "nothing was dropped without notes"
        assert 0 < model.notes < 20
        assert "Zebedee" in (await kept(running))["summary"]["text"]
        ahead = 'penstock_conversation_summaries_total{when="ahead",outcome="done"}'
        assert await running.metric(ahead) > 0
        used = (await running.client.get("/v1/usage?by=feature")).json()["data"]
        assert {row["feature"] for row in used} == {"", "conversation summary"}, "notes are paid for, under their name"


async def test_a_turn_waits_for_notes_that_it_needs(serving: Serving, text: TextModel, tmp_path: Path) -> None:
    model = Forgetful(text, 1024)
    async with serving(model.engine, **stored(tmp_path)) as running:
        named = {"id": "s", "overflow": "summarise"}
        await running.chat(messages=[{"role": "user", "content": "My name is Zebedee."}], conversation=named)
        for _ in range(2):
            long = {"role": "user", "content": "well " * 70}
            reply = await running.chat(messages=[long], conversation=named, max_tokens=300)
        assert reply.json()["choices"][0]["message"]["content"] == "You are Zebedee."
        assert reply.json()["conversation"]["summarised_turns"] >= 1


async def test_what_is_wrong_with_a_session_is_said(serving: Serving, tmp_path: Path) -> None:
    async with serving(**stored(tmp_path)) as running:
        for body, headers in (
            ({"conversation": "a b"}, {}),
            ({}, {"x-session-id": "a/b"}),
            ({"conversation": "a"}, {"x-session-id": "b"}),
            ({"conversation": {"id": "a", "overflow": "shrink"}}, {}),
            ({"conversation": {"overflow": "truncate"}}, {}),
        ):
            json = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], **body}
            reply = await running.client.post("/v1/chat/completions", json=json, headers=headers)
            assert reply.status_code == 400, body
        json = {"model": "tiny", "input": "x", "conversation": "a", "previous_response_id": "resp_1"}
        assert (await running.client.post("/v1/responses", json=json)).status_code == 400


async def test_without_a_store_the_field_is_refused_and_the_header_is_only_an_id(serving: Serving) -> None:
    async with serving() as running:
        refused = await say(running, "x")
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "unsupported_parameter"
        reply = await running.client.post(
            "/v1/chat/completions",
            json={"model": "tiny", "messages": [{"role": "user", "content": "x"}]},
            headers={"x-session-id": "s"},
        )
        assert reply.status_code == 200 and "x-penstock-context" not in reply.headers
        assert (await running.client.get("/v1/conversations")).json()["data"] == []
        assert (await running.client.get("/v1/conversations/s")).status_code == 404


async def test_gateways_share_sessions_through_valkey(serving: Serving, text: TextModel, valkey: Any) -> None:
    config = ConversationsConfig(url=f"redis://127.0.0.1:{valkey.port}")
    async with serving(conversations=config) as one, serving(conversations=config) as two:
        await say(one, "hi")
        await say(two, "there")
        assert "hi<|end|>" in prompt(two, text)
        assert (await kept(one))["turns"] == 2
        valkey.stop()
        away = await say(one, "lost?")
        assert away.status_code == 503
        assert (await one.chat()).status_code == 200, "what needs no memory goes on"


async def test_what_is_lost_with_redis_is_what_the_docs_say(serving: Serving, text: TextModel, valkey: Any) -> None:
    """Flushed between turns, flushed during a turn, gone at the end of one, gone, and back without its data."""
    from redis.asyncio import Redis

    url = f"redis://127.0.0.1:{valkey.port}"
    engine = ScriptedEngine(text)
    async with serving(engine, conversations=ConversationsConfig(url=url)) as running, Redis.from_url(url) as redis:
        await say(running, "first")
        await redis.flushall()
        again = await say(running, "second")
        assert again.headers["x-penstock-context"].startswith("turns=1,"), "it begins anew, and says so"
        assert "first" not in prompt(running, text)

        engine.hold = True
        turn = asyncio.create_task(say(running, "third"))
        await eventually(lambda: len(engine.seen) == 3)
        await redis.flushall()
        engine.hold = False
        answered = await turn
        assert answered.status_code == 200 and answered.headers["x-penstock-context"].startswith("turns=2,")
        assert (await running.client.get("/v1/conversations/s")).status_code == 404, "the turn was not stored"

        engine.hold = True
        turn = asyncio.create_task(say(running, "fourth"))
        await eventually(lambda: len(engine.seen) == 4)
        valkey.stop()
        engine.hold = False
        assert (await turn).status_code == 503, "an answer that is not remembered is an error"
        assert (await say(running, "fifth")).status_code == 503
        assert (await running.chat()).status_code == 200, "what needs no memory goes on"
        valkey.start()
        back = await say(running, "sixth")
        assert back.status_code == 200 and back.headers["x-penstock-context"].startswith("turns=1,")
