"""Servers of open models: vLLM, SGLang, TensorRT-LLM, llama.cpp, Penstock, and anything with OpenAI's API
(R-RT-8, R-RT-9)."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.backends.remote.dialects import DIALECTS
from penstock.backends.remote.upstream import Upstream
from penstock.protocol.errors import EngineUnavailable, InvalidRequest
from tests.backends.remote.scripted_server import (
    CONVERSATION,
    TOOLS,
    Asked,
    Reply,
    ask,
    client,
    error,
    reply_json,
    scripted,
    sse,
)

OPEN = ["openai", "penstock", "vllm", "sglang", "tensorrt-llm", "llama.cpp"]


def chunk(delta: dict[str, Any], reason: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason, **more}
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}


def usage(prompt: int = 7, completion: int = 3, cached: int = 2) -> dict[str, Any]:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return {"choices": [], "usage": {**counts, "prompt_tokens_details": {"cached_tokens": cached}}}


@pytest.mark.parametrize("dialect", OPEN)
async def test_chat_with_comments_and_line_ends_of_two_characters(dialect: str) -> None:
    logprobs = {"content": [{"token": "Hé", "logprob": -0.25, "bytes": [72], "top_logprobs": []}]}
    stream = b": OPENROUTER PROCESSING\r\n\r\n" + sse(
        chunk({"role": "assistant", "content": ""}),
        chunk({"content": "Hé"}, logprobs=logprobs),
        chunk({"content": "llo 日本"}),
        chunk({}, "stop", matched_stop=None, stop_reason=None),
        usage(),
        done=True,
        end="\r\n",
    )
    parts = [stream[at : at + 9] for at in range(0, len(stream), 9)]
    async with scripted(Reply(parts)) as there, client(there, dialect, path="/v1") as server:
        answer = await ask(server, messages=CONVERSATION, tools=TOOLS, temperature=0.5, seed=3, logprobs=True)
    assert (answer.text, answer.reason, answer.usage) == ("Héllo 日本", "stop", (7, 3, 2))
    assert answer.chunks[1].choices[0].logprobs is not None
    [asked] = there.asked
    assert asked.target == "/v1/chat/completions" and asked.headers["x-request-id"] == "req-1"
    assert asked.json["messages"] == CONVERSATION and asked.json["seed"] == 3 and asked.json["model"] == "m"


@pytest.mark.parametrize("dialect", OPEN)
async def test_parallel_calls_in_fragments(dialect: str) -> None:
    first = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ""}}
    parts = [{"index": 0, "function": {"arguments": text}} for text in ('{"city"', ': "日', '本"}')]
    second = {"index": 1, "id": "call_2", "type": "function", "function": {"name": "clock", "arguments": "{"}}
    deltas = [chunk({"tool_calls": [call]}) for call in (first, *parts, second)]
    tail = chunk({"tool_calls": [{"index": 1, "function": {"arguments": "}"}}]})
    stream = sse(*deltas, tail, chunk({}, "tool_calls"), usage(), done=True)
    async with scripted(Reply(stream)) as there, client(there, dialect) as server:
        answer = await ask(server, tools=TOOLS)
    assert answer.calls == [("call_1", "weather", {"city": "日本"}), ("call_2", "clock", {})]


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
async def test_thoughts_by_both_names(field: str) -> None:
    stream = sse(chunk({field: "Hm. "}), chunk({field: "So."}), chunk({"content": "4"}), chunk({}, "stop"), done=True)
    async with scripted(Reply(stream)) as there, client(there, "vllm") as server:
        answer = await ask(server)
    assert answer.thoughts == "Hm. So." and answer.text == "4"


@pytest.mark.parametrize("dialect", OPEN)
async def test_completions_with_logprobs(dialect: str) -> None:
    def text(piece: str, reason: str | None = None, **more: Any) -> dict[str, Any]:
        return {"object": "text_completion", "choices": [{"index": 0, "text": piece, "finish_reason": reason, **more}]}

    legacy = {"tokens": ["a", "b"], "token_logprobs": [None, -1.5], "top_logprobs": [None, {"b": -1.5, "c": -2.0}]}
    newer = {"content": [{"token": "c", "logprob": -0.5, "bytes": [99], "top_logprobs": []}]}
    stream = sse(text("ab", logprobs=legacy), text("c", logprobs=newer), text("", "length"), usage(), done=True)
    async with scripted(Reply(stream)) as there, client(there, dialect, path="/v1") as server:
        answer = await ask(server, "completions", prompt="x", logprobs=2)
    assert (answer.text, answer.reason, answer.usage) == ("abc", "length", (7, 3, 2))
    odds = [odd for k in answer.chunks for c in k.choices if c.logprobs for odd in c.logprobs.content or ()]
    assert [(odd.token, odd.logprob) for odd in odds] == [("a", 0.0), ("b", -1.5), ("c", -0.5)]
    assert [odd.token for odd in odds[1].top_logprobs] == ["b", "c"]
    assert there.asked[0].target == "/v1/completions"


async def test_llama_cpp_spells_some_fields_differently() -> None:
    async with scripted(Reply(sse(chunk({}, "stop"), done=True))) as there, client(there, "llama.cpp") as server:
        await ask(server, repetition_penalty=1.2, continue_final_message=True, add_generation_prompt=False)
    sent = there.asked[0].json
    assert sent["repeat_penalty"] == 1.2 and not {"repetition_penalty", "continue_final_message"} & sent.keys()


VLLM = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_running{engine="0",model_name="other"} 90.0
vllm:num_requests_waiting{engine="0",model_name="m"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 4.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.7
"""
SGLANG = """sglang:token_usage{model_name="m"} 0.25
sglang:num_running_reqs{model_name="m",tp_rank="0"} 8
sglang:num_queue_reqs{model_name="m",tp_rank="0"} 4
"""
TENSORRT = """trtllm_num_requests_running{engine_type="trtllm",model_name="m"} 6.0
trtllm_num_requests_waiting{engine_type="trtllm",model_name="m"} 1.0
trtllm_kv_cache_utilization{engine_type="trtllm",model_name="m"} 0.125
"""
TGI = """# TYPE tgi_queue_size gauge
tgi_queue_size 5

tgi_batch_current_size 2
"""
LLAMA = """# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 2
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred 1
"""


