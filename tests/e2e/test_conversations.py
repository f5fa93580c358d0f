"""Conversations and tools with the real server and the real default model."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.conftest import MODEL, Server
from tests.tools.execution.parts import WEATHER_API, weather

TOPICS = ("the sea", "bread", "mountains", "cats", "the colour blue", "bicycles", "planets", "tea", "trains", "music")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_forty_turns_in_a_window_of_2048_and_the_first_is_not_forgotten(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300)

    def say(words: str, max_tokens: int = 24) -> Any:
        return client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": words}],
            temperature=0,
            max_tokens=max_tokens,
            extra_body={"conversation": {"id": "forty", "overflow": "summarise"}},
        )

    say("My name is Zebedee and I live in Lisbon with my dog Biscuit. Please remember that.")
    for turn in range(2, 41):
        topic = TOPICS[turn % len(TOPICS)]
        say(
            f"This is question number {turn}. I read a long article about {topic} in the newspaper this morning, and I "
            f"wondered what you think of it. Please tell me in one short sentence something interesting about {topic}."
        )
    reply = say("What is my name?", max_tokens=40)
    assert reply.conversation["turns"] == 41
    assert reply.conversation["dropped_turns"] == reply.conversation["summarised_turns"] > 5
    notes = httpx.get(f"{server.url}/v1/conversations/forty").json()["summary"]["text"]
    assert "Zebedee" in notes, notes
    assert "Zebedee" in reply.choices[0].message.content, (reply.choices[0].message.content, notes)


def test_a_session_goes_on_and_is_forgotten_on_demand(server: Server) -> None:
    body = {"model": MODEL, "max_tokens": 8, "temperature": 0}
    for turn in (1, 2):
        reply = httpx.post(
            f"{server.url}/v1/chat/completions",
            json={**body, "messages": [{"role": "user", "content": "Say hello."}]},
            headers={"x-session-id": "short"},
            timeout=180,
        )
        assert reply.json()["conversation"]["turns"] == turn
    assert json.loads(httpx.get(f"{server.url}/v1/conversations").text)["data"]
    assert httpx.delete(f"{server.url}/v1/conversations/short").json()["deleted"]
    assert server.metric("penstock_conversation_turns_total") >= 2


def test_the_model_calls_a_registered_tool_and_sees_its_result(server: Server) -> None:
    document = json.loads(json.dumps(WEATHER_API))
    city = document["paths"]["/cities/{city}/weather"]["get"]["parameters"][0]
    city["schema"] = {"type": "string", "maxLength": 12}
    with weather() as api:
        spec = {"name": "weather", "openapi": document, "url": api.url, "allow": ["get_weather"]}
        assert httpx.post(f"{server.url}/v1/admin/tools", json=spec, timeout=180).status_code == 200
        try:
            reply = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300).chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "What is the weather in Rome?"}],
                temperature=0,
                max_tokens=48,
                tool_choice="required",
                extra_body={"server_tools": ["weather"]},
            )
        finally:
            httpx.delete(f"{server.url}/v1/admin/tools/weather")
        called, result = reply.tool_events[:2]  # type: ignore[attr-defined]
        assert called["name"] == "get_weather" and set(json.loads(called["arguments"])) <= {"city", "units"}
        assert result["ok"] and "sunny" in result["content"] and api.seen
        assert reply.choices[0].message.content
