"""The Responses API, as the official SDK uses it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from penstock.gateway.api.openai.responses.store import ResponseStore
from penstock.gateway.generation.schemas import ChatMessage
from penstock.storage import DatabaseError, open_database
from penstock.text import TextModel
from tests.gateway.accounting.test_quotas import sign_in
from tests.gateway.conftest import Running, Serving
from tests.gateway.generation.test_tool_choice import CALL, says
from tests.scripted import ScriptedEngine

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
CLOCK = {"type": "function", "name": "clock", "parameters": None, "strict": False}


def sdk(running: Running, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{running.port}/v1", api_key=key, max_retries=0)


def stored(tmp_path: Path) -> dict[str, Any]:
    return {"store_url": f"sqlite:///{tmp_path / 'state.db'}"}


def prompt(running: Running, text: TextModel) -> str:
    return text.decode(running.engine.seen[-1].prompt, skip_special=False)


async def create(running: Running, **body: Any) -> Any:
    return await running.client.post("/v1/responses", json={"model": "tiny", "input": "hi", **body})


async def test_text_in_and_out(serving: Serving, text: TextModel) -> None:
    async with serving() as running:
        reply = await sdk(running).responses.create(
            model="small",
            input="hi",
            instructions="Be kind.",
            temperature=0.5,
            top_p=0.9,
            metadata={"feature": "x"},
            user="ann",
        )
        assert reply.output_text == "Hello, world!"
        assert (reply.status, reply.model, reply.store) == ("completed", "tiny", False)  # type: ignore[attr-defined]
        (message,) = reply.output
        assert message.type == "message" and message.status == "completed"
        assert reply.usage is not None
        assert reply.usage.input_tokens == len(running.engine.seen[-1].prompt)
        assert reply.usage.input_tokens_details.cached_tokens == 3
        assert reply.usage.total_tokens == reply.usage.input_tokens + reply.usage.output_tokens
        assert (reply.instructions, reply.metadata, reply.user) == ("Be kind.", {"feature": "x"}, "ann")
        assert prompt(running, text) == "<|system|>Be kind.<|end|><|user|>hi<|end|><|assistant|>"
        params = running.engine.seen[-1].params
        assert (params.temperature, params.top_p) == (0.5, 0.9)


async def test_the_events_of_a_stream(serving: Serving) -> None:
    async with serving() as running:
        stream = await sdk(running).responses.create(model="tiny", input="hi", stream=True)
        events = [event async for event in stream]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        kinds = [event.type for event in events]
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(deltas) == "Hello, world!"
        assert [kind for kind in kinds if kind != "response.output_text.delta"] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
        done = events[-1].response
        assert done.output_text == "Hello, world!" and done.usage.output_tokens == 14
        assert events[0].response.id == done.id and events[0].response.output == []
        assert len({event.item_id for event in events if hasattr(event, "item_id")}) == 1


async def test_the_sdk_s_own_accumulator_agrees(serving: Serving, text: TextModel) -> None:
    async with (
        serving(says(text, f"One moment.\n{CALL}")) as running,
        sdk(running).responses.stream(model="tiny", input="hi", tools=[WEATHER, CLOCK]) as stream,
    ):
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
        assert kinds.count("response.function_call_arguments.done") == 2
        message, first, second = final.output
        assert message.type == "message" and message.content[0].text == "One moment."  # type: ignore[union-attr]
        assert first.type == "function_call" and json.loads(first.arguments) == {"city": "Zürich"}
        assert second.type == "function_call" and second.name == "clock" and second.status == "completed"


async def test_calls_and_their_results_make_the_prompt_of_chat(serving: Serving, text: TextModel) -> None:
    async with serving(says(text, CALL)) as running:
        client = sdk(running)
        asked = await client.responses.create(model="tiny", input="Weather?", tools=[WEATHER, CLOCK])
        calls = [item for item in asked.output if item.type == "function_call"]
        results = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"} for call in calls]
        await client.responses.create(
            model="tiny",
            input=[{"role": "user", "content": "Weather?"}, *asked.output, *results],  # type: ignore[list-item]
            tools=[WEATHER, CLOCK],
        )
        spoken = prompt(running, text)
        history = [
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "tool_calls": [
                    {"id": call.call_id, "function": {"name": call.name, "arguments": call.arguments}} for call in calls
                ],
            },
            *({"role": "tool", "tool_call_id": call.call_id, "content": "sunny"} for call in calls),
        ]
        tools = [
            {"type": "function", "function": {k: v for k, v in t.items() if k != "type"}} for t in (WEATHER, CLOCK)
        ]
        assert (await running.chat(messages=history, tools=tools)).status_code == 200
        assert prompt(running, text) == spoken


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_cut_is_incomplete(serving: Serving, stream: bool) -> None:
    async with serving() as running:
        reply = await sdk(running).responses.create(model="tiny", input="hi", max_output_tokens=5, stream=stream)
        if stream:
            (*_, last) = [event async for event in reply]
            assert last.type == "response.incomplete"
            reply = last.response
        assert reply.status == "incomplete" and reply.output_text == "Hello"
        assert reply.incomplete_details.reason == "max_output_tokens"
        assert reply.output[0].status == "incomplete"


async def test_formats_and_tool_choices_reach_the_engine(serving: Serving, text: TextModel) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    async with serving(says(text, "x")) as running:
        for body in (
            {"text": {"format": {"type": "json_object"}}},
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}},
            {"tools": [WEATHER], "tool_choice": "required"},
            {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "get_weather"}},
            {"tools": [WEATHER], "parallel_tool_calls": False},
        ):
            reply = await create(running, **body)
            assert reply.status_code == 200, reply.text
            assert running.engine.seen[-1].params.grammar
            for name in body:
                assert reply.json()[name] == body[name] or name in ("text", "tools")
        await create(running, text={"format": {"type": "text"}}, tools=[WEATHER])
        assert not running.engine.seen[-1].params.grammar


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_cover_the_text(serving: Serving, stream: bool) -> None:
    async with serving() as running:
        client = sdk(running)
        wanted: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
        reply = await client.responses.create(model="tiny", input="hi", stream=stream, **wanted)
        if stream:
            events = [event async for event in reply]
            pieces = [event.logprobs for event in events if event.type == "response.output_text.delta"]
            assert "".join(entry.token for piece in pieces for entry in piece) == "Hello, world!"
            reply = events[-1].response
        (part,) = reply.output[0].content
        assert "".join(entry.token for entry in part.logprobs) == "Hello, world!"
        assert all(entry.logprob == -0.5 and len(entry.top_logprobs) == 2 for entry in part.logprobs)
        again = await client.responses.create(model="tiny", input=[*reply.output, {"role": "user", "content": "more"}])
        assert again.output_text == "Hello, world!" and not again.output[0].content[0].logprobs  # type: ignore[union-attr]


async def test_a_stored_response_is_continued_shown_and_deleted(
    serving: Serving, text: TextModel, tmp_path: Path
) -> None:
    async with serving(**stored(tmp_path)) as running:
        client = sdk(running)
        first = await client.responses.create(model="tiny", input="one", instructions="Be kind.")
        stream = await client.responses.create(
            model="tiny", input=[{"role": "user", "content": "two"}], previous_response_id=first.id, stream=True
        )
        (*_, last) = [event async for event in stream]
        # Instructions are for one answer; what was said stays.
        said = "<|assistant|>Hello, world!<|end|>"
        assert prompt(running, text) == f"<|user|>one<|end|>{said}<|user|>two<|end|><|assistant|>"
        second = last.response
        assert second.previous_response_id == first.id
        assert (await client.responses.retrieve(second.id)) == second
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(first.id)
        await client.responses.create(model="tiny", input="three", previous_response_id=second.id)
        assert prompt(running, text).startswith(f"<|user|>one<|end|>{said}<|user|>two<|end|>{said}<|user|>three")
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model="tiny", input="x", previous_response_id=first.id)
        assert refused.value.code == "previous_response_not_found"
        unstored = await client.responses.create(model="tiny", input="one", store=False)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(unstored.id)


async def test_calls_are_answered_across_stored_turns(serving: Serving, text: TextModel, tmp_path: Path) -> None:
    async with serving(says(text, CALL), **stored(tmp_path)) as running:
        client = sdk(running)
        asked = await client.responses.create(model="tiny", input="Weather?", tools=[WEATHER, CLOCK])
        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
            for call in asked.output
            if call.type == "function_call"
        ]
        await client.responses.create(model="tiny", input=results, previous_response_id=asked.id)  # type: ignore[arg-type]
        spoken = prompt(running, text)
        assert "Weather?" in spoken and '"get_weather"' in spoken and spoken.count("sunny") == 2


async def test_another_tenant_never_sees_a_response(serving: Serving, tmp_path: Path) -> None:
    async with serving(**stored(tmp_path)) as running:
        await sign_in(running, "acme")
        mine = (await create(running)).json()
        running.admin = running.client.headers["authorization"]  # type: ignore[attr-defined]
        await sign_in(running, "rival")
        path = f"/v1/responses/{mine['id']}"
        assert (await running.client.get(path)).status_code == 404
        assert (await running.client.delete(path)).status_code == 404
        continued = await create(running, previous_response_id=mine["id"])
        assert continued.json()["error"]["code"] == "previous_response_not_found"
        running.client.headers["authorization"] = running.admin  # type: ignore[attr-defined]
        assert (await running.client.get(path)).json() == mine


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_the_store_forgets_by_age_and_by_number(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    sqlite = f"sqlite:///{tmp_path / 'responses.db'}"
    database = await open_database(sqlite if kind == "sqlite" else request.getfixturevalue("postgres_url"))
    now = 1000.0
    store = ResponseStore(database, keep_s=60, most=3, clock=lambda: now)
    await store.prepare()
    said = [ChatMessage(role="user", content="\0 hi")]
    for number in range(5):
        now += 1
        await store.put(f"r{number}", "acme", b"{}", said)
    await store.put("other", "rival", b"{}", said)
    assert [await store.response(f"r{number}", "acme") for number in range(5)] == [None, None, b"{}", b"{}", b"{}"]
    assert await store.conversation("r4", "acme") == said
    assert await store.response("r4", "rival") is None and not await store.delete("r4", "rival")
    now += 60
    assert await store.response("r4", "acme") is None
    await store.put("new", "acme", b"{}", said)
    ours = "SELECT id FROM responses WHERE tenant IN ('acme', 'rival')"  # others may have used the same server
    assert await database.fetch(ours) == [("new",)]
    await database.close()


async def test_a_store_that_is_away_is_no_lost_response(
    serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: Any, **options: Any) -> Any:
        raise DatabaseError("gone")

    async with serving(**stored(tmp_path)) as running:
        first = (await create(running)).json()["id"]
        monkeypatch.setattr(running.parts.responses, "_columns", away)
        monkeypatch.setattr(running.parts.responses, "put", away)
        broken = await create(running, stream=True)
        assert broken.status_code == 200
        assert "event: response.completed" not in broken.text and "event: error" in broken.text
        for reply in (
            await create(running),
            await create(running, previous_response_id=first),
            await running.client.get(f"/v1/responses/{first}"),
        ):
            assert (
                reply.status_code == 503 and reply.headers["retry-after"]
            )  # not 404, nor an answer that is not stored
        assert (await create(running, store=False)).status_code == 200


@pytest.mark.parametrize("database", [False, True])
async def test_without_a_store_there_is_nothing_to_continue(serving: Serving, tmp_path: Path, database: bool) -> None:
    async with serving(**stored(tmp_path) if database else {}, responses_per_tenant=0) as running:
        for body in ({"store": True}, {"previous_response_id": "resp_1"}):
            refused = await create(running, **body)
            assert refused.status_code == 400 and "needs a store" in refused.json()["error"]["message"]
        assert (await create(running, store=False)).status_code == 200
        assert (await running.client.get("/v1/responses/resp_1")).status_code == 404


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"type": "dream", "summary": []}]}, "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, "input[0].call_id"),
        ({"input": "a" * 600}, "input"),
        ({"n": 2}, "n"),
        ({"truncation": "never"}, "truncation"),
        ({"include": [5]}, "include[0]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"conversation": "c"}, "conversation"),
        ({"stop": ""}, "stop"),
        ({"tools": [{"name": "x"}]}, "tools[0].type"),
        ({"tools": [WEATHER], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "custom", "name": "other"}}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"tools": [{**WEATHER, "parameters": {"type": "array"}}]}, "tools[0].parameters"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nothing"}}}},
            "text.format.schema",
        ),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
async def test_what_is_not_honoured_is_refused_by_its_name(serving: Serving, body: dict[str, Any], param: str) -> None:
    async with serving() as running:
        refused = await create(running, **body)
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"] == param
        assert not running.engine.seen


async def test_a_stream_that_breaks_ends_with_an_error_event(serving: Serving, text: TextModel) -> None:
    engine = ScriptedEngine(text, lambda request: [ord("a")] * 400, step_s=0.01)
    async with serving(engine) as running:
        stream = await sdk(running).responses.create(model="tiny", input="hi", stream=True)
        events = []
        async for event in stream:
            events.append(event)
            if event.type == "response.output_text.delta":
                running.stop.set()
        assert [event.type for event in events[-2:]] == ["error", "response.failed"]
        assert events[-2].code == events[-1].response.error.code == "engine_lost"
        assert events[-1].response.status == "failed"
        assert [event.sequence_number for event in events] == list(range(len(events)))


@pytest.mark.slow
async def test_the_beta_part_of_the_sdk_is_the_same(serving: Serving, tmp_path: Path) -> None:
    async with serving(**stored(tmp_path)) as running:
        beta = sdk(running).beta.responses
        made = await beta.create(model="tiny", input="hi")
        assert (await beta.retrieve(made.id)).id == made.id
        assert [event.type async for event in await beta.retrieve(made.id, stream=True)][-1] == "response.completed"
        assert len((await beta.input_items.list(made.id)).data) == 1
        assert (await beta.input_tokens.count(model="tiny", input="hi")).input_tokens > 0
        waiting = await beta.create(model="tiny", input="hi", background=True)
        assert (await beta.cancel(waiting.id)).id == waiting.id
        await beta.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            await beta.retrieve(made.id)