@pytest.mark.parametrize(
    ("dialect", "path", "text", "wanted"),
    [
        ("vllm", "/metrics", VLLM, (5, 4, 0.6)),
        ("penstock", "/metrics", VLLM, (5, 4, 0.6)),
        ("sglang", "/metrics", SGLANG, (8, 4, 0.25)),
        ("tensorrt-llm", "/prometheus/metrics", TENSORRT, (6, 1, 0.125)),
        ("tgi", "/metrics", TGI, (2, 5, None)),
        ("llama.cpp", "/metrics", LLAMA, (2, 1, None)),
    ],
)
async def test_load_from_its_own_metrics(
    dialect: str, path: str, text: str, wanted: tuple[int, int, float | None]
) -> None:
    async with (
        scripted(lambda asked: Reply(text.encode(), headers={"content-type": "text/plain"})) as there,
        client(there, dialect, path="/v1") as server,
    ):
        await server.look()
        assert server.load is not None
        kv = server.load.kv_usage
        assert (server.load.running, server.load.waiting, kv and round(kv, 3)) == wanted
        assert server.requests == wanted[0] + wanted[1]
        server.in_flight += 2
        assert server.requests == wanted[0] + wanted[1] + 2, "what was sent since counts, too"
    assert there.asked[0].target == path


