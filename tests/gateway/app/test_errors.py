"""R-GW-3: every bad request is refused in the OpenAI shape, before it reaches an engine."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.gateway.api.openai.models import ModelEndpoints
from penstock.gateway.app.asgi import App
from penstock.gateway.http.connections import Application, Receive, Send
from penstock.gateway.http.request import Scope
from penstock.text import TextModel
from tests.gateway.api.test_identity import make_key
from tests.gateway.conftest import Serving, garbage
from tests.scripted import ScriptedEngine

USER = {"role": "user", "content": "hi"}
JSON = {"content-type": "application/json"}
CALLED = {"name": "f", "arguments": "{}"}


def assert_shape(body: dict[str, Any]) -> dict[str, Any]:
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]


def schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def tool(name: str, **definition: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **definition}}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "other", "function": {"name": "f"}}]}, "tools[0].type"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": {"type": "regex", "regex": "(a"}}, "response_format"),
    ({"response_format": {"type": "grammar", "grammar": "start: nothing"}}, "response_format"),
    ({"response_format": {"type": "choice", "choice": []}}, "response_format.choice"),
    (schema({"type": "string", "not": {}}), "response_format.json_schema.schema"),
    (schema({"$ref": "https://example.com/x"}), "response_format.json_schema.schema"),
    (schema({"x-guidance": {"lenient": True}}), "response_format.json_schema.schema"),
    (schema({"description": "x" * 300_000}), "response_format.json_schema.schema"),
    ({"tools": [tool("f"), tool("f")]}, "tools[1].function.name"),
    ({"tools": [tool("bad name")]}, "tools[0].function.name"),
    ({"tools": [tool("f", parameters={"type": "array"})]}, "tools[0].function.parameters"),
    ({"tools": [tool("f", parameters={"not": {}}, strict=True)]}, "tools"),
    ({"tools": [tool("f", parameters={"not": {}})], "tool_choice": "required"}, "tools"),
    ({"tools": [tool("f")], "tool_choice": "maybe"}, "tool_choice"),
    ({"tools": [tool("f")], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ({"functions": [{"name": "f"}], "tools": [tool("f")]}, "tools"),
    ({"functions": [{"name": "f"}], "tool_choice": "auto"}, "tool_choice"),
    ({"functions": [{"name": "f"}], "parallel_tool_calls": True}, "parallel_tool_calls"),
    ({"functions": [{"name": "f"}, {"name": "f"}]}, "functions[1].name"),
    ({"functions": [{"name": "bad name"}]}, "functions[0].name"),
    ({"functions": [{"name": "f", "parameters": {"type": "array"}}]}, "functions[0].parameters"),
    ({"functions": [{"name": "f", "parameters": {"not": {}}}], "function_call": {"name": "f"}}, "functions"),
    ({"functions": [{"name": "f"}], "function_call": "required"}, "function_call"),
    ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call"),
    ({"functions": [{"name": "f"}], "server_tools": ["x"]}, "server_tools"),
    ({"function_call": "auto"}, "function_call"),
    ({"parallel_tool_calls": True}, "parallel_tool_calls"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"store": True}, "store"),
    ({"stop_regex": "a+"}, "stop_regex"),
    ({"best_of": 2}, "best_of"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [USER, {"role": "user", "content": 5}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "prefix": True}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].name"),
    ({"messages": [{"role": "user", "content": "x", "function_call": CALLED}]}, "messages[0].function_call"),
    ({"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "messages[0].function_call.arguments"),
    (
        {
            "messages": [
                {
                    "role": "assistant",
                    "function_call": CALLED,
                    "tool_calls": [{"id": "1", "type": "function", "function": CALLED}],
                }
            ]
        },
        "messages[0].function_call",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"model": ""}, "model"),
    ({"model": 3}, "model"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"speculation": "no"}, "speculation"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"5": 101}}, "logit_bias[...]"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": 1000}, "messages"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"min_tokens": 20, "max_tokens": 10}, "min_tokens"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"allowed_token_ids": [99999]}, "allowed_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"bad_words": [" "]}, "bad_words"),
    ({"typical_p": 1.1}, "typical_p"),
    ({"repeat_penalty": 1.5, "repetition_penalty": 1.2}, "repeat_penalty"),
    ({"n_predict": 5, "max_tokens": 6}, "n_predict"),
    ({"n_predict": 0}, "max_tokens"),
    ({"min_new_tokens": 20, "max_new_tokens": 10}, "min_tokens"),
    ({"n_probs": 3, "top_logprobs": 2, "logprobs": True}, "n_probs"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"mirostat": 2}, "mirostat"),
    ({"cache_salt": 5}, "cache_salt"),
    ({"priority": "high"}, "priority"),
    ({"seed": 2**64}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop": ""}, "stop"),
    ({"stop_token_ids": [99999]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_obfuscation": "yes"}}, "stream_options.include_obfuscation"),
    ({"service_tier": "gold"}, "service_tier"),
    ({"metadata": {"a": 1}}, "metadata[...]"),
    ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
    ({"user": 5}, "user"),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_parameter_that_cannot_be_honoured_is_refused_by_name(serving: Serving, stream: bool) -> None:
    async with serving() as gateway:
        for body, param in REFUSED:
            reply = await gateway.chat(**{"stream": stream, **body} if stream else body)
            if stream and body == {"stream_options": {"include_usage": True}}:
                continue  # allowed there
            assert reply.status_code == 400, (body, reply.text)
            error = assert_shape(reply.json())
            assert error["type"] == "invalid_request_error"
            assert error["param"] == param, (body, error)
            assert "x-request-id" in reply.headers
        if not stream:
            assert not gateway.engine.seen
        assert (await gateway.chat()).status_code == 200


@pytest.mark.parametrize("kind", ["image_url", "input_image", "input_audio", "video_url"])
async def test_what_is_seen_or_heard_is_refused_as_such(serving: Serving, kind: str) -> None:
    """Of a model that was made for images too, clients expect that it takes them."""
    async with serving() as gateway:
        content = [{"type": "text", "text": "what is this?"}, {"type": kind, kind: {"url": "data:image/png;base64,AA"}}]
        reply = await gateway.chat(messages=[{"role": "user", "content": content}])
        assert reply.status_code == 400 and not gateway.engine.seen
        error = assert_shape(reply.json())
        assert error["param"] == "messages[0].content[1].type"
        assert f"`{kind}`" in error["message"] and "reads and writes text" in error["message"]


@pytest.mark.parametrize("kind", ["input_image", "image", "input_audio"])
async def test_responses_refuse_it_in_the_same_words(serving: Serving, kind: str) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    part = {"type": kind, "image_url": "data:image/png;base64,AA"}
    result = {"type": "function_call_output", "call_id": "c", "output": [part]}
    async with serving() as gateway:
        for given, param in (
            ([{"role": "user", "content": [part]}], "input[0].content[0].type"),
            ([{"role": "user", "content": "x"}, call, result], "input[2].output[0].type"),
        ):
            reply = await gateway.client.post("/v1/responses", json={"model": "tiny", "input": given})
            assert reply.status_code == 400 and not gateway.engine.seen
            error = assert_shape(reply.json())
            assert error["param"] == param and error["code"] == "unsupported_parameter"
            assert f"`{kind}`" in error["message"] and "reads and writes text" in error["message"]


async def test_what_means_nothing_is_accepted(serving: Serving) -> None:
    async with serving() as gateway:
        reply = await gateway.chat(
            store=False,
            tools=[],
            tool_choice="none",
            response_format={"type": "text"},
            modalities=["text"],
            user="ann",
            metadata={"feature": "x"},
            prompt_cache_key="k",
            safety_identifier="s",
            service_tier="flex",
        )
        assert reply.status_code == 200, reply.text
        assert gateway.engine.seen[0].priority > 0


async def test_context_overflow_says_both_numbers(serving: Serving) -> None:
    async with serving() as gateway:
        reply = await gateway.chat(messages=[{"role": "user", "content": "x" * 600}])
        error = assert_shape(reply.json())
        assert error["code"] == "context_length_exceeded"
        assert "512" in error["message"] and "603" in error["message"]
        explicit = assert_shape((await gateway.chat(max_tokens=510)).json())
        assert explicit["code"] == "context_length_exceeded"
        assert "512" in explicit["message"] and "515" in explicit["message"]
        # The default is what fits.
        await gateway.chat()
        assert gateway.engine.seen[-1].params.max_tokens == 507


async def test_the_servers_own_cap_on_tokens(serving: Serving) -> None:
    async with serving(max_tokens=50, default_max_tokens=9) as gateway:
        assert assert_shape((await gateway.chat(max_tokens=51)).json())["param"] == "max_tokens"
        await gateway.chat()
        assert gateway.engine.seen[-1].params.max_tokens == 9


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"5",
        b'"x"',
        b"{}",
        b"\xff\xfe",
        b'{"model":"tiny","messages":[{"role":"user","content":"\xff"}]}',
        b'{"model":"tiny","messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"model":"tiny","temperature":NaN}',
        b'{"model":"tiny","temperature":1e999}',
        b'{"model":"tiny","tools":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b'{"model":"tiny","messages":[{"role":"user","content":[' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"]}]}",
        b"[" * 100_000,
        b'{"model":"tiny","n":1' + b"0" * 10_000 + b"}",
        b'{"' + b"x" * 100_000 + b'":1}',
    ],
)
async def test_bodies_that_are_not_requests(serving: Serving, body: bytes) -> None:
    async with serving() as gateway:
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/tokenize", "/v1/detokenize"):
            reply = await gateway.client.post(path, content=body, headers=JSON)
            assert reply.status_code == 400, reply.text
            error = assert_shape(reply.json())
            assert len(error["message"]) < 1000


async def test_with_a_key_the_content_type_does_not_matter(serving: Serving, tmp_path: Path) -> None:
    async with serving(store_url=f"sqlite:///{tmp_path}/store.db") as gateway:
        await gateway.client.post("/v1/admin/tenants", json={"id": "acme"})
        gateway.client.headers["authorization"] = f"Bearer {await make_key(gateway)}"
        body = json.dumps({"model": "tiny", "messages": [USER]}).encode()
        for headers in ({}, {"content-type": "text/plain"}, {"content-type": "nonsense"}):
            reply = await gateway.client.post("/v1/chat/completions", content=body, headers=headers)
            assert reply.status_code == 200


async def test_a_body_over_the_limit_is_413(serving: Serving) -> None:
    async with serving(body_limit=2048) as gateway:
        reply = await gateway.client.post("/v1/chat/completions", content=b"x" * 10_000_000, headers=JSON)
        assert reply.status_code == 413
        message = assert_shape(reply.json())["message"]
        assert "2048" in message and "10000000" in message

        async def chunked() -> Any:
            for _ in range(8):
                yield b"x" * 1024

        reply = await gateway.client.post("/v1/chat/completions", content=chunked(), headers=JSON)
        assert reply.status_code == 413
        assert (await gateway.chat()).status_code == 200


async def test_unknown_model_path_and_method(serving: Serving) -> None:
    async with serving() as gateway:
        reply = await gateway.chat(model="gpt-9")
        assert reply.status_code == 404
        error = assert_shape(reply.json())
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert "`tiny`" in error["message"]
        reply = await gateway.client.get("/v1/nothing")
        assert reply.status_code == 404
        assert_shape(reply.json())
        assert "x-request-id" in reply.headers
        reply = await gateway.client.get("/v1/completions")
        assert reply.status_code == 405
        assert_shape(reply.json())
        assert reply.headers["allow"] == "POST"
        for path, status in (("/v1/messages", 405), ("/v1/messages/nothing", 404)):
            reply = await gateway.client.get(path)
            assert reply.status_code == status and reply.headers["request-id"] == reply.headers["x-request-id"]
            assert reply.json()["type"] == "error" and isinstance(reply.json()["error"]["message"], str)
        for path, status in (("/api/chat", 405), ("/api/nothing", 404)):
            reply = await gateway.client.get(path)
            assert reply.status_code == status and isinstance(reply.json()["error"], str), "in Ollama's form"
        assert (await gateway.client.delete("/v1/models")).status_code == 405
        assert (await gateway.client.put("/v1/files")).headers["allow"] == "GET, HEAD, POST", "all of them"
        reply = await gateway.client.get("/v1/files/?a=b", headers={"host": "localhost:1"})
        assert reply.status_code == 307 and reply.headers["location"] == "/v1/files?a=b", "it names no host"
        assert (await gateway.client.get("/v1/models/gpt-9")).status_code == 404
        for models in ("/v1/models/", "/v1/models//"):
            reply = await gateway.client.get(models)
            assert reply.status_code == 307 and reply.headers["location"] == "/v1/models", "not a model without a name"
        reply = await gateway.client.get(f"http://127.0.0.1:{gateway.port}//v1//files")
        assert reply.status_code == 307 and reply.headers["location"] == "/v1/files"


async def test_a_wrong_base_url_is_told_apart_from_what_does_not_exist(serving: Serving) -> None:
    async with serving() as gateway:
        for sent, meant in (
            ("/chat/completions", "/v1/chat/completions"),
            ("/v1/v1/messages", "/v1/messages"),
            ("/v1/api/chat", "/api/chat"),
            ("/openai/deployments/tiny/chat/completions", "/v1/chat/completions"),
        ):
            reply = await gateway.client.post(sent, json={})
            message = assert_shape(reply.json())["message"] if "messages" not in sent else reply.text
            assert reply.status_code == 404 and f"Did you mean {meant}?" in message and "base URL" in message, message
        for sent in ("/v1/audio/speech", "/" + "a/" * 500 + "models"):
            assert "listed at /docs" in assert_shape((await gateway.client.post(sent, json={})).json())["message"]


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b'{"model": "tiny"', "ends too early, after 16 bytes"),
        ('{"model": "tiny"}'.encode("utf-16"), "UTF-16"),
        ('{"model": "tiny"}'.encode("utf-16-be"), "UTF-16"),
        (b'{"temperature": NaN}', "no NaN"),
        (b'{"temperature": -Infinity}', "no NaN and no Infinity"),
        (b'{"stream": True}', "true, false and null"),
        (b"{'model': 'tiny'}", "double quotes"),
        (b'{"prompt": "a\nb"}', "written as \\n"),
        (b'{"prompt": "\\udc00 half of an emoji"}', "Half of a character"),
        (b'{"messages": [{"content": "half of an emoji: \\ud83d"}]}', "Half of a character"),
        (b'{"prompt": "an emoji: \\ud83d\\ude00"', "ends too early"),
        (b'{"prompt": "\xff"}', "UTF-8"),
    ],
)
async def test_a_body_that_is_no_json_is_refused_with_what_mends_it(serving: Serving, sent: bytes, words: str) -> None:
    async with serving() as gateway:
        reply = await gateway.client.post("/v1/completions", content=sent, headers=JSON)
        error = assert_shape(reply.json())
        assert reply.status_code == 400 and error["code"] == "invalid_json" and words in error["message"], error


@pytest.mark.parametrize(
    ("path", "sent", "words"),
    [
        ("chat/completions", {"messages": [{"role": "User", "content": "hi"}]}, "`assistant`, `developer`, `function`"),
        ("chat/completions", {"messages": [USER], "service_tier": "gold"}, "use one of `auto`, `default`"),
        ("responses", {"input": "hi", "truncation": "left"}, "use one of `auto`, `disabled`"),
        ("responses", {"input": "hi", "text": {"format": {"type": "xml"}}}, "`json_schema`"),
        ("messages", {"messages": [{"role": "tool", "content": "hi"}], "max_tokens": 1}, "`assistant`"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "input_text"}]}]}, "of type `text`"),
        ("chat/completions", {"messages": [USER], "web_search_options": {"a": 1}}, "search in the client"),
        ("chat/completions", {"messages": [USER], "modalities": ["audio"]}, '["text"]'),
        ("responses", {"input": "hi", "prompt": {"id": "pmpt_1"}}, "as `instructions` and `input`"),
        ("messages", {"messages": [USER], "max_tokens": 1, "inference_geo": "eu"}, "x-penstock-require: region="),
    ],
)
async def test_what_is_refused_is_refused_with_what_would_do(
    serving: Serving, path: str, sent: dict[str, Any], words: str
) -> None:
    async with serving() as gateway:
        reply = await gateway.client.post(f"/v1/{path}", json={"model": "tiny", **sent})
        assert reply.status_code == 400 and words in reply.json()["error"]["message"], reply.text


async def test_a_byte_order_mark_is_no_part_of_the_json(serving: Serving) -> None:
    """Windows PowerShell and .NET put one in front of UTF-8."""
    body = json.dumps({"model": "tiny", "messages": [USER], "max_tokens": 1}).encode("utf-8-sig")
    async with serving() as gateway:
        assert (await gateway.client.post("/v1/chat/completions", content=body, headers=JSON)).status_code == 200


async def test_a_bug_is_a_500_with_the_request_id_and_the_server_goes_on(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: object) -> None:
        raise ZeroDivisionError("secret detail")

    async with serving() as gateway:
        monkeypatch.setattr(ModelEndpoints, "describe", broken)
        reply = await gateway.client.get("/v1/models")
        assert reply.status_code == 500
        error = assert_shape(reply.json())
        assert error["type"] == "server_error"
        assert reply.headers["x-request-id"] in error["message"]
        assert "secret detail" not in reply.text
        assert "secret detail" in caplog.text
        assert (await gateway.chat()).status_code == 200


async def test_what_escapes_every_handler_is_a_500_too_and_is_counted(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def front(app: App) -> Application:
        async def broken(scope: Scope, receive: Receive, send: Send) -> None:
            if b"x-break" in dict(scope["headers"]):
                raise ValueError("in front of the application")
            await app(scope, receive, send)

        return broken

    def page(document: object) -> str:
        raise ValueError("in a page")

    async with serving(wrap=front) as running:
        for path in ("/v1/chat/completions", "/v1/messages"):
            response = await running.client.post(path, content=b"{}", headers={"x-break": "1", "x-request-id": "r-1"})
            assert response.status_code == 500 and response.headers["x-request-id"] == "r-1"
            assert "r-1" in response.json()["error"]["message"]
            assert ("request_id" in response.json()) == (path == "/v1/messages"), "in the words of the API"
        monkeypatch.setattr("penstock.gateway.app.docs_page.page", page)
        response = await running.client.get("/docs")
        assert response.status_code == 500
        assert_shape(response.json())
        assert (await running.chat(max_tokens=2)).status_code == 200
        assert (
            await running.metric('penstock_errors_total{route="/v1/chat/completions",status="500",code="escaped"}') == 1
        )
        assert await running.metric('penstock_errors_total{route="/docs",status="500",code="unhandled"}') == 1
    said = [record for record in caplog.records if record.exc_info and "outside of a handler" in record.message]
    assert len(said) == 2 and said[0].request_id == "r-1"  # type: ignore[attr-defined]


async def test_requests_leave_nothing_for_the_garbage_collector(
    serving: Serving, text: TextModel, tmp_path: Path
) -> None:
    async with serving(ScriptedEngine(text, step_s=0.001), store_url=f"sqlite:///{tmp_path}/store.db") as running:
        await running.chat(max_tokens=2)
        with garbage() as found:
            for _ in range(3):
                assert (await running.chat(max_tokens=4)).status_code == 200
                assert (await running.chat(max_tokens=4, stream=True)).status_code == 200
                assert (await running.complete(max_tokens=2, n=2)).status_code == 200
                assert (await running.chat(temperature=9)).status_code == 400
                assert (await running.client.get("/v1/models")).status_code == 200
                async with running.client.stream(
                    "POST", "/v1/chat/completions", json={"model": "tiny", "messages": [USER], "stream": True}
                ) as leaving:
                    assert leaving.status_code == 200
            await asyncio.sleep(0.2)
        assert not found, found


async def test_too_many_requests_in_flight_are_refused_with_a_hint(serving: Serving, text: TextModel) -> None:
    engine = ScriptedEngine(text)
    async with serving(engine) as gateway:
        gateway.parts.registry.route("tiny").model.backend._max_in_flight = 2  # type: ignore[attr-defined]
        reply = await gateway.chat(n=3)
        assert reply.status_code == 503
        assert reply.headers["x-penstock-reason"] == "queue_full"
        assert 1 <= int(reply.headers["retry-after"]) <= 120
        assert await gateway.metric('penstock_rejections_total{reason="queue_full"}') == 1
        assert (await gateway.chat()).status_code == 200
