"""Acceptance 9: hundreds of malformed bodies, each a 4xx in the OpenAI shape, and the server goes on."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import httpx

from tests.e2e.conftest import MODEL, Server

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
TEXT = {"model": MODEL, "prompt": "hi", "max_tokens": 1}
WRONG: list[Any] = ["x", -1, 1e30, 10**40, True, [], {}, [[]], {"a": {"b": []}}, "", 2**63, -(2**63) - 1, 0.5]
PROMPTS: list[Any] = [
    *(5, True, None, "", [], {}, [{}], [[]], [""], [-1], [10**9], [1.5]),
    *([1, "a"], [[1], "a"], [[-1]], ["a"] * 999),
]
FIELDS = {
    "model": WRONG,
    "messages": [
        *WRONG,
        [{}],
        [None],
        [{"role": "user"}],
        [{"role": 5, "content": "x"}],
        [{"role": "x", "content": "x"}],
    ],
    "max_tokens": ["x", -1, 0, True, [], {}, 0.5, 10**9, 2**63],
    "temperature": ["x", -1, 2.5, True, [], {}, 1e300],
    "top_p": ["x", -1, 1.5, True, [], {}],
    "n": ["x", -1, 0, 1000, True, [], 1.5],
    "stop": [5, {}, [5], ["a"] * 100, [""], ""],
    "seed": ["x", 1.5, [], 2**64],
    "logit_bias": ["x", [], {"a": 1}, {"1": "x"}, {"1": 1000}, {"-5": 1}, {"999999999": 1}],
    "stream": ["x", 1, []],
    "presence_penalty": ["x", 5, -5, []],
    "stop_token_ids": ["x", [-1], [10**9], ["x"], [1.5]],
    "guided_regex": [1, "(", []],
}


def bodies() -> Iterator[tuple[str, bytes]]:
    for name, values in FIELDS.items():
        for value in values:
            yield "/v1/chat/completions", json.dumps({**CHAT, name: value}).encode()
    for value in [
        5,
        True,
        [],
        {},
        [{}],
        [[]],
        [""],
        "",
        [-1],
        [10**9],
        [1, "a"],
        [[1], "a"],
        [[-1]],
        None,
        [1.5],
        ["a"] * 999,
    ]:
        yield "/v1/completions", json.dumps({**TEXT, "prompt": value}).encode()
    for name in ("tools", "functions", "response_format", "modalities", "audio", "web_search_options"):
        yield "/v1/chat/completions", json.dumps({**CHAT, name: [{"type": "x"}]}).encode()
    good = json.dumps(CHAT).encode()
    rng = random.Random(7)
    for cut in range(1, len(good), 4):
        yield "/v1/chat/completions", good[:cut]
    for _ in range(40):
        yield "/v1/completions", bytes(rng.randrange(256) for _ in range(rng.randrange(1, 200)))
    for depth in (100, 2_000, 100_000):
        yield "/v1/chat/completions", b"[" * depth
        nested = b"[" * depth + b"]" * depth
        yield "/v1/chat/completions", b'{"model":"%s","messages":%s}' % (MODEL.encode(), nested)
        yield "/v1/completions", b'{"model":"%s","prompt":%s}' % (MODEL.encode(), nested)
    for content in (b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"\\ud800", b"\x00", b"\\x41"):
        message = b'{"model":"%s","messages":[{"role":"user","content":"%s"}]}' % (MODEL.encode(), content)
        yield "/v1/chat/completions", message
    for number in (
        b"NaN",
        b"Infinity",
        b"-Infinity",
        b"1e999",
        b"1" * 5000,
        b"0x10",
        b"01",
        b"1.",
        b".5",
        b"+1",
        b"--1",
    ):
        yield "/v1/chat/completions", json.dumps(CHAT).encode()[:-1] + b',"temperature":' + number + b"}"
    yield (
        "/v1/chat/completions",
        json.dumps({**CHAT, "messages": [{"role": "user", "content": "word " * 5000}]}).encode(),
    )
    yield "/v1/chat/completions", b"x" * (5 * 2**20)
    yield "/v1/models", b"{}"
    yield "/v1/nothing", good


def test_bad_bodies_get_a_clear_answer_and_break_nothing(server: Server) -> None:
    count = 0
    with httpx.Client(base_url=server.url, timeout=180) as client:
        for path, body in bodies():
            reply = client.post(path, content=body, headers={"content-type": "application/json"})
            where = (path, body[:200], reply.text[:300])
            assert 400 <= reply.status_code < 500, where
            error = reply.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}, where
            assert error["message"] and error["type"], where
            assert reply.headers["x-request-id"]
            count += 1
        assert count > 200
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
        assert client.post("/v1/completions", json=TEXT).status_code == 200
    server.wait_for("vllm:num_requests_running", 0)
