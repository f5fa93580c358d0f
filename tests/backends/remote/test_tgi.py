"""Text Generation Inference and Triton: their own streams (R-RT-8, R-RT-9)."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.backends.remote.failure import ServerOverloaded
from penstock.protocol.errors import EngineLost, InvalidRequest
from tests.backends.remote.scripted_server import TOOLS, Reply, ask, client, error, reply_json, scripted, sse


def token(text: str, index: int = 1, **more: Any) -> dict[str, Any]:
    made = {"id": index, "text": text, "logprob": -0.5, "special": more.pop("special", False)}
    return {"index": index, "token": made, "generated_text": None, "details": None, **more}


def ended(text: str, reason: str, piece: str = "", special: bool = True) -> dict[str, Any]:
    details = {"finish_reason": reason, "generated_tokens": 4, "seed": None, "input_length": 6}
    return token(piece or "</s>", 9, special=special, generated_text=text, details=details)


def tight(stream: bytes) -> bytes:
    """Its events have no blank after the colon."""
    return stream.replace(b"data: ", b"data:")


async def test_generate_stream() -> None:
    tops = [{"id": 2, "text": " yo", "logprob": -1.5, "special": False}]
    stream = tight(sse(token("Hé", top_tokens=tops), token("llo 日本"), ended("Héllo 日本", "eos_token")))
    async with scripted(Reply(stream)) as there, client(there, "tgi", path="/v1") as server:
        answer = await ask(
            server, "completions", prompt="hi", max_tokens=20, temperature=0, top_p=1, top_k=4, seed=7, logprobs=1
        )
        await ask(server, "completions", prompt="hi", temperature=0.7)
    assert (answer.text, answer.reason, answer.usage) == ("Héllo 日本", "stop", (6, 4, 0))
    odds = [odd for k in answer.chunks for c in k.choices if c.logprobs for odd in c.logprobs.content or ()]
    assert [odd.token for odd in odds] == ["Hé", "llo 日本"] and odds[0].top_logprobs[0].logprob == -1.5
    assert there.asked[0].target == "/generate_stream"
    wanted = {"max_new_tokens": 20, "do_sample": False, "top_k": 4, "seed": 7, "top_n_tokens": 1, "details": True}
    assert there.asked[0].json == {"inputs": "hi", "parameters": wanted}
    assert there.asked[1].json["parameters"]["temperature"] == 0.7
    assert there.asked[1].json["parameters"]["do_sample"] is True


async def test_stop_strings_are_cut_off_here() -> None:
    stream = sse(token("one"), token(" E"), token("N"), ended("one END", "stop_sequence", "D", special=False))
    async with scripted(Reply(stream)) as there, client(there, "tgi") as server:
        answer = await ask(server, "completions", prompt="hi", stop=["END"])
    assert answer.text == "one " and answer.reason == "stop"


def chunk(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


async def test_chat_with_stops_and_reasons_of_its_own() -> None:
    stream = sse(
        chunk({"role": "assistant", "content": "a S"}),
        chunk({"role": "assistant", "content": "TO"}),
        chunk({"role": "assistant", "content": "P"}, "stop_sequence"),
        {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}},
        done=True,
    )
    async with scripted(Reply(stream)) as there, client(there, "tgi") as server:
        answer = await ask(server, stop="STOP")
    assert (answer.text, answer.reason, answer.usage) == ("a ", "stop", (3, 4, 0))
    assert there.asked[0].target == "/v1/chat/completions"


async def test_calls_of_older_versions_are_objects() -> None:
    def call(arguments: Any, name: str | None = None) -> dict[str, Any]:
        return {"index": 0, "id": "0", "type": "function", "function": {"name": name, "arguments": arguments}}

    older = sse(
        chunk({"role": "assistant", "tool_calls": call("", "weather")}),
        chunk({"role": "assistant", "tool_calls": call('{"city":')}),
        chunk({"role": "assistant", "tool_calls": call('"Rome"}')}),
        chunk({"role": "assistant", "content": ""}, "eos_token"),
        done=True,
    ).replace(b'"tool_calls": {', b'"tool_calls":{')
    newer = sse(chunk({"tool_calls": [call({"city": "Rome"}, "weather")]}), chunk({}, "tool_calls"), done=True).replace(
        b'"arguments": {', b'"arguments":{'
    )
    for stream, reason in ((older, "stop"), (newer, "tool_calls")):
        async with scripted(Reply(stream)) as there, client(there, "tgi") as server:
            answer = await ask(server, tools=TOOLS)
        assert answer.calls == [("0", "weather", {"city": "Rome"})] and answer.reason == reason


async def test_errors() -> None:
    for operation, body in (("completions", {"prompt": "hi"}), ("chat", {})):
        middle = sse({"error": "Request failed during generation: out of memory", "error_type": "generation"})
        begun = sse(token("a") if operation == "completions" else chunk({"content": "a"}))
        async with scripted(Reply(begun + middle)) as there, client(there, "tgi") as server:
            with pytest.raises(EngineLost):
                await ask(server, operation, **body)
        full = error(429, {"error": "Model is overloaded", "error_type": "overloaded"})
        async with scripted(full) as there, client(there, "tgi") as server:
            with pytest.raises(ServerOverloaded):
                await ask(server, operation, **body)
            assert server.wait_s() > 0
        wrong = error(
            422, {"error": "Input validation error: `temperature` must be positive", "error_type": "validation"}
        )
        async with scripted(wrong) as there, client(there, "tgi") as server:
            with pytest.raises(InvalidRequest, match="must be positive"):
                await ask(server, operation, **body)


async def test_what_fits_depends_on_the_operation() -> None:
    async with scripted(Reply(b"")) as there, client(there, "tgi") as server:
        assert server.fit({"top_k": 4}, "completions").refused == () and server.fit({"top_k": 4}).refused == ("top_k",)
        assert server.fit({"tools": TOOLS}).refused == ()
        assert server.fit({"response_format": {"type": "json_object"}}, "completions").refused == ("response_format",)


async def test_tokens() -> None:
    tokens = [{"id": 4, "text": "a", "start": 0, "stop": 1}, {"id": 5, "text": "b", "start": 1, "stop": 2}]
    async with scripted(reply_json(tokens)) as there, client(there, "tgi") as server:
        found = await server.count({"prompt": "ab"}, "r")
    assert (found.count, found.tokens) == (2, [4, 5]) and there.asked[0].json["inputs"] == "ab"


def piece(text: str) -> dict[str, Any]:
    return {
        "context_logits": 0.0,
        "cum_log_probs": 0.0,
        "model_name": "ensemble",
        "model_version": "1",
        "sequence_end": False,
        "sequence_id": 0,
        "sequence_start": False,
        "text_output": text,
    }


async def test_triton_generates_text() -> None:
    stream = sse(piece("Hé"), piece("llo"), piece(" 日本"))
    async with scripted(Reply(stream)) as there, client(there, "triton", model="ensemble") as server:
        answer = await ask(server, "completions", prompt="hi", seed=3, top_k=-1, stop=["X"])
        cut = await ask(server, "completions", prompt="hi", max_tokens=3)
        await server.check()
        assert not server.supports("chat")
        with pytest.raises(InvalidRequest, match="no chat"):
            await ask(server)
    assert answer.text == "Héllo 日本" and answer.reason == "stop" and cut.reason == "length"
    first, _, health = there.asked
    assert first.target == "/v2/models/ensemble/generate_stream" and health.target == "/v2/models/ensemble/ready"
    assert first.json == {
        "text_input": "hi",
        "max_tokens": 4096,
        "stream": True,
        "random_seed": 3,
        "stop_words": ["X"],
    }


async def test_triton_fails_in_the_middle() -> None:
    async with (
        scripted(Reply(sse(piece("a"), {"error": "in ensemble 'ensemble', Streaming failed"}))) as there,
        client(there, "triton") as server,
    ):
        with pytest.raises(EngineLost):
            await ask(server, "completions", prompt="hi")
