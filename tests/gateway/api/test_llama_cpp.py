"""A server of another make behind the gateway: llama.cpp's, with the real default model (R-RT-8)."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.backends.remote.server import RemoteServer
from penstock.backends.remote.upstream import Upstream
from penstock.routing.remotes import RemoteModel
from tests import parts
from tests.gateway.conftest import Serving, events, eventually

SERVER = """
import sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.n_parallel, params.n_ctx, params.n_gpu_layers = 2, 4096, 0
params.endpoint_metrics = True
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
server = xllamacpp.Server(params)
print("listening on", server.listening_address, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def url(default_model: Path) -> Iterator[str]:
    """Where llama.cpp's server listens."""
    command = [parts.python("llama-cpp"), "-c", SERVER, str(default_model)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        said = next((line for line in process.stdout if line.startswith("listening on ")), None)
        assert said is not None, "llama.cpp did not start"
        yield said.split()[-1] + "/v1"
        process.kill()


def remote(url: str) -> RemoteModel:
    return RemoteModel("llama", [RemoteServer("0", Upstream(url, "smollm2"))], output_price=1.0)


ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 24,
}


@pytest.mark.slow
async def test_it_answers_streams_counts_and_stops_when_the_client_leaves(serving: Serving, url: str) -> None:
    async with serving(others=[remote(url)], time_limit_s=None) as running, httpx.AsyncClient(timeout=180) as direct:
        there = (await direct.post(f"{url}/chat/completions", json=ASKED)).json()
        here = (await running.chat(model="llama", **ASKED)).json()
        assert here["choices"][0]["message"]["content"].strip()
        assert here["choices"][0]["message"]["content"] == there["choices"][0]["message"]["content"]
        assert here["choices"][0]["finish_reason"] == there["choices"][0]["finish_reason"]
        for part in ("prompt_tokens", "completion_tokens"):
            assert here["usage"][part] == there["usage"][part]

        streamed = await running.chat(model="llama", stream=True, **ASKED)
        chunks = [json.loads(data) for data in events(streamed.text)[:-1]]
        told = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
        assert told == here["choices"][0]["message"]["content"]

        long = {**ASKED, "model": "llama", "max_tokens": 2000, "stream": True, "stop": None}
        long["messages"] = [{"role": "user", "content": "Count from one to a thousand."}]
        async with running.client.stream("POST", "/v1/chat/completions", json=long) as reply:
            async for _ in reply.aiter_lines():
                break
        far = running.parts.registry.remotes["llama"]
        await eventually(lambda: far.in_flight == 0)

        refused = await running.chat(model="llama", messages=[{"role": "user", "content": "word " * 9000}])
        assert refused.status_code == 400, refused.text
        assert far.members[0].breaker.state == "closed", "a request that is too long is nobody's failure"


@pytest.mark.slow
async def test_its_own_dialect(serving: Serving, url: str) -> None:
    upstream = Upstream(url, "smollm2", dialect="llama.cpp")
    far = RemoteModel("llama", [RemoteServer("0", upstream)], metrics_s=0.2)
    async with serving(others=[far], time_limit_s=None) as running:
        await eventually(lambda: far.members[0].server.load is not None)
        load = far.members[0].server.load
        assert load is not None and load.running == 0 and load.waiting == 0

        chat = (await running.chat(model="llama", logprobs=True, top_logprobs=2, **ASKED)).json()
        odds = chat["choices"][0]["logprobs"]["content"]
        assert "".join(odd["token"] for odd in odds).startswith(chat["choices"][0]["message"]["content"][:20])
        assert all(odd["logprob"] <= 0 and len(odd["top_logprobs"]) == 2 for odd in odds)

        said = {"model": "llama", "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
        text = (await running.client.post("/v1/completions", json=said)).json()
        assert "Paris" in text["choices"][0]["text"]
        odd = (await running.client.post("/v1/completions", json={**said, "repetition_penalty": 1.3, "seed": 4})).json()
        assert odd["choices"][0]["finish_reason"] == "length" and odd["usage"]["completion_tokens"] == 4

        server = far.members[0].server
        counted = await server.count({"prompt": "The capital of France is"}, "r")
        assert counted.count == text["usage"]["prompt_tokens"] == len(counted.tokens or ())

        schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
        wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        formed = (await running.chat(model="llama", response_format=wanted, **{**ASKED, "max_tokens": 60})).json()
        assert isinstance(json.loads(formed["choices"][0]["message"]["content"])["city"], str)
        await server.check()


@pytest.mark.slow
async def test_our_answers_on_its_own_paths_have_the_fields_of_its_answers(serving: Serving, url: str) -> None:
    root = url.removesuffix("/v1")
    asked = {"prompt": "hi", "n_predict": 4, "temperature": 0, "n_probs": 2, "return_tokens": True}
    absent = {"chat_format", "reasoning_format", "reasoning_in_content", "generation_prompt", "speculative.types"}
    absent |= {"backend_sampling"}

    def missing(theirs: dict[str, Any], ours: dict[str, Any]) -> set[str]:
        found = set(theirs) - set(ours)
        for name in set(theirs) & set(ours):
            assert type(theirs[name]) is type(ours[name]) or isinstance(ours[name], int | float), name
            if isinstance(theirs[name], dict):
                found |= missing(theirs[name], ours[name])
        return found - absent

    async with serving() as running, httpx.AsyncClient(timeout=180) as direct:
        there = (await direct.post(f"{root}/completion", json=asked)).json()
        here = (await running.client.post("/completion", json=asked)).json()
        assert not missing(there, here)
        assert not missing(there["completion_probabilities"][0], here["completion_probabilities"][0])
        streamed = {**asked, "stream": True}
        far = [json.loads(data) for data in events((await direct.post(f"{root}/completion", json=streamed)).text)]
        near = [json.loads(data) for data in events((await running.client.post("/completion", json=streamed)).text)]
        assert not missing(far[0], near[0]) and not missing(far[-1], near[-1])
        for path, body in (
            ("tokenize", {"content": "hi", "with_pieces": True}),
            ("detokenize", {"tokens": [5, 6]}),
            ("apply-template", {"messages": ASKED["messages"]}),
        ):
            there = (await direct.post(f"{root}/{path}", json=body)).json()
            assert not missing(there, (await running.client.post(f"/{path}", json=body)).json())
