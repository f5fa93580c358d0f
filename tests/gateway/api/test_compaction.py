"""POST /v1/responses/compact, and conversations that go on from what it gives back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from penstock.backends.remote.server import RemoteServer
from penstock.backends.remote.upstream import Upstream
from penstock.routing.remotes import RemoteModel
from penstock.text import TextModel
from tests.gateway.api.test_reasoning import OPENS, scripted
from tests.gateway.api.test_responses import prompt, sdk, stored
from tests.gateway.conftest import Serving
from tests.gateway.generation.test_tool_choice import says
from tests.text.test_thoughts import model

TALK: Any = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "My name is Ada."},
    {"role": "assistant", "content": "Hello, Ada."},
    {"type": "function_call", "call_id": "c", "name": "clock", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "noon"},
    {"role": "user", "content": "What time is it?"},
]
SUMMARY = "The user is Ada; it is noon."


async def test_a_conversation_goes_on_from_its_summary(serving: Serving, text: TextModel) -> None:
    async with serving(says(text, SUMMARY)) as running:
        client = sdk(running)
        compacted = await client.responses.compact(model="tiny", input=TALK, instructions="Be kind.")
        assert compacted.object == "response.compaction" and compacted.usage.output_tokens == len(SUMMARY) + 1
        asked = prompt(running, text)
        assert asked.index("Be kind.") < asked.index("Ada.") < asked.index("noon") < asked.index("Summarise this")
        *said, summary = compacted.output
        assert [item.content[0].text for item in said] == ["My name is Ada.", "What time is it?"]  # type: ignore[union-attr]
        assert summary.type == "compaction" and SUMMARY not in summary.encrypted_content
        following: Any = [item.to_dict(warnings=False) for item in compacted.output]
        await client.responses.create(model="tiny", input=[*following, {"role": "user", "content": "And now?"}])
        shown = prompt(running, text)
        assert SUMMARY in shown and "Hello, Ada." not in shown
        assert shown.index("What time") < shown.index(SUMMARY) < shown.index("And now?")
        again = await client.responses.compact(model="tiny", input=following)
        assert SUMMARY in prompt(running, text) and again.output[-1].type == "compaction"
        # What another server has made cannot be read.
        foreign = {"type": "compaction", "encrypted_content": "gAAAA"}
        body = {"model": "tiny", "input": [foreign, {"role": "user", "content": "hi"}]}
        reply = await running.client.post("/v1/responses", json=body)
        assert reply.headers["x-penstock-ignored"] == "input.compaction"


async def test_stored_responses_and_what_is_wrong(serving: Serving, text: TextModel, tmp_path: Path) -> None:
    async with serving(says(text, SUMMARY), **stored(tmp_path)) as running:
        client = sdk(running)
        first = await client.responses.create(model="tiny", input="I am Ada.")
        compacted = await client.responses.compact(model="tiny", previous_response_id=first.id)
        assert [item.type for item in compacted.output] == ["message", "compaction"]
        with pytest.raises(openai.BadRequestError, match="nothing to compact"):
            await client.responses.compact(model="tiny")
        with pytest.raises(openai.BadRequestError, match="no stored response"):
            await client.responses.compact(model="tiny", previous_response_id="resp_1")
        with pytest.raises(openai.NotFoundError):
            await client.responses.compact(model="other", input="hi")


async def test_what_does_not_fit_is_left_out(serving: Serving, text: TextModel) -> None:
    long: Any = [
        message
        for turn in range(8)
        for message in (
            {"role": "user", "content": f"question {turn} " + "x" * 80},
            {"role": "assistant", "content": "yes"},
        )
    ]
    async with serving() as running:
        reply = await running.client.post("/v1/responses/compact", json={"model": "tiny", "input": long})
        assert reply.status_code == 200, reply.text
        assert "dropped_turns" in reply.headers["x-penstock-context"]
        assert len(reply.json()["output"]) == 9, "all messages of the user are kept"


async def test_thoughts_are_no_part_of_a_summary(serving: Serving, tmp_path: Path) -> None:
    thinker = model(tmp_path, "<think>", "</think>", template=OPENS)
    async with serving(scripted(thinker, f"Hm.\n</think>\n\n{SUMMARY}"), text=thinker) as running:
        compacted = await sdk(running).responses.compact(model="tiny", input="hi")
        assert compacted.usage.output_tokens_details.reasoning_tokens > 0
        following: Any = [compacted.output[-1].to_dict(), {"role": "user", "content": "go on"}]
        await sdk(running).responses.create(model="tiny", input=following)
        assert SUMMARY in prompt(running, thinker) and "Hm." not in prompt(running, thinker)


async def test_another_server_summarises(serving: Serving, text: TextModel) -> None:
    async with serving(says(text, SUMMARY)) as behind:
        far = RemoteModel("far", [RemoteServer("0", Upstream(f"http://127.0.0.1:{behind.port}/v1", "tiny"))])
        async with serving(others=[far]) as front:
            compacted = await sdk(front).responses.compact(model="far", input=TALK)
            assert compacted.output[-1].type == "compaction"
