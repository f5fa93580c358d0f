"""Ollama's API over the same pipeline: records, options, tools, formats, names, lists, what is refused and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.backends.embedder import Embedder
from penstock.backends.encoder import EncoderBackend
from penstock.config.cache import CacheConfig
from penstock.config.encoders import EncoderConfig
from penstock.config.guardrails import GuardrailConfig
from penstock.routing.encoders import Encoders
from penstock.text import TextModel
from tests.gateway.conftest import Running, Serving
from tests.scripted import ScriptedEngine, make_text

HI = [{"role": "user", "content": "hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


async def ask(running: Running, path: str = "chat", **body: Any) -> httpx.Response:
    if path == "chat":
        body.setdefault("messages", HI)
    return await running.client.post(f"/api/{path}", json={"model": "tiny", **body})


def lines(reply: httpx.Response) -> list[dict[str, Any]]:
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in reply.text.splitlines()]


async def test_chat_and_generate_streamed_and_whole(serving: Serving, text: TextModel) -> None:
    async with serving() as running:
        records = lines(await ask(running, model="tiny:latest"))
        assert "".join(record["message"]["content"] for record in records) == "Hello, world!"
        assert all(not record["done"] and record["message"]["role"] == "assistant" for record in records[:-1])
        last = records[-1]
        assert last["model"] == "tiny:latest" and last["done"] and last["done_reason"] == "stop"
        assert last["prompt_eval_count"] == 5 and last["eval_count"] == 14
        assert 0 < last["eval_duration"] <= last["total_duration"] and last["prompt_eval_duration"] == 2_000_000
        assert last["load_duration"] == 0 and last["created_at"].endswith("Z")
        whole = (await ask(running, stream=False)).json()
        assert whole["message"]["content"] == "Hello, world!" and whole["eval_count"] == 14
        whole = (await ask(running, "generate", prompt="hi", system="Be brief.", stream=False)).json()
        assert whole["response"] == "Hello, world!" and whole["done"]
        asked = text.decode(running.engine.seen[-1].prompt, skip_special=False)
        assert asked == "<|system|>Be brief.<|end|><|user|>hi<|end|><|assistant|>"
        parts = lines(await ask(running, "generate", prompt="hi", raw=True))
        assert "".join(record["response"] for record in parts) == "Hello, world!"
        assert text.decode(running.engine.seen[-1].prompt, skip_special=False) == "hi"
        loaded = (await ask(running, messages=[])).json()
        assert loaded["done_reason"] == "load" and loaded["message"]["content"] == ""
        assert (await ask(running, "generate")).json()["done_reason"] == "load"


async def test_a_model_without_a_template_continues_the_prompt(serving: Serving, tmp_path: Path) -> None:
    plain = make_text(tmp_path, chat=False)
    async with serving(text=plain) as running:
        assert (await ask(running, "generate", prompt="hi", stream=False)).json()["response"] == "Hello, world!"
        assert plain.decode(running.engine.seen[-1].prompt) == "hi"
        assert (await ask(running)).status_code == 400


async def test_options_are_honoured_refused_or_named(serving: Serving) -> None:
    async with serving() as running:
        options: dict[str, Any] = {
            "num_predict": 3,
            "temperature": 0.5,
            "top_k": 7,
            "top_p": 0.9,
            "min_p": 0.1,
            "seed": 42,
            "stop": ["zz"],
            "repeat_penalty": 1.2,
            "num_ctx": 4096,
            "repeat_last_n": 64,
            "mirostat": 0,
        }
        reply = await ask(running, options=options, keep_alive="5m", stream=False, think=False)
        assert reply.json()["done_reason"] == "length" and reply.json()["eval_count"] == 3
        params = running.engine.seen[-1].params
        assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.5, 7, 0.9, 0.1)
        assert (params.seed, params.repetition_penalty, params.max_tokens) == (42, 1.2, 3)
        ignored = set(reply.headers["x-penstock-ignored"].split(", "))
        assert ignored == {"keep_alive", "options.num_ctx", "options.repeat_last_n", "options.mirostat"}
        await ask(running, options={"num_predict": -1, "repeat_penalty": 1.5, "repeat_last_n": 0})
        params = running.engine.seen[-1].params
        assert params.repetition_penalty == 1.0 and params.max_tokens > 400
        await ask(running, options={"num_predict": 100_000})
        assert running.engine.seen[-1].params.max_tokens < 512, "the answer ends where the window does"
        within = {"top_p": 0.9, "typical_p": 0.8}
        await ask(running, temperature=0.5, top_p=0.7, max_tokens=4, stop="zz", options=within)
        params = running.engine.seen[-1].params
        assert (params.temperature, params.top_p, params.max_tokens) == (0.5, 0.9, 4), "options go first"
        assert params.typical_p == 0.8
        for wrong, word in (
            ({"options": {"mirostat": 2}}, "options.mirostat"),
            ({"options": {"temperature": -1}}, "options.temperature"),
            ({"think": True}, "does not support thinking"),
            ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "Images"),
            ({"messages": [{"role": "king", "content": "x"}]}, "role"),
            ({"messages": [{"role": "tool", "content": "x"}]}, "answers no call"),
            ({"format": "xml"}, "format"),
            ({"format": {"type": "no such type"}}, "`format`"),
            ({"options": {"stop": [""]}}, "options.stop"),
        ):
            refused = await ask(running, **wrong)
            assert refused.status_code == 400 and word in refused.json()["error"], refused.text
        for wrong, word in (
            ({"prompt": "x", "context": [1, 2]}, "/api/chat"),
            ({"prompt": "x", "suffix": "y"}, "models that fill gaps"),
            ({"prompt": "x", "suffix": "y", "system": "z"}, "system"),
            ({"prompt": "x", "template": "{{ .Prompt }}"}, "template"),
            ({"images": ["aGk="]}, "Images"),
        ):
            refused = await ask(running, "generate", **wrong)
            assert refused.status_code == 400 and word in refused.json()["error"], refused.text
        missing = await ask(running, model="nope:latest")
        assert missing.status_code == 404 and "`nope`" in missing.json()["error"]


async def test_tools_in_both_directions(serving: Serving, text: TextModel) -> None:
    async with serving(ScriptedEngine(text, CALL, max_model_len=4096), text=text) as running:
        records = lines(await ask(running, tools=[WEATHER]))
        (call,) = [call for record in records for call in record["message"].get("tool_calls", ())]
        assert call["function"] == {"index": 0, "name": "weather", "arguments": {"city": "Paris"}}
        assert records[-1]["done_reason"] == "stop"
        whole = (await ask(running, tools=[WEATHER], stream=False)).json()
        assert whole["message"]["tool_calls"][0]["function"]["arguments"] == {"city": "Paris"}
        history = [
            *HI,
            {"role": "assistant", "content": "", "tool_calls": [{"function": call["function"]}] * 2},
            {"role": "tool", "content": "sunny", "tool_name": "weather"},
            {"role": "tool", "content": "rain"},
        ]
        reply = await ask(running, messages=history, tools=[WEATHER], stream=False)
        assert reply.status_code == 200, reply.text
        prompt = text.decode(running.engine.seen[-1].prompt, skip_special=False)
        assert "sunny" in prompt and "rain" in prompt and prompt.count('"city"') >= 2


async def test_formats_and_logprobs(serving: Serving, text: TextModel) -> None:
    async with serving(ScriptedEngine(text, '{"a":1}')) as running:
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        for wanted in ("json", schema):
            reply = (await ask(running, format=wanted, stream=False)).json()
            assert json.loads(reply["message"]["content"]) == {"a": 1}
            assert running.engine.seen[-1].params.grammar
        assert not (await ask(running, format="")).is_error
        for path, more in (("chat", {}), ("generate", {"prompt": "x"}), ("generate", {"prompt": "x", "raw": True})):
            reply = (await ask(running, path, logprobs=True, top_logprobs=2, stream=False, **more)).json()
            assert len(reply["logprobs"]) == reply["eval_count"] - 1, "the end has no text"
            assert len(reply["logprobs"][0]["top_logprobs"]) == 2


async def test_what_is_served(serving: Serving, encoder_endpoint: str) -> None:
    encoders = Encoders(
        [Embedder("minilm", "minilm", EncoderBackend(encoder_endpoint), wait_s=60)], [EncoderConfig(name="minilm")]
    )
    async with serving(encoders=encoders) as running:
        client = running.client
        tags = (await client.get("/api/tags")).json()["models"]
        assert [model["name"] for model in tags] == ["tiny", "minilm"]
        assert len(tags[0]["digest"]) == 64 and tags[0]["modified_at"].endswith("Z")
        shown = (await client.post("/api/show", json={"name": "tiny:latest"})).json()
        about = shown["model_info"]
        assert about[f"{about['general.architecture']}.context_length"] == 512
        assert shown["capabilities"] == ["completion", "tools"] and "m.role" in shown["template"]
        assert (await client.post("/api/show", json={"model": "nope"})).status_code == 404
        assert (await client.get("/api/ps")).json()["models"][0]["context_length"] == 512
        assert (await client.get("/api/version")).json()["version"].count(".") == 2
        assert (await client.head("/")).status_code == 200
        embedded = await client.post("/api/embed", json={"model": "minilm:latest", "input": ["one", "two"]})
        assert [len(row) for row in embedded.json()["embeddings"]] == [384, 384]
        assert embedded.json()["prompt_eval_count"] == 6
        long = {"model": "minilm", "input": "word " * 300}
        assert (await client.post("/api/embed", json=long)).status_code == 200
        assert (await client.post("/api/embed", json={**long, "truncate": False})).status_code == 400
        assert (await client.post("/api/embed", json={"model": "minilm", "input": ""})).json()["embeddings"] == []
        old = await client.post("/api/embeddings", json={"model": "minilm", "prompt": "one"})
        assert old.json()["embedding"] == pytest.approx(embedded.json()["embeddings"][0], abs=1e-5)
        shown = (await client.post("/api/show", json={"model": "minilm"})).json()
        assert shown["capabilities"] == ["embedding"] and shown["model_info"]["bert.embedding_length"] == 384


async def test_programs_need_not_say_json_but_pages_do(serving: Serving) -> None:
    async with serving() as running:
        body = json.dumps({"model": "tiny", "messages": HI, "stream": False}).encode()
        form = {"content-type": "application/x-www-form-urlencoded"}
        for headers, status in (({}, 200), (form, 200), ({**form, "origin": "http://evil.example"}, 403)):
            reply = await running.client.post("/api/chat", content=body, headers=headers)
            assert reply.status_code == status, reply.text
        own = {**form, "origin": f"http://127.0.0.1:{running.port}"}
        assert (await running.client.post("/api/chat", content=body, headers=own)).status_code == 403
        assert (await running.client.post("/api/pull", content=b'{"model": "x"}', headers=form)).status_code == 415


async def test_models_cannot_be_changed_like_files(serving: Serving) -> None:
    async with serving() as running:
        have = await running.client.post("/api/pull", json={"model": "tiny"})
        assert lines(have) == [{"status": "success"}]
        pulled = await running.client.post("/api/pull", json={"model": "other", "stream": False})
        assert pulled.status_code == 400 and "penstock serve" in pulled.json()["error"]
        for path in ("create", "copy", "push"):
            refused = await running.client.post(f"/api/{path}", json={"model": "tiny"})
            assert refused.status_code == 400 and "not possible" in refused.json()["error"]
        refused = await running.client.request("DELETE", "/api/delete", json={"model": "tiny"})
        assert refused.status_code == 400 and "unloads" in refused.json()["error"]


async def test_keys_accounts_guardrails_and_the_response_cache(serving: Serving, tmp_path: Path) -> None:
    rule = GuardrailConfig(name="secrets", words=("hunter2",))
    async with serving(
        store_url=f"sqlite:///{tmp_path / 'state.db'}", guardrails=(rule,), cache=CacheConfig(exact="on")
    ) as running:
        await running.client.post("/v1/admin/tenants", json={"id": "acme"})
        made = await running.client.post("/v1/admin/keys", json={"tenant": "acme"})
        unknown = await running.client.get("/api/tags")
        assert unknown.status_code == 401 and isinstance(unknown.json()["error"], str)
        running.client.headers["authorization"] = f"Bearer {made.json()['key']}"
        assert (await running.client.get("/api/tags")).status_code == 200
        assert (await running.client.post("/api/pull", json={"model": "x"})).status_code == 403
        first = await ask(running, options={"temperature": 0}, stream=False)
        again = await ask(running, options={"temperature": 0})
        assert (first.headers["x-penstock-cache"], again.headers["x-penstock-cache"]) == ("miss", "exact")
        assert "".join(record["message"]["content"] for record in lines(again)) == "Hello, world!"
        blocked = await ask(running, messages=[{"role": "user", "content": "hunter2"}])
        assert blocked.status_code == 400 and "secrets" in blocked.json()["error"]
        usage = (await running.client.get("/v1/usage")).json()["data"]
        assert sum(row["requests"] for row in usage) == 2
        vote = {"response_id": first.json()["id"], "rating": "up"}
        assert (await running.client.post("/v1/feedback", json=vote)).json()["route"] == "/api/chat"
