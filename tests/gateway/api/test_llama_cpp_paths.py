"""llama.cpp's own paths over the same pipeline: records, streams, prompts of every kind, parameters, gaps, limits."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from tokenizers import Tokenizer

from penstock.backends.embedder import Embedder
from penstock.backends.encoder import EncoderBackend
from penstock.config.encoders import EncoderConfig
from penstock.config.guardrails import GuardrailConfig
from penstock.config.schema import TierConfig
from penstock.routing.encoders import Encoders
from penstock.text import TextModel
from tests.gateway.conftest import Running, Serving, events, eventually, until
from tests.scripted import ScriptedEngine


async def ask(running: Running, path: str = "completion", **body: Any) -> httpx.Response:
    if path.startswith("completion"):
        body = {"prompt": "hi", **body}
    return await running.client.post(f"/{path}", json=body)


async def record(running: Running, path: str = "completion", **body: Any) -> Any:
    reply = await ask(running, path, **body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def refusal(reply: httpx.Response, param: str) -> dict[str, Any]:
    assert reply.status_code == 400, reply.text
    error: dict[str, Any] = reply.json()["error"]
    assert (error["code"], error["param"]) == (400, param), error
    return error


async def test_a_stream_says_what_a_whole_answer_says(serving: Serving, text: TextModel) -> None:
    async with serving() as running:
        whole = await record(running, return_tokens=True, n_probs=2, temperature=0)
        assert whole["content"] == "Hello, world!" and whole["stop"] is True
        assert (whole["stop_type"], whole["stopping_word"]) == ("eos", "")
        assert whole["tokens"] == [*text.encode("Hello, world!"), text.eos_token_ids[0]]
        assert (whole["tokens_predicted"], whole["tokens_evaluated"], whole["tokens_cached"]) == (14, 2, 3)
        assert whole["model"] == "tiny" and whole["prompt"] == "hi" and whole["id_slot"] == -1
        assert whole["truncated"] is False and whole["has_new_line"] is False
        odds = whole["completion_probabilities"]
        assert [odd["id"] for odd in odds] == text.encode("Hello, world!")
        assert odds[0]["token"] == "H" and odds[0]["bytes"] == [72] and odds[0]["logprob"] == -0.5
        assert len(odds[0]["top_logprobs"]) == 2 and set(odds[0]["top_logprobs"][1]) == {
            "id",
            "token",
            "bytes",
            "logprob",
        }
        timings = whole["timings"]
        assert timings["predicted_n"] == 14 and timings["prompt_ms"] == 2.0 and timings["cache_n"] == 3
        assert whole["generation_settings"]["temperature"] == 0 and whole["generation_settings"]["n_predict"] == -1
        for path in ("completion", "completions"):
            reply = await ask(running, path, stream=True, n_probs=2, temperature=0, timings_per_token=True)
            *parts, last = [json.loads(data) for data in events(reply.text)]
            assert "".join(part["content"] for part in parts) == whole["content"]
            assert [token for part in parts for token in part["tokens"]] == whole["tokens"]
            assert [odd for part in parts for odd in part["completion_probabilities"]] == odds
            assert all(part["stop"] is False and part["timings"]["prompt_ms"] == 2.0 for part in parts)
            assert [part["tokens_predicted"] for part in parts] == sorted(part["tokens_predicted"] for part in parts)
            assert last["stop"] is True and last["content"] == "" and last["tokens"] == []
            settings = ("generation_settings", "id", "timings", "completion_probabilities", "content", "tokens")
            assert {k: v for k, v in last.items() if k not in settings} == {
                k: v for k, v in whole.items() if k not in settings
            }


async def test_prompts_of_every_kind(serving: Serving, text: TextModel) -> None:
    async with serving() as running:
        ids = text.encode("hi")
        kinds: list[tuple[Any, list[list[int]]]] = [
            ("hi", [ids]),
            (ids, [ids]),
            ({"prompt_string": "hi"}, [ids]),
            ([5, "hi", 6], [[5, *ids, 6]]),
            (["hi", "ho"], [ids, text.encode("ho")]),
            ([ids, "hi", {"prompt_string": "hi"}, [7, "hi"]], [ids, ids, ids, [7, *ids]]),
        ]
        for prompt, asked in kinds:
            running.engine.seen.clear()
            found = await record(running, prompt=prompt)
            assert sorted(request.prompt for request in running.engine.seen) == sorted(asked)
            several = len(asked) > 1
            assert isinstance(found, list) == several
            if several:
                assert [each["index"] for each in found] == list(range(len(asked)))
                assert all(each["content"] == "Hello, world!" for each in found)
        found = await record(running, prompt=["hi", "ho"], n_cmpl=2, seed=3)
        assert [each["prompt"] for each in found] == ["hi", "hi", "ho", "ho"]
        assert [each["generation_settings"]["seed"] for each in found] == [3, 4, 3, 4]
        wrong: list[Any] = [[], [[5], 6], [5, {"prompt_string": "x"}], [99999], "", None]
        for prompt in wrong:
            assert (await ask(running, prompt=prompt)).status_code == 400, prompt
        named = await ask(running, prompt={"prompt_string": "x", "y": 1})
        assert named.headers["x-penstock-ignored"] == "prompt.y"
        refusal(
            await ask(running, prompt={"prompt_string": "x", "multimodal_data": ["aGk="]}), "prompt.multimodal_data"
        )
        refusal(await running.client.post("/completion", json={}), "prompt")


async def test_parameters_are_honoured_refused_or_named(serving: Serving, text: TextModel) -> None:
    (h,) = text.encode("h")
    assert text.encode("i") == [h + 1]
    async with serving() as running:
        honoured: list[tuple[dict[str, Any], dict[str, Any]]] = [
            ({"n_predict": 7}, {"max_tokens": 7}),
            ({"max_tokens": 7}, {"max_tokens": 7}),
            ({"n_predict": -1}, {"max_tokens": 510}),
            ({"n_predict": 100_000}, {"max_tokens": 510}),
            ({"temperature": 0.5, "top_k": 3, "top_p": 0.7}, {"temperature": 0.5, "top_k": 3, "top_p": 0.7}),
            ({"min_p": 0.2, "typical_p": 0.6}, {"min_p": 0.2, "typical_p": 0.6}),
            ({"repeat_penalty": 1.5}, {"repetition_penalty": 1.5}),
            ({"repeat_penalty": 1.5, "repeat_last_n": 0}, {"repetition_penalty": 1.0}),
            ({"seed": 12}, {"seed": 12}),
            ({"logit_bias": [[5, -2], ["h", 1.5], [7, False]]}, {"logit_bias": {5: -2.0, h: 1.5, 7: -100.0}}),
            ({"logit_bias": {"5": -2, "hi": False}}, {"logit_bias": {5: -2.0, h: -100.0, h + 1: -100.0}}),
            ({"samplers": ["top_k", "temp"], "top_k": 3, "top_p": 0.2}, {"top_k": 3, "top_p": 1.0}),
            ({"samplers": [], "temperature": 0.3, "min_p": 0.3}, {"temperature": 1.0, "min_p": 0.0}),
            (
                {"samplers": "kt", "temperature": 0.3, "repeat_penalty": 2},
                {"temperature": 0.3, "repetition_penalty": 1},
            ),
        ]
        for body, expected in honoured:
            await record(running, **body)
            found = running.engine.seen[-1].params
            assert {name: getattr(found, name) for name in expected} == expected, body
        await record(running, ignore_eos=True, n_predict=3)
        assert running.engine.seen[-1].params.stop_token_ids == ()
        first = (await record(running, seed=-1))["generation_settings"]["seed"]
        assert first != (await record(running, seed=-1))["generation_settings"]["seed"], "another one every time"
        advice: dict[str, Any] = {
            "id_slot": 1, "cache_prompt": True, "n_keep": 3, "n_indent": 4, "t_max_predict_ms": 500,
            "repeat_last_n": 64, "dynatemp_range": 0, "xtc_probability": 0.0, "dry_multiplier": 0, "mirostat": 0,
            "lora": [{"id": 0, "scale": 0.0}], "top_n_sigma": -1, "return_progress": True, "no_such": 1,
        }  # fmt: skip
        reply = await ask(running, **advice)
        assert reply.status_code == 200, reply.text
        assert set(reply.headers["x-penstock-ignored"].split(", ")) == set(advice)
        for body, param in (
            ({"mirostat": 2}, "mirostat"),
            ({"dynatemp_range": 0.5}, "dynatemp_range"),
            ({"dry_multiplier": 0.8}, "dry_multiplier"),
            ({"xtc_probability": 0.5}, "xtc_probability"),
            ({"top_n_sigma": 2}, "top_n_sigma"),
            ({"post_sampling_probs": True}, "post_sampling_probs"),
            ({"lora": [{"id": 0, "scale": 1.0}]}, "lora"),
            ({"grammar_lazy": True}, "grammar_lazy"),
            ({"samplers": ["nope"]}, "samplers"),
            ({"temperature": 3}, "temperature"),
            ({"n_predict": 4, "max_tokens": 5}, "n_predict"),
            ({"n_probs": 100}, "n_probs"),
            ({"logit_bias": [[99999, 1]]}, "logit_bias"),
            ({"logit_bias": [[5, 200]]}, "logit_bias[0]"),
            ({"logit_bias": [[0.5, 2]]}, "logit_bias[0]"),
            ({"json_schema": {"type": "nope"}}, "json_schema"),
            ({"grammar": "root ::= ("}, "grammar"),
            ({"grammar": 'root ::= "a"', "json_schema": {}}, "grammar"),
            ({"echo": True}, "echo"),
        ):  # fmt: skip
            refusal(await ask(running, **body), param)


async def test_stops_ends_and_fields(serving: Serving, text: TextModel) -> None:
    async with serving() as running:
        stopped = await record(running, stop=["wor", ""], n_predict=50)
        assert (stopped["content"], stopped["stop_type"], stopped["stopping_word"]) == ("Hello, ", "word", "wor")
        for more in ({}, {"n_probs": 1}):
            asked: dict[str, Any] = {"stop": ["wor"], "n_predict": 50, **more}
            whole = await record(running, **asked, return_tokens=True)
            *parts, _ = [json.loads(data) for data in events((await ask(running, **asked, stream=True)).text)]
            assert "".join(part["content"] for part in parts) == "Hello, "
            assert [token for part in parts for token in part["tokens"]] == whole["tokens"] == text.encode("Hello, wor")
        cut = await record(running, n_predict=5)
        assert (cut["content"], cut["stop_type"], cut["truncated"]) == ("Hello", "limit", False)
        only = await record(running, n_predict=0)
        assert (only["content"], only["tokens_predicted"], only["tokens_evaluated"]) == ("", 0, 2)
        fields = ["content", "generation_settings/n_predict", "timings/predicted_n", "prompt", "no/such"]
        assert await record(running, n_predict=5, response_fields=fields) == {
            "content": "Hello",
            "generation_settings/n_predict": 5,
            "timings/predicted_n": 5,
            "prompt": "hi",
        }
        assert await record(running, n_predict=5, response_fields=[""]) == {}
    endless = ScriptedEngine(text, lambda request: text.encode("a\n") * 400)
    async with serving(endless) as running:
        full = await record(running)
        assert full["stop_type"] == "limit" and full["truncated"] is True and full["has_new_line"] is True
        assert full["tokens_evaluated"] + full["tokens_predicted"] == 512
        long = await ask(running, prompt="x" * 600)
        assert long.status_code == 400
        error = long.json()["error"]
        assert error["type"] == "exceed_context_size_error" and error["n_ctx"] == 512 and error["n_prompt_tokens"] > 512


async def test_grammars(serving: Serving) -> None:
    async with serving() as running:
        for body in ({"grammar": 'root ::= "a" | "b"'}, {"json_schema": {"type": "object"}}):
            await record(running, **body)
            assert running.engine.seen[-1].params.grammar


def infilling(text: TextModel, *marks: str) -> TextModel:
    tokenizer = Tokenizer.from_str(text._tokenizer.to_str())
    tokenizer.add_special_tokens(["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", *marks])
    return TextModel(tokenizer, eos_token_ids=text.eos_token_ids)


GAP = {"input_prefix": "a = ", "input_suffix": "\nprint(a)"}


async def test_gaps(serving: Serving, text: TextModel) -> None:
    async with serving() as running:
        error = refusal(await ask(running, "infill", **GAP), "input_suffix")
        assert error["type"] == "not_supported_error" and "tiny" in error["message"]
        refusal(await ask(running, "infill", input_prefix="x"), "input_suffix")
        refusal(await ask(running, "infill", **GAP, input_extra=[{"filename": "x"}]), "input_extra[0].text")
    files = [{"filename": "far.py", "text": "x" * 400}, {"filename": "b.py", "text": "b<|fim_middle|>"}]
    model = infilling(text, "<|repo_name|>", "<|file_sep|>")
    async with serving(ScriptedEngine(model), text=model) as running:

        async def prompt(**body: Any) -> str:
            found = await record(running, "infill", **{**GAP, "n_predict": 20, **body})
            assert found["content"] == "Hello, world!"
            assert model.token_id("<|fim_pad|>") in running.engine.seen[-1].params.stop_token_ids
            return model.decode(running.engine.seen[-1].prompt, skip_special=False)

        assert await prompt() == "<|fim_prefix|>a = <|fim_suffix|>\nprint(a)<|fim_middle|>"
        assert await prompt(prompt="1 +") == "<|fim_prefix|>a = 1 +<|fim_suffix|>\nprint(a)<|fim_middle|>"
        assert await prompt(input_suffix="") == "<|fim_prefix|>a = <|fim_suffix|><|fim_middle|>"
        whole = await prompt(input_extra=files)
        assert whole.startswith("<|repo_name|>project\n<|file_sep|>far.py\nxxx")
        tail = "<|file_sep|>file\n<|fim_prefix|>a = <|fim_suffix|>\nprint(a)<|fim_middle|>"
        assert whole.endswith("x<|file_sep|>b.py\nb<|fim_middle|>" + tail)
        cut = await prompt(input_extra=files, n_predict=200)
        assert cut.endswith("x<|file_sep|>b.py\nb<|fim_middle|>" + tail) and "far.py" not in cut, "the last files stay"
        assert len(running.engine.seen[-1].prompt) == 312, "all the room beside the answer"
        # What an editor sends to warm the cache, and its usual filters.
        warm = {"input_prefix": "", "input_suffix": "", "n_predict": 0, "samplers": [], "response_fields": [""]}
        assert await record(running, "infill", **warm, input_extra=files, t_max_predict_ms=1) == {}
        fields = {"n_indent": 4, "samplers": ["top_k", "top_p", "infill"], "top_k": 40, "t_max_predict_ms": 1000}
        assert "infilled" not in await prompt(**fields, stop=["\n\n"])
        streamed = await ask(running, "infill", **GAP, stream=True)
        parts = [json.loads(data) for data in events(streamed.text)]
        assert "".join(part["content"] for part in parts) == "Hello, world!" and parts[-1]["stop"] is True
    bare = infilling(text)
    async with serving(ScriptedEngine(bare), text=bare) as running:
        await record(running, "infill", **GAP, n_predict=20, input_extra=files[1:])
        asked = running.engine.seen[-1].prompt
        assert bare.decode(asked, skip_special=False).startswith("\n\nb<|fim_middle|><|fim_prefix|>a = ")
        middle = bare.token_id("<|fim_middle|>")
        assert middle is not None and asked.count(middle) == 1, "in other files it is text"


async def test_tokens_and_templates(serving: Serving, text: TextModel) -> None:
    async with serving() as running:
        post = running.client.post
        assert (await post("/tokenize", json={"content": "hé"})).json() == {"tokens": text.encode("hé")}
        pieces = (await post("/tokenize", json={"content": "hé", "with_pieces": True})).json()["tokens"]
        assert [piece["piece"] for piece in pieces] == ["h", [195], [169]]
        for special, count in ((True, 1), (False, 7)):
            sent = {"content": "<|end|>", "parse_special": special}
            assert len((await post("/tokenize", json=sent)).json()["tokens"]) == count
        back = (await post("/detokenize", json={"tokens": text.encode("hé")})).json()
        assert back["content"] == "hé"
        messages = [{"role": "user", "content": "hi"}]
        prompt = (await post("/apply-template", json={"messages": messages})).json()
        assert prompt == {"prompt": "<|user|>hi<|end|><|assistant|>"}
        rest = (await post("/apply-template", json={"messages": messages, "add_generation_prompt": False})).json()
        assert rest == {"prompt": "<|user|>hi<|end|>"}
        for path, body, param in (
            ("/tokenize", {"content": "x", "messages": messages}, "messages"),
            ("/tokenize", {"prompt": "x", "with_pieces": True}, "with_pieces"),
            ("/apply-template", {"prompt": "x"}, "messages"),
            ("/apply-template", {"messages": messages, "prompt": "x"}, "prompt"),
            ("/apply-template", {"messages": [{"role": "king", "content": ""}]}, "messages[0].role"),
        ):
            reply = await post(path, json=body)
            assert reply.status_code == 400 and reply.json()["error"]["param"] == param, reply.text
        assert not running.engine.seen


async def test_what_is_served(serving: Serving, encoder_endpoint: str) -> None:
    encoders = Encoders(
        [Embedder("minilm", "minilm", EncoderBackend(encoder_endpoint), wait_s=60)], [EncoderConfig(name="minilm")]
    )
    async with serving(encoders=encoders) as running:
        get = running.client.get
        props = (await get("/props")).json()
        assert props["default_generation_settings"]["n_ctx"] == 512 and props["total_slots"] == 64
        assert "<|assistant|>" in props["chat_template"] and props["modalities"] == {"vision": False, "audio": False}
        slots = (await get("/slots", params={"fail_on_no_slot": "1"})).json()
        assert len(slots) == 64 and not any(slot["is_processing"] for slot in slots)
        assert (await get("/lora-adapters")).json() == []
        assert (await get("/v1/health")).json() == {"status": "ok"}
        assert (await get("/props", params={"model": "nope"})).status_code == 404
        for path in ("/props", "/lora-adapters"):
            assert (await running.client.post(path, json={})).status_code == 400
        made = (await ask(running, "embedding", content=["hi", "ho"])).json()
        assert [each["index"] for each in made] == [0, 1] and len(made[0]["embedding"][0]) == 384
        assert (await ask(running, "embeddings", input="hi")).json()[0] == made[0]
        refusal(await ask(running, "embedding"), "content")
        refusal(await ask(running, "embedding", content="x", embd_normalize=1), "embd_normalize")


async def test_slots_that_are_taken(serving: Serving, text: TextModel) -> None:
    engine = ScriptedEngine(text, lambda request: text.encode("a") * 400, step_s=0.01)
    engine.info = dataclasses.replace(engine.info, max_running=1)
    async with serving(engine) as running:

        async def slots() -> httpx.Response:
            return await running.client.get("/slots", params={"fail_on_no_slot": "1"})

        assert (await slots()).json() == [{"id": 0, "n_ctx": 512, "is_processing": False}]
        asked = asyncio.create_task(ask(running))
        full = await until(slots, lambda reply: reply.status_code == 503)
        assert full.json()["error"]["type"] == "unavailable_error"
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)


async def test_limits_keys_accounts_and_guardrails_hold(serving: Serving, text: TextModel, tmp_path: Path) -> None:
    tiers = (TierConfig(name="small", context_tokens=64, output_tokens=8, requests_per_minute=3),)
    store = f"sqlite:///{tmp_path}/penstock.db"
    async with serving(store_url=store, tiers=tiers, default_tier="small") as running:
        await running.client.post("/v1/admin/tenants", json={"id": "acme", "tier": "small"})
        made = await running.client.post("/v1/admin/keys", json={"tenant": "acme", "user": "ann"})
        key = {"authorization": f"Bearer {made.json()['key']}"}
        nobody = await ask(running)
        assert nobody.status_code == 401 and nobody.json()["error"]["type"] == "authentication_error"
        running.client.headers.update(key)
        cut = await record(running, n_predict=100)
        assert cut["content"] == "Hello, w" and cut["generation_settings"]["n_predict"] == 100
        vote = {"response_id": cut["id"], "rating": "up"}
        assert (await running.client.post("/v1/feedback", json=vote)).status_code == 200
        long = await ask(running, prompt="x" * 100)
        assert long.status_code == 400 and long.json()["error"]["n_ctx"] == 64
        statuses = [(await ask(running)).status_code for _ in range(4)]
        assert statuses[-1] == 429
        usage = (await running.client.get("/v1/usage", params={"by": "user,model"})).json()
        assert any(row["user"] == "ann" and row["completion_tokens"] >= 8 for row in usage["data"]), usage
    asked = (GuardrailConfig(name="asked", words=("secret",), stage="input"),)
    model = infilling(text)
    async with serving(ScriptedEngine(model), text=model, guardrails=asked) as running:
        for path, body in (
            ("completion", {"prompt": "a secret"}),
            ("completion", {"prompt": [5, " secret "]}),
            ("infill", {**GAP, "input_suffix": "a secret"}),
            ("infill", {**GAP, "input_extra": [{"text": "a secret"}]}),
        ):
            blocked = await ask(running, path, **body)
            assert blocked.status_code == 400 and "`asked`" in blocked.json()["error"]["message"], blocked.text
        assert not running.engine.seen
    rules = (GuardrailConfig(name="worlds", words=("world",), stage="output", action="redact", replacement="[w]"),)
    async with serving(guardrails=rules) as running:
        assert (await record(running))["content"] == "Hello, [w]!"
        streamed = [json.loads(data) for data in events((await ask(running, stream=True)).text)]
        assert "".join(part["content"] for part in streamed) == "Hello, [w]!"
        assert not any(part["tokens"] for part in streamed), "ids would tell what is held back"
        refusal(await ask(running, n_probs=1), "n_probs")
        refusal(await ask(running, return_tokens=True), "return_tokens")


async def test_a_client_that_leaves_stops_its_request(serving: Serving, text: TextModel) -> None:
    engine = ScriptedEngine(text, lambda request: text.encode("a") * 400, step_s=0.01)
    async with serving(engine) as running:
        async with running.client.stream("POST", "/completion", json={"prompt": "hi", "stream": True}) as reply:
            async for _ in reply.aiter_lines():
                break
        await eventually(lambda: len(engine.aborted) == 1)


@pytest.mark.parametrize("path", ["/completion", "/infill", "/generate", "/generate_stream", "/props", "/info", "/"])
async def test_the_paths_are_documented(serving: Serving, path: str) -> None:
    async with serving() as running:
        document = (await running.client.get("/openapi.json")).json()
        for shared, forms in (
            ("/tokenize", {"Error", "LlamaCppError", "TgiError"}),
            ("/generate", {"Error", "TgiError"}),
        ):
            error = document["paths"][shared]["post"]["responses"]["400"]["content"]["application/json"]["schema"]
            assert {form["$ref"].rpartition("/")[2] for form in error["anyOf"]} == forms
            assert forms <= document["components"]["schemas"].keys()
        assert {"post", "get"} & document["paths"][path].keys()


async def test_every_form_of_tokenize_is_documented(serving: Serving) -> None:
    async with serving() as running:
        document = (await running.client.get("/openapi.json")).json()
        reply = document["paths"]["/tokenize"]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
        for body in (
            {"prompt": "hé"},
            {"content": "hé"},
            {"content": "hé", "with_pieces": True},
            {"inputs": "hé"},
        ):
            made = (await running.client.post("/tokenize", json=body)).json()
            jsonschema.validate(made, reply)
