"""What goes wrong between two servers, in every dialect: a client of ours sees one clear error, never half an answer
that looks whole (R-RT-7, R-RT-8)."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from penstock.backends.remote.failure import ServerOverloaded, ServerRefused, retry_after
from penstock.protocol.errors import ApiError, EngineLost, EngineUnavailable, InvalidRequest
from tests.backends.remote import test_anthropic, test_azure, test_bedrock, test_ollama, test_open_servers, test_tgi
from tests.backends.remote.scripted_server import JSON, NDJSON, SSE, Reply, ask, client, error, scripted, sse

OPENAI = sse(
    test_open_servers.chunk({"content": "Hé"}),
    test_open_servers.chunk({"content": "llo 日本"}),
    test_open_servers.chunk({}, "stop"),
    done=True,
)
GENERATE = sse(test_tgi.token("Hé"), test_tgi.token("llo 日本"), test_tgi.ended("Héllo 日本", "eos_token"))
TRITON = sse(test_tgi.piece("Hé"), test_tgi.piece("llo 日本"))

STREAMS: dict[str, tuple[bytes, dict[str, str], Any]] = {
    **dict.fromkeys((*test_open_servers.OPEN, "tgi"), (OPENAI, SSE, "chat")),
    "azure": (test_azure.TEXT, SSE, "chat"),
    "anthropic": (test_anthropic.TEXT, SSE, "chat"),
    "bedrock": (test_bedrock.TEXT, test_bedrock.BINARY, "chat"),
    "ollama": (test_ollama.TEXT, NDJSON, "chat"),
    "triton": (TRITON, SSE, "completions"),
}
"""A whole answer in each dialect: the text `Héllo 日本`."""
DIALECTS = list(STREAMS)


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKID")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-aws")
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    monkeypatch.setenv("UPSTREAM", "sk-upstream-key")


async def outcome(dialect: str, reply: Reply, **options: Any) -> str | ApiError:
    """The text of the answer, or the error."""
    operation = STREAMS[dialect][2]
    body = {"prompt": "hi"} if operation == "completions" else {}
    async with scripted(reply) as there, client(there, dialect, **options) as server:
        try:
            answer = await ask(server, operation, **body)
        except ApiError as error:
            assert server.in_flight == 0
            return error
        assert answer.reason is not None
        return answer.text


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_whole_answers_in_odd_pieces(dialect: str) -> None:
    stream, headers, _ = STREAMS[dialect]
    for size in (7, 1000):  # single bytes: see test_frames.py
        parts = [stream[at : at + size] for at in range(0, len(stream), size)]
        assert await outcome(dialect, Reply(parts, headers=headers)) == "Héllo 日本"


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_statuses(dialect: str, caplog: pytest.LogCaptureFixture) -> None:
    told = {"type": "error", "error": {"type": "some_error", "message": "secret detail", "code": None}, "message": "m"}
    for status, wanted in ((401, ServerRefused), (403, ServerRefused), (404, ServerRefused), (500, EngineUnavailable),
                           (502, EngineUnavailable), (504, EngineUnavailable), (418, EngineUnavailable)):  # fmt: skip
        found = await outcome(dialect, error(status, told), key_env="UPSTREAM")
        assert type(found) is wanted and "secret detail" not in found.message and found.status == 503, status
    for status, header, wait in ((429, "17", 17), (529, "3", 3), (503, "4", 4)):
        found = await outcome(dialect, error(status, told, retry_after=header))
        assert isinstance(found, ServerOverloaded) and found.retry_after == wait
    assert isinstance(await outcome(dialect, error(429, told)), ServerOverloaded)
    for status in (400, 413, 422):
        found = await outcome(dialect, error(status, told))
        assert isinstance(found, InvalidRequest) and "secret detail" in found.message
    for body in (b"", b"<html>no</html>", b'"x"', b"[1]", b'{"error": 3}', b"\xff\xfe"):
        assert isinstance(await outcome(dialect, Reply(body, 400, dict(JSON))), InvalidRequest)
    assert "sk-upstream-key" not in caplog.text and "secret-of-aws" not in caplog.text


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_connection_that_is_cut(dialect: str) -> None:
    stream, headers, _ = STREAMS[dialect]
    found = await outcome(dialect, Reply(stream[: len(stream) // 2], headers=headers, cut=True))
    assert type(found) is EngineLost
    found = await outcome(dialect, Reply(b"", headers=headers, cut=True))
    assert isinstance(found, EngineUnavailable)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_garbage_in_place_of_an_answer(dialect: str) -> None:
    _, headers, _ = STREAMS[dialect]
    garbage = [b"\x00\xff\xfe" * 40, b'{"choices": "x"}\n', b"[]\n", b"null\n", b'{"type": "content_block_delta"}\n']
    if headers is SSE:
        garbage = [b"data: " + each.strip() + b"\n\n" for each in garbage]
    for each in garbage:
        async with scripted(Reply(each, headers=headers)) as there, client(there, dialect) as server:
            operation = STREAMS[dialect][2]
            body = {"prompt": "hi"} if operation == "completions" else {}
            try:
                answer = await ask(server, operation, **body)
            except EngineLost:
                continue
            assert not answer.text and answer.reason is None, (dialect, each)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_silence(dialect: str) -> None:
    stream, headers, _ = STREAMS[dialect]
    reply = Reply([stream[: len(stream) // 2], stream[len(stream) // 2 :]], headers=headers, pause_s=0.3)
    found = await outcome(dialect, reply, timeout_s=0.1)
    assert isinstance(found, EngineUnavailable)


@pytest.mark.parametrize("dialect", ["openai", "vllm", "sglang", "tensorrt-llm", "llama.cpp", "azure", "penstock"])
async def test_an_error_in_the_middle(dialect: str, caplog: pytest.LogCaptureFixture) -> None:
    begun = sse(test_open_servers.chunk({"content": "Hé"}))
    for body, wanted in (
        ({"error": {"message": "secret detail", "type": "InternalServerError", "code": 500}}, EngineLost),
        ({"error": "secret detail"}, EngineLost),
        ({"error": {"message": "too busy", "type": "overloaded"}}, ServerOverloaded),
        ({"error": {"message": "bad token", "type": "BadRequestError", "code": 400}}, InvalidRequest),
    ):
        found = await outcome(dialect, Reply(begun + sse(body)))
        assert type(found) is wanted and "secret detail" not in str(found)


async def test_an_error_in_the_middle_of_a_message() -> None:
    begun = sse(test_anthropic.START, kinds=True)
    for kind, wanted in (("overloaded_error", ServerOverloaded), ("api_error", EngineLost), ("", EngineLost)):
        body = {"type": "error", "error": {"type": kind, "message": "Overloaded"}}
        assert type(await outcome("anthropic", Reply(begun + sse(body, kinds=True)))) is wanted


async def test_our_own_account_is_no_business_of_clients(caplog: pytest.LogCaptureFixture) -> None:
    spent = {
        "error": {"message": "You exceeded your quota", "type": "insufficient_quota", "code": "insufficient_quota"}
    }
    low = {"type": "error", "error": {"type": "invalid_request_error", "message": "Your credit balance is too low"}}
    with caplog.at_level(logging.WARNING):
        for dialect, status, body in (("openai", 429, spent), ("anthropic", 400, low)):
            found = await outcome(dialect, error(status, body))
            assert type(found) is ServerRefused and "quota" not in found.message and "credit" not in found.message
    assert "remote server refuses us" in caplog.text


async def test_a_prompt_that_is_too_long_keeps_its_code() -> None:
    told = {"error": {"message": "too long", "type": "invalid_request_error", "code": "context_length_exceeded"}}
    found = await outcome("openai", error(400, told))
    assert isinstance(found, InvalidRequest) and found.code == "context_length_exceeded"


def test_the_time_to_wait() -> None:
    assert retry_after({"retry-after": "3"}) == 3 and retry_after({"retry-after-ms": "1500"}) == 1.5
    assert retry_after({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}) == 0
    assert retry_after({}) is None and retry_after({"retry-after": "soon"}) is None


async def test_a_server_that_does_not_stream() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": "Héllo 日本", "tool_calls": [call, {**call, "id": "d"}]}
    body = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": {"prompt_tokens": 3}}
    for dialect in ("openai", "vllm", "azure", "tgi", "llama.cpp"):
        assert await outcome(dialect, error(200, body)) == "Héllo 日本"
    async with scripted(error(200, body)) as there, client(there, "openai") as server:
        answer = await ask(server)
        assert [made[0] for made in answer.calls] == ["c", "d"] and answer.usage == (3, 0, 0)
    for dialect in ("openai", "anthropic", "triton"):
        failed = await outcome(dialect, error(200, {"error": {"message": "secret detail", "type": "x"}}))
        assert type(failed) is EngineLost and "secret" not in failed.message
        assert type(await outcome(dialect, error(200, [1]))) is EngineLost


async def test_chunks_that_are_not_quite_right() -> None:
    odd = {"choices": [{"index": 0, "delta": None, "finish_reason": None}], "usage": {"prompt_tokens": "4"}}
    none = {"choices": None, "usage": {"prompt_tokens": 4, "completion_tokens": None}}
    assert await outcome("openai", Reply(sse(odd, none) + OPENAI)) == "Héllo 日本"


async def test_an_endless_error_is_cut_off() -> None:
    found = await outcome("openai", Reply([b"x" * 60_000] * 40, 400, dict(JSON)))
    assert isinstance(found, InvalidRequest)
