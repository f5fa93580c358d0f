"""Events whose size does not tell the length of their text, in streams of every kind that has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.gateway.app.obfuscation import STEP, obfuscated
from penstock.text import TextModel
from tests.gateway.api.test_messages_of_agents import long_window
from tests.gateway.conftest import Serving

BODY: dict[str, Any] = {"model": "tiny", "stream": True, "stream_options": {"include_obfuscation": True}}


def fields(event: bytes) -> dict[str, Any]:
    line = next(line for line in event.split(b"\n") if line.startswith(b"data: "))
    return json.loads(line.removeprefix(b"data: "))  # type: ignore[no-any-return]


@pytest.mark.parametrize("size", range(0, 200, 7))
def test_events_have_a_multiple_of_some_bytes_and_say_what_they_said(size: int) -> None:
    said = {"type": "response.output_text.delta", "delta": "x" * size}
    event = b"event: response.output_text.delta\nid: 1\ndata: " + json.dumps(said).encode()
    padded = obfuscated(event + b"\n\n" + event + b"\n\n")
    first, second, end = padded.split(b"\n\n")
    assert len(first) == len(second) and len(first) % STEP == 0 and end == b""
    assert len(first) - len(event) < STEP + 20
    found = fields(first)
    assert len(found.pop("obfuscation")) < STEP and found == said
    assert first.startswith(b"event: response.output_text.delta\nid: 1\ndata: ")


@pytest.mark.parametrize(
    "event",
    [
        b"data: [DONE]\n\n",
        b": keep-alive\n\n",
        b'data: {"error":{"message":"no"}}\n\n',
        b'data: {"choices":[],"usage":{"total_tokens":1}}\n\n',
        b'data: {"type":"response.completed","text":"\\"delta\\":"}\n\n',
        b"",
    ],
)
def test_other_events_are_as_they_are(event: bytes) -> None:
    assert obfuscated(event) == event


async def test_streams_that_ask_for_it(serving: Serving, text: TextModel, tmp_path: Path) -> None:
    async with serving(long_window(text), store_url=f"sqlite:///{tmp_path / 'x.db'}") as running:
        for path, more, has_text in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, lambda one: "choices" in one),
            ("/v1/completions", {"prompt": "hi"}, lambda one: "choices" in one),
            ("/v1/responses", {"input": "hi"}, lambda one: one["type"].endswith(".delta")),
        ):
            reply = await running.client.post(path, json={**BODY, **more})
            assert reply.status_code == 200, reply.text
            events = [event for event in reply.content.split(b"\n\n") if b"data: {" in event]
            padded = [event for event in events if "obfuscation" in fields(event)]
            assert padded == [event for event in events if has_text(fields(event))] and padded, path
            assert all(len(event) % STEP == 0 for event in padded), path
            plain = {**BODY, **more, "stream_options": {"include_obfuscation": False}}
            assert b"obfuscation" not in (await running.client.post(path, json=plain)).content
        hints = {"prediction": {"type": "content", "content": "x"}, "verbosity": "low"}
        chat = await running.chat(messages=[{"role": "user", "content": "hi"}], **hints)
        assert chat.status_code == 200 and set(hints) <= set(chat.headers["x-penstock-ignored"].split(", "))
        done = next(found for found in map(fields, events) if found["type"] == "response.completed")
        again = await running.client.get(
            f"/v1/responses/{done['response']['id']}", params={"stream": "true", "include_obfuscation": "true"}
        )
        assert again.status_code == 200, again.text
        kept = [event for event in again.content.split(b"\n\n") if b"data: {" in event]
        assert [event for event in kept if "obfuscation" in fields(event)]
