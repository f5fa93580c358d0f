"""The Responses and Messages APIs with the official SDKs, the real server and the real default model."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest

from tests.e2e.conftest import MODEL, Server

QUESTION = "What is the capital of France?"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}


@pytest.mark.slow
def test_a_response_is_continued_and_keeps_to_its_format(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300, max_retries=0)
    first = client.responses.create(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=20)
    assert "Paris" in first.output_text and first.status == "completed"
    with client.responses.stream(
        model=MODEL,
        input="Name a colour of its flag.",
        previous_response_id=first.id,
        temperature=0,
        max_output_tokens=40,
        text={"format": {"type": "json_schema", "name": "colour", "schema": SCHEMA, "strict": True}},
    ) as stream:
        second = stream.until_done().get_final_response()
    assert json.loads(second.output_text)["colour"] in ("red", "green", "blue")
    assert first.usage is not None and second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens + 5  # the first turn is in the prompt
    assert client.responses.retrieve(second.id).output_text == second.output_text


def test_messages_say_what_chat_says_and_call_tools(server: Server) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="none", timeout=300, max_retries=0)
    messages: Any = [{"role": "user", "content": QUESTION}]
    with client.messages.stream(model=MODEL, max_tokens=20, messages=messages, extra_body={"temperature": 0}) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert "Paris" in text and final.stop_reason == "end_turn"
    counted = client.messages.count_tokens(model=MODEL, messages=messages)
    assert counted.input_tokens == final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0)
    reply = client.messages.create(
        model=MODEL,
        max_tokens=60,
        messages=[{"role": "user", "content": "Paint it."}],
        tools=[{"name": "paint", "description": "Paint something", "input_schema": SCHEMA}],
        tool_choice={"type": "tool", "name": "paint", "disable_parallel_tool_use": True},
    )
    (call,) = reply.content
    assert reply.stop_reason == "tool_use" and call.type == "tool_use"
    assert call.name == "paint" and call.input["colour"] in ("red", "green", "blue")  # type: ignore[index]