@pytest.mark.parametrize(
    "reply",
    [
        Reply(b"not found", 404),
        Reply(b"\xff\xfe garbage {{{ \n vllm:num_requests_running{ \nvllm:num_requests_waiting NaN\n"),
        Reply(b""),
        Reply(b"x", cut=True),
    ],
)
async def test_without_metrics_the_requests_sent_from_here_count(reply: Reply) -> None:
    async with scripted(reply) as there, client(there, "vllm") as server:
        await server.look()
        server.in_flight = 3
        assert server.load is None and server.requests == 3


@pytest.mark.parametrize(
    ("dialect", "path"),
    [
        ("openai", "/v1/models"),
        ("vllm", "/health"),
        ("sglang", "/health"),
        ("tensorrt-llm", "/health"),
        ("tgi", "/health"),
        ("llama.cpp", "/health"),
        ("penstock", "/health"),
        ("ollama", "/api/version"),
        ("anthropic", "/v1/models"),
        ("triton", "/v2/models/m/ready"),
    ],
)
async def test_health(dialect: str, path: str) -> None:
    status = 200
    path_of = "/v1" if dialect == "openai" else ""
    async with scripted(lambda asked: error(status, {})) as there, client(there, dialect, path=path_of) as server:
        await server.check()
        assert server.round_trip.seconds is not None
        status = 503
        with pytest.raises(EngineUnavailable):
            await server.check()
    assert there.asked[0].target == path


async def test_tokens() -> None:
    def script(asked: Asked) -> Reply:
        if asked.target == "/v1/tokenize" or (asked.target == "/tokenize" and "model" in asked.json):
            return reply_json({"count": 3, "max_model_len": 4096, "tokens": [5, 6, 7], "token_strs": None})
        return reply_json({"tokens": [1, 2]})

    async with scripted(script) as there:
        for dialect in ("vllm", "penstock"):
            async with client(there, dialect, path="/v1") as server:
                found = await server.count({"messages": CONVERSATION}, "r")
                assert (found.count, found.tokens) == (3, [5, 6, 7])
        async with client(there, "sglang") as server:
            assert (await server.count({"prompt": "abc"}, "r")).count == 3
            with pytest.raises(InvalidRequest):
                await server.count({"messages": CONVERSATION}, "r")
        async with client(there, "llama.cpp") as server:
            assert (await server.count({"prompt": "abc"}, "r")).count == 2
            assert there.asked[-1].json == {"content": "abc", "add_special": True}
        async with client(there, "tensorrt-llm") as server:
            with pytest.raises(InvalidRequest, match="no tokenize"):
                await server.count({"prompt": "abc"}, "r")


async def test_embeddings_that_do_not_fit_are_refused() -> None:
    rows: list[Any] = [{"index": 0, "embedding": [1.0]}]
    async with scripted(lambda asked: reply_json({"data": rows})) as there, client(there, "vllm") as server:
        assert (await server.embed(["a"], "r")).vectors == [[1.0]]
        with pytest.raises(EngineUnavailable, match="too few"):
            await server.embed(["a", "b"], "r")
        rows.append({"index": 1, "embedding": [1.0, 2.0]})
        with pytest.raises(EngineUnavailable, match="invalid"):
            await server.embed(["a", "b"], "r")
        rows[1] = {"index": 1, "embedding": "AAAA"}
        with pytest.raises(EngineUnavailable, match="invalid"):
            await server.embed(["a", "b"], "r")


def test_features_and_parameters_agree() -> None:
    for name, kind in DIALECTS.items():
        dialect = kind(Upstream("http://x", "m", dialect=name))
        assert dialect.name == name
        if dialect.parameters is None:
            continue
        for feature in (
            "tools",
            "tool_choice",
            "n",
            "logit_bias",
            "seed",
            "response_format",
            "logprobs",
            "top_logprobs",
        ):
            known = dialect.supports(feature)  # type: ignore[arg-type]
            if (name, feature) == ("ollama", "tool_choice"):
                continue  # none and auto only
            assert known == (feature in dialect.parameters), (name, feature)
        assert dialect.supports("chat") or dialect.supports("completions")
