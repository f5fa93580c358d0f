"""What coding agents and the newer parts of Anthropic's SDK send to the Messages API."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic import beta_async_tool
from msgspec import convert
from pydantic import BaseModel

from penstock.gateway.api.anthropic.blocks import Message, TextBlock
from penstock.gateway.api.anthropic.history import History
from penstock.protocol.errors import InvalidRequest
from penstock.text import TextModel, load_text
from tests.gateway.api.test_messages import CLOCK, HI, WEATHER, create, prompt, sdk
from tests.gateway.conftest import Serving
from tests.gateway.generation.test_tool_choice import says
from tests.scripted import ScriptedEngine, make_text

USER, ASSISTANT, END = "<|user|>", "<|assistant|>", "<|end|>"
CALL: Any = {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "here"}}
SAYS_R = {"type": "text", "text": "R"}
LATE = {"type": "tool_reference", "tool_name": "late"}
LONG = 1 << 16


def long_window(text: TextModel, script: Any = "Done.") -> ScriptedEngine:
    return ScriptedEngine(text, script, max_model_len=LONG)


def told(reply: Any) -> list[str]:
    return [name for name in reply.headers.get("x-penstock-ignored", "").split(", ") if name]


async def test_the_first_request_of_claude_code(serving: Serving, text: TextModel) -> None:
    body = {
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.31f;"},
            {"type": "text", "text": "You are an agent."},
            {
                "type": "text",
                "text": "Be brief.",
                "cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"},
            },
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Fix it.", "cache_control": {"type": "ephemeral"}}]},
            {"role": "system", "content": "Agents: none."},
        ],
        "tools": [{**WEATHER, "eager_input_streaming": True, "cache_control": {"type": "ephemeral"}}],
        "metadata": {"user_id": json.dumps({"device_id": "d", "session_id": "s"})},
        "max_tokens": 32000,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
    }
    async with serving(long_window(text)) as running:
        reply = await running.client.post(
            "/v1/messages?beta=true", json={"model": "tiny", **body}, headers={"anthropic-beta": "claude-code-20250219"}
        )
        assert reply.status_code == 200, reply.text
        assert set(told(reply)) == {
            "thinking",
            "context_management",
            "output_config.effort",
            "system.x-anthropic-billing-header",
        }
        assert reply.json()["context_management"] == {"applied_edits": []}
        said = prompt(running, text)
        assert said.startswith("<|system|>You are an agent.\n\nBe brief.")
        assert said.endswith(f"{USER}Fix it.{END}<|system|>Agents: none.{END}{ASSISTANT}")
        usage = reply.json()["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(running.engine.seen[-1].prompt)
        assert usage["cache_creation_input_tokens"] == 0
        counted = await running.client.post(
            "/v1/messages/count_tokens",
            json={
                "model": "tiny",
                **{name: value for name, value in body.items() if name not in ("max_tokens", "metadata")},
            },
        )
        assert counted.json()["input_tokens"] == len(running.engine.seen[-1].prompt)
    async with serving(long_window(text), refuses_unknown=True) as running:
        strict = await create(running, **body)
        assert strict.status_code == 400 and "context_management" in strict.json()["error"]["message"]


HISTORY: list[tuple[str, list[Any], list[str], list[str]]] = [
    (
        "what was thought is not read again",
        [
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Yes.", "citations": [{"type": "char_location"}]},
            ]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": ""}]},
            {"role": "user", "content": "Why?"},
        ],
        ["user hi", "assistant Yes.", "user Why?"],
        ["messages.content.redacted_thinking", "messages.content.citations"],
    ),
    (
        "messages of one role are one turn; empty ones are none",
        [
            {"role": "user", "content": "you"},
            {"role": "assistant", "content": []},
            {"role": "user", "content": [{"type": "text", "text": ""}]},
            {"role": "user", "content": [{"type": "text", "text": "there", "citations": None}]},
        ],
        ["user hi\n\nyou\n\nthere"],
        [],
    ),
    (
        "results of tools with more than text",
        [
            {"role": "assistant", "content": [{"type": "text", "text": "I look."}, CALL]},
            {"role": "user", "content": [
                {"type": "text", "text": "Go on."},
                {"type": "tool_result", "tool_use_id": "t1", "is_error": True, "content": [
                    {"type": "text", "text": "Bad. "},
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}},
                    {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": ""}},
                    {"type": "document", "title": "T", "source": {"type": "text", "data": "D"}},
                    {"type": "search_result", "source": "http://x", "title": "S", "content": [SAYS_R]},
                    {"type": "tool_reference", "tool_name": "dig"},
                ]},
            ]},
        ],
        [
            "user hi", "assistant I look. look({\"at\":\"here\"})",
            "tool Error: Bad. [an image, which this model cannot see]\n"
            "[a document that is not text, which this model cannot read]\n"
            "T\nD\n\nS\nhttp://x\nR\n\nThe tool `dig` is available now.\n",
            "user Go on.",
        ],
        ["messages.content.content.image", "messages.content.content.document"],
    ),
    (
        "an empty result",
        [
            {"role": "assistant", "content": [CALL]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1"}]},
        ],
        ["user hi", "assistant  look({\"at\":\"here\"})", "tool "],
        [],
    ),
    (
        "what tools of another server answered",
        [
            {"role": "assistant", "content": [
                {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "q"}},
                {"type": "web_search_tool_result", "tool_use_id": "s1", "content": [
                    {"type": "web_search_result", "title": "T", "url": "http://x", "encrypted_content": "x"}]},
                {"type": "mcp_tool_use", "id": "s2", "name": "ask", "server_name": "m", "input": {}},
                {"type": "mcp_tool_result", "tool_use_id": "s2", "is_error": True, "content": [
                    {"type": "text", "text": "no"}]},
                {"type": "text", "text": "So it is."},
            ]},
            {"role": "user", "content": "Good."},
        ],
        [
            "user hi", 'assistant  web_search({"query":"q"})',
            'tool [{"type":"web_search_result","title":"T","url":"http://x"}]',
            "assistant  ask({})", "tool Error: no", "assistant So it is.", "user Good.",
        ],
        [],
    ),
    (
        "documents and summaries of the user",
        [
            {"role": "user", "content": [
                {"type": "compaction", "content": "Before: much. "},
                {"type": "document", "title": "T", "context": "C", "citations": {"enabled": True},
                 "source": {"type": "content", "content": [{"type": "text", "text": "D"}]}},
                {"type": "container_upload", "file_id": "f"},
                {"type": "text", "text": "Read."},
            ]},
        ],
        ["user hi\n\nBefore: much. T\nC\nD\n\nRead."],
        ["messages.content.citations", "messages.content.container_upload"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("messages", "expected", "ignored"), [case[1:] for case in HISTORY], ids=[c[0] for c in HISTORY]
)
def test_a_history_that_was_made_elsewhere(messages: list[Any], expected: list[str], ignored: list[str]) -> None:
    history = History()
    for index, message in enumerate([*HI, *messages]):
        history.add(convert(message, Message), f"messages[{index}]")
    shown = []
    for message in history.messages:
        calls = "".join(f" {call.function.name}({call.function.arguments})" for call in message.tool_calls or ())
        shown.append(f"{message.role} {message.content}{calls}")
    assert shown == expected
    assert list(history.ignored) == ignored


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://x"}}]}, "[0].type"),
        ({"role": "user", "content": [{"type": "document", "source": {"type": "url", "url": "x"}}]}, "[0].source"),
        ({"role": "user", "content": [CALL]}, "[0].type"),
        ({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "no"}]}, "[0].tool_use_id"),
        ({"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "t"}]}, "[0].type"),
        ({"role": "system", "content": [{"type": "thinking", "thinking": "x"}]}, "[0].type"),
    ],
)
def test_blocks_that_do_not_belong_there(message: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        History().add(convert(message, Message), "messages[0]")
    assert refused.value.param == f"messages[0].content{param}"


def test_the_system_prompt_and_a_first_system_message_are_one() -> None:
    history = History()
    history.add_system([TextBlock(text="One."), TextBlock(text="Two.")])
    history.add(Message(role="system", content="Three."), "messages[0]")
    assert [(one.role, one.content) for one in history.messages] == [("system", "One.\n\nTwo.\n\nThree.")]


async def test_tools_with_types_examples_and_late_loading(serving: Serving, text: TextModel) -> None:
    found: Any = [
        *HI,
        {"role": "assistant", "content": [CALL]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [LATE]}]},
    ]
    late = {"name": "late", "input_schema": {"type": "object"}, "defer_loading": True}
    async with serving(long_window(text)) as running:

        async def offered(**body: Any) -> tuple[dict[str, Any], list[str]]:
            reply = await create(running, max_tokens=20, **body)
            assert reply.status_code == 200, reply.text
            said = prompt(running, text)
            listed = said.partition("<tools>\n")[2].partition("\n</tools>")[0].splitlines()
            return {tool["name"]: tool for tool in map(json.loads, listed)}, told(reply)

        tools, ignored = await offered(
            tools=[
                {"type": "bash_20250124", "name": "bash"},
                {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 100},
                {"type": "memory_20250818", "name": "memory"},
                {**WEATHER, "input_examples": [{"city": "Bern"}], "type": "custom"},
                {**CLOCK, "eager_input_streaming": False},
            ]
        )
        assert list(tools) == ["bash", "str_replace_based_edit_tool", "memory", "get_weather", "clock"]
        assert tools["bash"]["parameters"]["properties"].keys() == {"command", "restart"}
        assert tools["get_weather"]["description"] == 'Weather of a city\n\nExamples of its input:\n{"city":"Bern"}'
        assert sorted(ignored) == ["tools.eager_input_streaming", "tools.max_characters"]
        assert (await offered(tools=[CLOCK, late]))[0].keys() == {"clock"}
        assert (await offered(tools=[CLOCK, late], messages=found))[0].keys() == {"clock", "late"}
        tools, ignored = await offered(
            tools=[CLOCK, late, {"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"}]
        )
        assert (tools.keys(), ignored) == ({"clock", "late"}, ["tools.type"])
        assert (await offered(tool_choice={"type": "auto", "disable_parallel_tool_use": True})) == ({}, [])
        for kind in ("web_search_20250305", "code_execution_20250825", "computer_20250124", "mcp_toolset", "browser_x"):
            refused = await create(running, tools=[{"type": kind, "name": "x", "max_uses": 5}])
            assert refused.status_code == 400 and kind in refused.json()["error"]["message"]
        nameless = await create(running, tools=[{"name": "f"}])
        assert "tools[0].input_schema" in nameless.json()["error"]["message"]


async def test_an_answer_ends_where_the_window_does(serving: Serving, text: TextModel) -> None:
    async with serving(ScriptedEngine(text, lambda request: [ord("a")] * 600)) as running:
        for stream in (False, True):
            reply = await create(running, max_tokens=32000, stream=stream)
            assert reply.status_code == 200 and '"stop_reason":"model_context_window_exceeded"' in reply.text
        cut = await create(running, max_tokens=7)
        assert cut.json()["stop_reason"] == "max_tokens"
        long = await create(running, messages=[{"role": "user", "content": "a" * 700}])
        assert long.json()["error"]["message"].startswith("prompt is too long: 703 tokens > 512 maximum.")


async def test_the_answer_continues_the_assistant_s_last_message(serving: Serving, text: TextModel) -> None:
    begun: Any = [*HI, {"role": "assistant", "content": [{"type": "text", "text": "Once"}]}]
    async with serving(says(text, " upon a time")) as running:
        for stream in (False, True):
            reply = await create(running, messages=begun, stream=stream)
            assert reply.status_code == 200, reply.text
            assert prompt(running, text) == f"{USER}hi{END}{ASSISTANT}Once"
        whole = await sdk(running).messages.create(model="tiny", max_tokens=50, messages=begun)
        assert whole.content[0].text == " upon a time"  # type: ignore[union-attr]
        count = await sdk(running).messages.count_tokens(model="tiny", messages=begun)
        assert count.input_tokens == len(running.engine.seen[-1].prompt)
        called = await create(running, messages=[*HI, {"role": "assistant", "content": [CALL]}])
        assert called.status_code == 400 and "tool calls" in called.json()["error"]["message"]
        silent = await create(running, messages=[{"role": "assistant", "content": []}])
        assert silent.status_code == 400


async def test_thinking_is_told_to_templates_that_know_it(serving: Serving, tmp_path: Path) -> None:
    config = make_text(tmp_path).template_source
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["chat_template"] = config + "{{ '' if enable_thinking is undefined else enable_thinking }}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    text = load_text(tmp_path)
    async with serving(ScriptedEngine(text), text=text) as running:
        for thinking, end, ignored in (
            ({"type": "enabled", "budget_tokens": 1024}, "True", []),
            ({"type": "disabled"}, "False", []),
            ({"type": "adaptive", "display": "omitted"}, ASSISTANT, ["thinking"]),
            (None, ASSISTANT, []),
        ):
            reply = await create(running, thinking=thinking)
            assert (reply.status_code, told(reply)) == (200, ignored), reply.text
            assert prompt(running, text).endswith(end)


async def test_threads_are_refused_so_that_the_sdk_sends_the_whole_conversation(
    serving: Serving, text: TextModel
) -> None:
    calls = []

    @beta_async_tool
    async def look(at: str) -> str:
        """Look somewhere.

        Args:
            at: where
        """
        calls.append(at)
        return f"Nothing {at}."

    def script(request: Any) -> list[int]:
        written = text.decode(request.prompt, skip_special=False)
        answer = (
            "I see."
            if "Nothing" in written
            else '<tool_call>[{"name": "look", "arguments": {"at": "there"}}]</tool_call>'
        )
        return [*text.encode(answer), text.eos_token_ids[0]]

    async with serving(long_window(text, script)) as running:
        refused = await create(running, thread={"type": "create"})
        assert refused.status_code == 400
        assert refused.json()["error"]["details"] == {"error_code": "thread_unsupported_request"}
        with pytest.raises(anthropic.BadRequestError):
            await sdk(running).beta.messages.create(
                model="tiny", max_tokens=50, messages=HI, extra_body={"thread": {"type": "create"}}
            )
        runner = sdk(running).beta.messages.tool_runner(model="tiny", max_tokens=200, messages=HI, tools=[look])
        last = await runner.until_done()
        assert last.content[0].text == "I see." and calls == ["there"]  # type: ignore[union-attr]
        streamed = sdk(running).beta.messages.tool_runner(
            model="tiny", max_tokens=200, messages=HI, tools=[look], stream=True
        )
        texts = []
        async for stream in streamed:
            texts.append((await stream.get_final_message()).stop_reason)
        assert texts == ["tool_use", "end_turn"] and calls == ["there", "there"]


class Colour(BaseModel):
    name: str
    warm: bool


async def test_structured_output_with_the_helper_of_the_sdk(serving: Serving, text: TextModel) -> None:
    async with serving(says(text, '{"name": "red", "warm": true}')) as running:
        parsed = await sdk(running).messages.parse(model="tiny", max_tokens=50, messages=HI, output_format=Colour)
        assert parsed.parsed_output == Colour(name="red", warm=True)
        assert running.engine.seen[-1].params.grammar
        async with sdk(running).beta.messages.stream(
            model="tiny", max_tokens=50, messages=HI, output_format=Colour
        ) as stream:
            final = await stream.get_final_message()
        assert final.parsed_output == Colour(name="red", warm=True)
        older = await create(running, output_format={"type": "json_schema", "schema": {"type": "object"}})
        assert older.status_code == 200 and running.engine.seen[-1].params.grammar


async def test_json_that_is_nested_too_deeply_is_refused(serving: Serving) -> None:
    async with serving() as running:
        for depth in (100, 500, 900):
            schema: Any = {}
            for _ in range(depth):
                schema = {"a": schema}
            tools = [{"name": "f", "input_schema": {"type": "object", "properties": schema}}]
            content = json.dumps({"model": "tiny", "messages": HI, "max_tokens": 5, "tools": tools})
            reply = await running.client.post(
                "/v1/messages", content=content, headers={"content-type": "application/json"}
            )
            assert reply.status_code == 400, reply.text
            assert ("nested too deeply" in reply.text) == (depth > 100)  # the other is too long for the window
