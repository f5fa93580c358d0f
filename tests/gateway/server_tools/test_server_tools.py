"""Tools that the gateway runs: the model calls, real servers answer, the client gets one answer and every event."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.config.context import ToolsConfig
from penstock.config.guardrails import GuardrailConfig
from penstock.config.schema import RequestLogConfig
from penstock.engine.request import Request
from penstock.text import TextModel
from tests.gateway.accounting.test_quotas import sign_in
from tests.gateway.api.test_responses import prompt, sdk, stored
from tests.gateway.conftest import Serving, events, eventually
from tests.scripted import ScriptedEngine
from tests.tools.execution.parts import LOOPBACK, WEATHER_API, WeatherServer, desk, weather

TOOLS = ToolsConfig(networks=LOOPBACK, max_steps=4)
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
ASK = [{"role": "user", "content": "Weather in Rome and Oslo?"}]


@pytest.fixture(scope="module")
def api() -> Iterator[WeatherServer]:
    with weather() as server:
        yield server


@pytest.fixture(autouse=True)
def fresh(api: WeatherServer) -> None:
    api.seen.clear()
    api.most_at_once = 0


def calls(*made: tuple[str, dict[str, Any]]) -> str:
    listed = [{"name": name, "arguments": arguments} for name, arguments in made]
    return f"<tool_call>{json.dumps(listed)}</tool_call>"


def script(text: TextModel, *answers: str) -> ScriptedEngine:
    """An engine that gives one answer after the other, and the last one from then on."""
    left = list(answers)

    def reply(request: Request) -> list[int]:
        said = left.pop(0) if len(left) > 1 else left[0]
        return [*text.encode(said), text.eos_token_ids[0]]

    return ScriptedEngine(text, reply, max_model_len=8192)


TWO = calls(("get_weather", {"city": "Rome"}), ("get_weather", {"city": "Oslo"}))


async def test_calls_are_run_side_by_side_and_the_model_answers_with_the_results(
    serving: Serving, text: TextModel, api: WeatherServer, tmp_path: Path
) -> None:
    engine = script(text, f"Let me look.\n{TWO}", "Sunny in both.")
    settings = {"tools": TOOLS, "tool_servers": (api.config(),), **stored(tmp_path)}
    async with serving(engine, **settings) as running:
        reply = (await running.chat(messages=ASK, server_tools=["weather"])).json()
        choice = reply["choices"][0]
        assert choice["message"]["content"] == "Let me look.\n\nSunny in both."
        assert choice["finish_reason"] == "stop" and "tool_calls" not in choice["message"]
        kinds = [(event["type"], event["name"], event["step"]) for event in reply["tool_events"]]
        assert kinds[:2] == [("tool_call", "get_weather", 1)] * 2
        assert kinds[2:] == [("tool_result", "get_weather", 1)] * 2
        results = [event for event in reply["tool_events"] if event["type"] == "tool_result"]
        assert {json.loads(event["content"])["city"] for event in results} == {"Rome", "Oslo"}
        assert all(event["ok"] and event["milliseconds"] > 0 for event in results)
        assert api.most_at_once == 2
        spoken = prompt(running, text)
        assert spoken.count('"weather": "sunny"') == 2 and '"city": "Rome"' in spoken
        first, second = engine.seen
        assert first.params.grammar, "arguments are held to the schema"
        used = reply["usage"]
        assert used["prompt_tokens"] == len(first.prompt) + len(second.prompt)
        said = len(text.encode(f"Let me look.\n{TWO}")) + len(text.encode("Sunny in both.")) + 2
        assert used["completion_tokens"] == said and used["total_tokens"] == used["prompt_tokens"] + said
        total = (await running.client.get("/v1/usage?by=tenant")).json()["data"][0]
        assert (total["prompt_tokens"], total["completion_tokens"]) == (used["prompt_tokens"], said)
        assert await running.metric('penstock_tool_calls_total{tool="weather.get_weather",outcome="done"}') == 2


async def test_what_follows_a_call_is_no_first_token(serving: Serving, text: TextModel, api: WeatherServer) -> None:
    engine = script(text, TWO, "Sunny.")
    async with serving(engine, tools=TOOLS, tool_servers=(api.config(),)) as running:
        body = {"model": "tiny", "messages": ASK, "server_tools": ["weather"]}
        limit = {"x-slo-ttft-ms": "900000"}
        assert (await running.client.post("/v1/chat/completions", json=body, headers=limit)).status_code == 200
        first, second = (request.patience_s for request in engine.seen)
        assert first is not None and second is None


async def test_the_stream_has_text_events_and_the_sum(
    serving: Serving, text: TextModel, api: WeatherServer, tmp_path: Path
) -> None:
    settings = {"tools": TOOLS, "tool_servers": (api.config(),), **stored(tmp_path)}
    async with serving(script(text, f"Let me look.\n{TWO}", "Sunny."), **settings) as running:
        body = {"stream": True, "stream_options": {"include_usage": True}, "server_tools": ["weather.get_weather"]}
        reply = await running.chat(messages=ASK, **body)
        *chunks, done = events(reply.text)
        assert done == "[DONE]"
        parsed = [json.loads(chunk) for chunk in chunks]
        told = [chunk["tool_event"] for chunk in parsed if "tool_event" in chunk]
        assert [event["type"] for event in told] == ["tool_call", "tool_call", "tool_result", "tool_result"]
        content = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in parsed[:-1] if chunk["choices"])
        assert content == "Let me look.\n\nSunny."
        ends = [chunk["choices"][0]["finish_reason"] for chunk in parsed[:-1]]
        assert ends[-1] == "stop" and not any(ends[:-1])
        assert parsed[-1]["usage"]["prompt_tokens"] == sum(len(request.prompt) for request in running.engine.seen)
        stream = await sdk(running).chat.completions.create(
            model="tiny", messages=ASK, stream=True, extra_body={"server_tools": ["weather"]}  # type: ignore[arg-type]
        )  # fmt: skip
        seen = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(seen) == "Sunny.", "a client that knows nothing of events"


async def test_every_call_is_in_the_trace_and_the_request_log(
    serving: Serving, text: TextModel, api: WeatherServer, tmp_path: Path
) -> None:
    settings = {"tools": TOOLS, "tool_servers": (api.config(),), **stored(tmp_path)}
    config = RequestLogConfig(flush_s=0.01)
    async with serving(script(text, TWO, "Sunny."), request_log=config, **settings) as running:
        sent = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
        running.client.headers.update(sent)
        reply = await running.chat(messages=ASK, server_tools=["weather"], user="ann")
        assert {headers["traceparent"] for *_, headers, _ in api.seen} == {sent["traceparent"]}, "passed on"
        id = reply.headers["x-request-id"]
        log: list[dict[str, Any]] = []
        for _ in range(100):
            listed = (await running.client.get("/v1/admin/requests?since=1h")).json()["data"]
            log = [entry for entry in listed if entry["request_id"] == id]
            if len(log) == 3:
                break
        routes = sorted(entry["route"] for entry in log)
        assert routes == ["/v1/chat/completions", "tool:weather.get_weather", "tool:weather.get_weather"]
        whole = next(entry for entry in log if entry["route"].startswith("/v1"))
        assert whole["prompt_tokens"] == reply.json()["usage"]["prompt_tokens"]
        assert whole["finish_reason"] == "stop" and {entry["user_id"] for entry in log} == {"ann"}
        trace = (await running.client.get(f"/v1/traces/{id}")).text
        assert trace.count("tool get_weather") == 2


async def test_a_loop_ends_in_words(serving: Serving, text: TextModel, api: WeatherServer) -> None:
    stubborn = calls(("get_weather", {"city": "Rome"}))
    async with serving(script(text, stubborn), tools=TOOLS, tool_servers=(api.config(),)) as running:
        reply = (await running.chat(messages=ASK, server_tools=["weather"], tool_choice="required")).json()
        assert len(api.seen) == 3, "in the last of four steps there are no tools"
        assert reply["choices"][0]["message"]["content"] == stubborn
        assert [request.params.grammar != "" for request in running.engine.seen] == [True, True, True, False]
        first, second = (request.params.grammar for request in running.engine.seen[:2])
        assert first != second, "what is required is required once"


async def test_what_tools_do_wrong_is_told_to_the_model(serving: Serving, text: TextModel, api: WeatherServer) -> None:
    wrong = calls(("misbehave", {"how": "fail"}), ("misbehave", {"how": "late"}), ("get_weather", {"city": ".."}))
    half = '<tool_call>[{"name": "get_weather", "arguments": "no json"}]</tool_call>'
    nested = "[" * 1100 + "]" * 1100
    deep = f'<tool_call>[{{"name": "get_weather", "arguments": {{"city": {nested}}}}}]</tool_call>'
    server = api.config(timeout_s=0.2)
    async with serving(script(text, wrong, half, deep, "Sorry."), tools=TOOLS, tool_servers=(server,)) as running:
        reply = (await running.chat(messages=ASK, server_tools=["weather"])).json()
        assert reply["choices"][0]["message"]["content"].endswith("Sorry.")
        told = [event["content"] for event in reply["tool_events"] if event["type"] == "tool_result"]
        assert len(told) == 5 and all(words.startswith("Error: ") for words in told)
        assert await running.metric('penstock_tool_calls_total{tool="weather.misbehave",outcome="failed"}') == 2


async def test_tools_and_conversations_go_together(
    serving: Serving, text: TextModel, api: WeatherServer, tmp_path: Path
) -> None:
    engine = script(text, f"Let me look.\n{TWO}", "Sunny in both.", "As I said.")
    settings = {"tools": TOOLS, "tool_servers": (api.config(),), **stored(tmp_path)}
    async with serving(engine, **settings) as running:
        first = await running.chat(messages=ASK, server_tools=["weather"], conversation="s")
        assert first.json()["conversation"]["turns"] == 1
        await running.chat(messages=[{"role": "user", "content": "Sure?"}], server_tools=["weather"], conversation="s")
        kept = (await running.client.get("/v1/conversations/s")).json()["messages"]
        assert [message["role"] for message in kept] == [
            "user", "assistant", "tool", "tool", "assistant", "user", "assistant",
        ]  # fmt: skip
        assert prompt(running, text).count('"weather": "sunny"') == 2


async def test_a_client_that_leaves_stops_the_loop(serving: Serving, text: TextModel, api: WeatherServer) -> None:
    late = calls(("misbehave", {"how": "late"}))
    async with serving(script(text, late, "never"), tools=TOOLS, tool_servers=(api.config(),)) as running:
        body = {"model": "tiny", "messages": ASK, "server_tools": ["weather"], "stream": True}
        async with running.client.stream("POST", "/v1/chat/completions", json=body) as stream:
            async for line in stream.aiter_lines():
                if "tool_call" in line:
                    break
        await eventually(lambda: not running.parts.drain.requests)
        assert len(running.engine.seen) == 1


async def test_guardrails_see_results(serving: Serving, text: TextModel, api: WeatherServer) -> None:
    rule = GuardrailConfig(name="r", stage="input", action="redact", words=("sunny",), replacement="[sky]")
    settings = {"tools": TOOLS, "tool_servers": (api.config(),), "guardrails": (rule,)}
    async with serving(script(text, TWO, "ok"), **settings) as running:
        await running.chat(messages=ASK, server_tools=["weather"])
        assert "[sky]" in prompt(running, text) and "sunny" not in prompt(running, text)


async def test_what_is_wrong_with_the_request_is_a_400(serving: Serving, text: TextModel, api: WeatherServer) -> None:
    function = {"type": "function", "function": {"name": "f"}}
    async with serving(script(text, "hi"), tools=TOOLS, tool_servers=(api.config(tenants=("rival",)),)) as running:
        for body in (
            {"server_tools": ["weather"]},
            {"server_tools": ["nowhere"]},
            {"server_tools": ["*"], "tools": [function]},
            {"server_tools": ["*"], "n": 2},
        ):
            reply = await running.chat(messages=ASK, **body)
            assert reply.status_code == 400 and reply.json()["error"]["param"] in ("server_tools", "n"), body
        assert (await running.chat(messages=ASK, server_tools=["*"])).status_code == 200, "nothing is offered"
        assert (await running.client.get("/v1/tools")).json()["data"] == []
    async with serving() as running:
        assert (await running.chat(messages=ASK, server_tools=["*"])).status_code == 400


async def test_tools_are_registered_through_the_admin_api(
    serving: Serving, text: TextModel, api: WeatherServer, tmp_path: Path
) -> None:
    async with serving(script(text, TWO, "Sunny."), tools=TOOLS, **stored(tmp_path)) as running:
        client = running.client
        await sign_in(running, "acme")
        spec = {
            "name": "weather",
            "openapi": WEATHER_API,
            "url": api.url,
            "headers": {"X-Key": "hush"},
            "tenants": ["acme"],
            "allow": ["get_weather"],
        }
        made = await client.post("/v1/admin/tools", json=spec)
        assert made.status_code == 200 and [f["name"] for f in made.json()["functions"]] == ["get_weather"]
        (listed,) = (await client.get("/v1/admin/tools")).json()["data"]
        assert listed["headers"] == ["X-Key"] and "hush" not in json.dumps(listed) + made.text
        (mine,) = (await client.get("/v1/tools")).json()["data"]
        assert mine["name"] == "weather"
        await running.chat(messages=ASK, server_tools=["weather"])
        assert {headers["X-Key"] for _, _, headers, _ in api.seen} == {"hush"}
        for wrong in ({"name": "x"}, {"name": "x", "command": ["sh"]}, {"name": "a b", "mcp_url": "http://x"},
                      {"name": "x", "openapi": {}}):  # fmt: skip
            assert (await client.post("/v1/admin/tools", json=wrong)).status_code == 400
        assert (await client.delete("/v1/admin/tools/weather")).json()["deleted"]
        assert (await client.delete("/v1/admin/tools/weather")).status_code == 404
        assert (await running.chat(messages=ASK, server_tools=["weather"])).status_code == 400


@pytest.mark.slow
async def test_an_mcp_server_serves_a_request(serving: Serving, text: TextModel) -> None:
    engine = script(text, calls(("add", {"a": 40, "b": 2})), "It is 42.")
    async with serving(engine, tools=TOOLS, tool_servers=(desk(allow=("add",)),)) as running:
        reply = (await running.chat(messages=ASK, server_tools=["desk"])).json()
        assert [event.get("content") for event in reply["tool_events"]] == [None, "42"]
        assert "42" in prompt(running, text)
