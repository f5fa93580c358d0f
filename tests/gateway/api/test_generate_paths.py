"""Paths of text-generation-inference and of SGLang over the same pipeline; they share /generate."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import httpx

from penstock.backends.remote.server import RemoteServer
from penstock.backends.remote.upstream import Upstream
from penstock.config.guardrails import GuardrailConfig
from penstock.config.schema import TierConfig
from penstock.routing.remotes import RemoteModel
from penstock.text import TextModel
from tests.gateway.conftest import Running, Serving, eventually
from tests.scripted import ScriptedEngine

HELLO = "Hello, world!"


def data_of(reply: httpx.Response) -> list[Any]:
    """The events of a stream, with or without a space behind the colon."""
    assert reply.status_code == 200, reply.text
    found = [line.removeprefix("data:").strip() for line in reply.text.split("\n\n") if line.startswith("data:")]
    return [each if each == "[DONE]" else json.loads(each) for each in found]


async def generate(running: Running, path: str = "/generate", **body: Any) -> httpx.Response:
    return await running.client.post(path, json=body)


async def tgi(running: Running, *, stream: bool = False, **parameters: Any) -> Any:
    path = "/generate_stream" if stream else "/generate"
    reply = await generate(running, path, inputs="hi", parameters=parameters)
    assert reply.status_code == 200, reply.text
    return data_of(reply) if stream else reply.json()


async def test_tgi_whole_and_streamed(serving: Serving, text: TextModel) -> None:
    ids, eos = text.encode(HELLO), text.eos_token_ids[0]
    async with serving() as running:
        assert await tgi(running) == {"generated_text": HELLO}
        whole = await tgi(running, details=True, top_n_tokens=2, decoder_input_details=True)
        details = whole["details"]
        assert (details["finish_reason"], details["generated_tokens"], details["seed"]) == ("eos_token", 14, None)
        assert [token["id"] for token in details["tokens"]] == [*ids, eos]
        assert [token["special"] for token in details["tokens"]] == [False] * 13 + [True]
        assert "".join(token["text"] for token in details["tokens"]) == HELLO
        assert len(details["top_tokens"]) == 14 and all(len(top) == 2 for top in details["top_tokens"])
        assert [token["id"] for token in details["prefill"]] == text.encode("hi")
        assert details["prefill"][0]["logprob"] is None and details["prefill"][1]["logprob"] == -0.5
        events = await tgi(running, stream=True, details=True, top_n_tokens=2)
        assert [event["token"] for event in events] == details["tokens"]
        assert [event["index"] for event in events] == list(range(1, 15))
        assert [event["top_tokens"] for event in events] == details["top_tokens"]
        assert all(event["generated_text"] is None and event["details"] is None for event in events[:-1])
        assert events[-1]["generated_text"] == HELLO
        assert events[-1]["details"] == {
            "finish_reason": "eos_token", "generated_tokens": 14, "seed": None, "input_length": 2,
        }  # fmt: skip
        plain = await tgi(running, stream=True)
        assert "".join(event["token"]["text"] for event in plain) == plain[-1]["generated_text"] == HELLO
        assert plain[-1]["details"] is None


async def test_tgi_at_the_root(serving: Serving) -> None:
    async with serving() as running:
        assert (await generate(running, "/", inputs="hi")).json() == [{"generated_text": f"hi{HELLO}"}]
        bare = {"return_full_text": False}
        assert (await generate(running, "/", inputs="hi", parameters=bare)).json() == [{"generated_text": HELLO}]
        events = data_of(await generate(running, "/", inputs="hi", stream=True))
        assert events[-1]["generated_text"] == f"hi{HELLO}"
        assert "".join(event["token"]["text"] for event in events) == HELLO
        full = {"return_full_text": True}
        assert (await generate(running, inputs="hi", parameters=full)).json() == {"generated_text": f"hi{HELLO}"}
        assert (await running.client.get("/")).status_code == 200


async def test_tgi_parameters(serving: Serving, text: TextModel) -> None:
    async with serving() as running:
        stopped = await tgi(running, stop=["wor"], details=True)
        assert stopped["generated_text"] == "Hello, wor", "a stop sequence is part of the text"
        assert stopped["details"]["finish_reason"] == "stop_sequence"
        assert "".join(token["text"] for token in stopped["details"]["tokens"]) == "Hello, wor"
        streamed = await tgi(running, stream=True, stop=["wor"], details=True)
        assert streamed[-1]["generated_text"] == "Hello, wor"
        assert "".join(event["token"]["text"] for event in streamed) == "Hello, wor"
        assert (await tgi(running, max_new_tokens=5, details=True))["details"]["finish_reason"] == "length"
        for parameters, expected in (
            ({}, {"temperature": 0.0}),
            ({"do_sample": True}, {"temperature": 1.0}),
            ({"top_k": 5}, {"temperature": 1.0, "top_k": 5}),
            ({"temperature": 0.5, "seed": 9}, {"temperature": 0.5, "seed": 9}),
            ({"typical_p": 0.7, "top_p": 0.8}, {"typical_p": 0.7, "top_p": 0.8}),
            ({"repetition_penalty": 1.2, "frequency_penalty": 0.3}, {"repetition_penalty": 1.2}),
            ({"watermark": False, "max_new_tokens": 7}, {"watermark": b"", "max_tokens": 7}),
        ):
            await tgi(running, **parameters)
            found = running.engine.seen[-1].params
            assert {name: getattr(found, name) for name in expected} == expected, parameters
        await generate(running, inputs="hi")
        assert running.engine.seen[-1].params.temperature == 1.0, "without parameters, tokens are drawn"
        await generate(running, inputs="hello", parameters={"truncate": 2})
        assert running.engine.seen[-1].prompt == text.encode("lo")
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        for grammar in (
            {"type": "json", "value": schema},
            {"type": "json", "value": json.dumps(schema)},
            {"type": "regex", "value": "[0-9]+"},
            {"type": "json_schema", "value": {"name": "a", "schema": schema}},
        ):
            await tgi(running, grammar=grammar)
            assert running.engine.seen[-1].params.grammar
        best = await tgi(running, best_of=3, do_sample=True, details=True)
        assert best["generated_text"] == HELLO and len(best["details"]["best_of_sequences"]) == 2
        seeds = {best["details"]["seed"], *(each["seed"] for each in best["details"]["best_of_sequences"])}
        assert len(seeds) == 3 and None not in seeds


async def test_tgi_refusals_are_in_its_form(serving: Serving) -> None:
    async with serving() as running:
        for body, word in (
            ({"inputs": ""}, "`inputs`"),
            ({"inputs": "hi", "text": "hi"}, "`text`"),
            ({"inputs": "hi", "rid": "x"}, "`rid`"),
            ({"inputs": 5}, "`inputs`"),
            ({"parameters": {}}, "`inputs`"),
            ({"inputs": "hi", "parameters": {"temperature": 0}}, "`parameters.temperature`"),
            ({"inputs": "hi", "parameters": {"max_new_tokens": 0}}, "`parameters.max_new_tokens`"),
            ({"inputs": "hi", "parameters": {"best_of": 2}}, "`parameters.best_of`"),
            ({"inputs": "hi", "parameters": {"best_of": 2, "do_sample": True, "seed": 1}}, "`parameters.seed`"),
            ({"inputs": "hi", "parameters": {"max_new_tokens": 9999}}, "maximum context length"),
            ({"inputs": "hi", "parameters": {"stop": [""]}}, "`parameters.stop`"),
            ({"inputs": "hi", "parameters": {"adapter_id": "nope"}}, "`nope`"),
            ({"inputs": "hi", "parameters": {"grammar": {"type": "regex", "value": "("}}}, "`parameters.grammar`"),
        ):  # fmt: skip
            reply = await generate(running, **body)
            assert reply.status_code in (400, 404), reply.text
            error = reply.json()
            form = {"error", "error_type"} if "inputs" in body or "parameters" in body else {"error"}
            assert set(error) == form and word in error["error"], error
            assert error["error_type"] == ("validation" if reply.status_code == 400 else "not_found_error")
        for parameters, word in (
            ({"best_of": 2, "do_sample": True}, "streamed"),
            ({"decoder_input_details": True}, "streams"),
        ):
            reply = await generate(running, "/generate_stream", inputs="hi", parameters=parameters)
            assert reply.status_code == 400 and word in reply.json()["error"], reply.text
        for name, value in (("stop_sequences", ["a"]), ("min_p", 0.5), ("bad_words", ["a"]), ("dry_multiplier", 1)):
            for body in ({"inputs": "hi", "parameters": {name: value}}, {"inputs": "hi", name: value}):
                reply = await generate(running, **body)
                assert reply.status_code == 400 and f"{name}` is not supported" in reply.json()["error"], reply.text
        named = await generate(running, inputs="hi", parameters={"no_such": 1})
        assert named.status_code == 200 and named.headers["x-penstock-ignored"] == "parameters.no_such"
        assert not any("no_such" in request.request_id for request in running.engine.seen)


async def test_what_is_served(serving: Serving, text: TextModel) -> None:
    async with serving() as running:
        get, post = running.client.get, running.client.post
        info = (await get("/info")).json()
        assert (info["model_id"], info["max_total_tokens"], info["max_input_tokens"]) == ("tiny", 512, 511)
        for path in ("/model_info", "/get_model_info"):
            about = (await get(path)).json()
            assert (about["model_path"], about["is_generation"]) == ("tiny", True)
        assert (await get("/health_generate")).status_code == 200
        tokens = (await post("/tokenize", json={"inputs": "hé!"})).json()
        assert [token["id"] for token in tokens] == text.encode("hé!")
        assert [(token["start"], token["stop"], token["text"]) for token in tokens] == [
            (0, 1, "h"), (1, 1, ""), (1, 2, "é"), (2, 3, "!"),
        ]  # fmt: skip
        wrong = await post("/tokenize", json={"inputs": "x", "with_pieces": True})
        assert wrong.status_code == 400 and wrong.json()["error_type"] == "validation"


async def test_sglang_whole_and_streamed(serving: Serving, text: TextModel) -> None:
    ids = [*text.encode(HELLO), text.eos_token_ids[0]]
    async with serving(ScriptedEngine(text, step_s=0.02)) as running:
        asked: dict[str, Any] = {"text": "hi", "sampling_params": {"temperature": 0}}
        whole = (await generate(running, **asked)).json()
        meta = whole["meta_info"]
        assert (whole["text"], whole["output_ids"]) == (HELLO, ids)
        assert meta["finish_reason"] == {"type": "stop", "matched": ids[-1]}
        assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (2, 14, 3)
        assert meta["e2e_latency"] > 0 and meta["id"].startswith("sglang-")
        *events, done = data_of(await generate(running, **asked, stream=True))
        assert done == "[DONE]" and events[-1]["text"] == HELLO and events[-1]["output_ids"] == ids
        assert events[-1]["meta_info"]["finish_reason"] == meta["finish_reason"]
        for earlier, later in itertools.pairwise(events):
            assert later["text"].startswith(earlier["text"]) and earlier["meta_info"]["finish_reason"] is None
        assert len(events) > 1, "it streams"


async def test_sglang_prompts_and_lists(serving: Serving, text: TextModel) -> None:
    ids = text.encode("hi")
    async with serving() as running:
        for body, prompts in (
            ({"input_ids": ids}, [ids]),
            ({"text": ["hi", "ho"]}, [ids, text.encode("ho")]),
            ({"input_ids": [ids, [5]]}, [ids, [5]]),
            ({"text": "hi", "sampling_params": {"n": 2}}, [ids, ids]),
            ({"text": ["hi"], "sampling_params": [{"max_new_tokens": 4}], "return_logprob": [True]}, [ids]),
        ):
            running.engine.seen.clear()
            found = (await generate(running, **body)).json()
            assert sorted(request.prompt for request in running.engine.seen) == sorted(prompts)
            several = isinstance(body.get("text"), list) or len(prompts) > 1
            assert isinstance(found, list) == several
        *events, _ = data_of(await generate(running, text=["hi", "ho"], stream=True))
        last = {event["index"]: event for event in events}
        assert [last[index]["text"] for index in (0, 1)] == [HELLO, HELLO]
        named = await generate(running, text="hi", return_prompt_token_ids=True, rid="x", priority=3, no_such=1)
        assert named.json()["prompt_token_ids"] == ids
        assert set(named.headers["x-penstock-ignored"].split(", ")) == {"rid", "priority", "no_such"}
        unused = {"top_logprobs_num": 2, "return_text_in_logprobs": True, "logprob_start_len": -1}
        named = await generate(running, text="hi", **unused)
        assert named.headers["x-penstock-ignored"].split(", ") == ["top_logprobs_num", "return_text_in_logprobs"]
        for name, value in (("typical_p", 0.5), ("bad_words", ["a"]), ("guided_regex", "a")):
            reply = await generate(running, text="hi", sampling_params={name: value})
            assert reply.status_code == 400, reply.text
            assert reply.json()["error"]["param"] == f"sampling_params.{name}"


async def test_sglang_logprobs(serving: Serving, text: TextModel) -> None:
    async with serving() as running:
        body: dict[str, Any] = {"text": "hey", "return_logprob": True, "top_logprobs_num": 2}
        meta = (await generate(running, **body, logprob_start_len=1, return_text_in_logprobs=True)).json()["meta_info"]
        assert meta["input_token_logprobs"] == [[-0.5, id, text.token_text(id)] for id in text.encode("ey")]
        assert meta["output_token_logprobs"][:2] == [[-0.5, id, text.token_text(id)] for id in text.encode("He")]
        assert len(meta["output_top_logprobs"]) == meta["output_token_logprobs_length"] == 13
        assert len(meta["output_top_logprobs"][0]) == len(meta["input_top_logprobs"][0]) == 2
        *events, _ = data_of(await generate(running, **body, stream=True))
        assert [entry[:2] for entry in meta["output_token_logprobs"]] == [
            entry[:2] for entry in events[-1]["meta_info"]["output_token_logprobs"]
        ]
        assert events[-1]["meta_info"]["output_token_logprobs"][0][2] is None
        refused = await generate(running, **body, logprob_start_len=0, stream=True)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "logprob_start_len"


async def test_sglang_parameters(serving: Serving, text: TextModel) -> None:
    async with serving() as running:
        for sampling, expected in (
            ({}, {"max_tokens": 128}),
            ({"max_new_tokens": 7, "min_new_tokens": 2}, {"max_tokens": 7, "min_tokens": 2}),
            ({"temperature": 0.5, "top_p": 0.5, "top_k": -1}, {"temperature": 0.5, "top_p": 0.5, "top_k": 0}),
            ({"sampling_seed": 4, "min_p": 0.1}, {"seed": 4, "min_p": 0.1}),
            ({"repetition_penalty": 1.5, "logit_bias": {"5": 2}}, {"repetition_penalty": 1.5, "logit_bias": {5: 2.0}}),
            ({"regex": "", "ignore_eos": True, "stop_token_ids": [3]}, {"grammar": "", "stop_token_ids": (3,)}),
        ):
            await generate(running, text="hi", sampling_params=sampling)
            found = running.engine.seen[-1].params
            assert {name: getattr(found, name) for name in expected} == expected, sampling
        grammars: list[dict[str, Any]] = [
            {"json_schema": '{"type": "object"}'},
            {"regex": "a+"},
            {"ebnf": 'root ::= "a"'},
        ]
        for grammar in grammars:
            await generate(running, text="hi", sampling_params=grammar)
            assert running.engine.seen[-1].params.grammar
        await generate(running, text="hi", cache_salt="a", extra_key="b")
        assert running.engine.seen[-1].cache_salt.endswith("a\0b")
        stopped = (await generate(running, text="hi", sampling_params={"stop": "wor"})).json()
        assert (stopped["text"], stopped["meta_info"]["finish_reason"]) == (
            "Hello, ",
            {"type": "stop", "matched": "wor"},
        )
        kept = (await generate(running, text="hi", sampling_params={"stop": ["wor"], "no_stop_trim": True})).json()
        assert kept["text"] == "Hello, wor"
        cut = (await generate(running, text="hi", sampling_params={"max_new_tokens": 5})).json()
        assert (cut["text"], cut["meta_info"]["finish_reason"]) == ("Hello", {"type": "length", "length": 5})
        only = (await generate(running, text="hi", sampling_params={"max_new_tokens": 0})).json()
        assert (only["text"], only["meta_info"]["completion_tokens"]) == ("", 0)
        for body, param in (
            ({}, "text"),
            ({"prompt": "hi"}, "prompt"),
            ({"text": "hi", "input_ids": [1]}, "text"),
            ({"input_ids": [1, [2]]}, "input_ids"),
            ({"input_ids": [99999]}, "input_ids"),
            ({"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "sampling_params"),
            ({"text": "hi", "sampling_params": {"max_new_tokens": 9999}}, "text"),
            ({"text": "hi", "sampling_params": {"stop_regex": "a"}}, "sampling_params.stop_regex"),
            ({"text": "hi", "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
            ({"text": "hi", "sampling_params": {"regex": "("}}, "sampling_params.regex"),
            ({"text": "hi", "image_data": "x"}, "image_data"),
            ({"text": "hi", "custom_logit_processor": "x"}, "custom_logit_processor"),
            ({"text": "hi", "return_hidden_states": True}, "return_hidden_states"),
            ({"text": "hi", "top_logprobs_num": [99]}, "top_logprobs_num"),
        ):  # fmt: skip
            reply = await generate(running, **body)
            assert reply.status_code == 400 and reply.json()["error"]["param"] == param, (body, reply.text)
        assert (await generate(running, text="hi", lora_path="nope")).status_code == 404


async def test_a_long_stream_is_no_square_of_its_text(serving: Serving, text: TextModel) -> None:
    engine = ScriptedEngine(text, lambda request: text.encode("a") * 2000, max_model_len=4096, num_blocks=512)
    async with serving(engine) as running:
        *events, _ = data_of(await generate(running, text="x", sampling_params={"max_new_tokens": 2000}, stream=True))
        assert events[-1]["text"] == "a" * 2000
        assert len(events) < 900, "beyond some length, not every token has an event"


async def test_limits_and_guardrails_hold(serving: Serving, text: TextModel, tmp_path: Path) -> None:
    tiers = (TierConfig(name="small", context_tokens=64, output_tokens=8, requests_per_minute=5),)
    store = f"sqlite:///{tmp_path}/penstock.db"
    async with serving(store_url=store, tiers=tiers, default_tier="small") as running:
        await running.client.post("/v1/admin/tenants", json={"id": "acme", "tier": "small"})
        made = await running.client.post("/v1/admin/keys", json={"tenant": "acme", "user": "ann"})
        for body in ({"inputs": "hi"}, {"text": "hi"}):
            assert (await generate(running, **body)).status_code == 401
        running.client.headers["authorization"] = f"Bearer {made.json()['key']}"
        assert (await tgi(running))["generated_text"] == "Hello, w"
        assert (await generate(running, text="hi")).json()["text"] == "Hello, w"
        asked = await generate(running, inputs="hi", parameters={"max_new_tokens": 9})
        assert asked.status_code == 400 and "8 completion tokens" in asked.json()["error"], asked.text
        assert (await generate(running, text="x" * 80)).status_code == 400
        replies = [await generate(running, inputs="hi") for _ in range(4)]
        assert replies[-1].status_code == 429 and replies[-1].json()["error_type"] == "overloaded"
    rules = (GuardrailConfig(name="w", words=("world",), stage="output", action="redact", replacement="[w]"),)
    async with serving(guardrails=rules) as running:
        events = await tgi(running, stream=True)
        assert events[-1]["generated_text"] == "Hello, [w]!"
        assert "".join(event["token"]["text"] for event in events) == "Hello, [w]!"
        assert {event["token"]["id"] for event in events} == {-1}, "ids would tell what is held back"
        whole = (await generate(running, text="hi")).json()
        assert whole["text"] == "Hello, [w]!" and "output_ids" not in whole
        refused = await generate(running, inputs="hi", parameters={"details": True})
        assert refused.status_code == 400 and "`parameters.details`" in refused.json()["error"]
        refused = await generate(running, text="hi", return_logprob=True)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "return_logprob"
        for name, value in (("details", True), ("top_n_tokens", 2), ("decoder_input_details", True)):
            refused = await generate(running, inputs="hi", parameters={name: value})
            assert refused.status_code == 400, refused.text
            assert refused.json()["error"].startswith(f"`parameters.{name}`"), "as the client calls it"


async def test_a_gateway_reads_what_another_writes(serving: Serving, text: TextModel) -> None:
    async with serving() as far:
        url = f"http://127.0.0.1:{far.port}"
        others = [
            RemoteModel(f"far-{dialect}", [RemoteServer("0", Upstream(f"{url}/v1", "tiny", dialect=dialect))])
            for dialect in ("tgi", "llama.cpp", "sglang")
        ]
        async with serving(others=others) as near:
            for stops, expected in ((None, HELLO), (["wor"], "Hello, ")):
                asked = {"model": "far-tgi", "prompt": "hi", "max_tokens": 50, "logprobs": 1, "stop": stops}
                (choice,) = (await near.client.post("/v1/completions", json=asked)).json()["choices"]
                assert (choice["text"], choice["finish_reason"]) == (expected, "stop")
                assert choice["logprobs"]["tokens"][:2] == ["H", "e"]
            for model in ("far-tgi", "far-llama.cpp"):
                counted = (await near.client.post("/v1/tokenize", json={"model": model, "prompt": "hey"})).json()
                assert counted["count"] == 3 and "estimated" not in counted, counted
            # The own paths in front of a model that another server runs.
            native = (await near.client.post("/completion", json={"model": "far-sglang", "prompt": "hi"})).json()
            assert (native["content"], native["stop_type"], native["tokens"]) == (HELLO, "eos", [])
            for body in ({"inputs": "hi"}, {"text": "hi"}):
                reply = await generate(near, model="far-sglang", **body)
                assert HELLO in reply.text, reply.text
            streamed = data_of(await generate(near, "/generate_stream", model="far-sglang", inputs="hi"))
            assert "".join(event["token"]["text"] for event in streamed) == streamed[-1]["generated_text"] == HELLO
            gap = {"model": "far-sglang", "input_prefix": "x", "input_suffix": "y", "input_extra": [{"text": "z"}]}
            filled = await near.client.post("/infill", json=gap)
            assert filled.status_code == 400 and filled.json()["error"]["param"] == "input_extra"
            mixed = await near.client.post("/completion", json={"model": "far-sglang", "prompt": [5, "hi"]})
            assert mixed.status_code == 400 and "tokenizer" in mixed.json()["error"]["message"]


async def test_a_client_that_leaves_stops_its_request(serving: Serving, text: TextModel) -> None:
    engine = ScriptedEngine(text, lambda request: text.encode("a") * 400, step_s=0.01)
    async with serving(engine) as running:
        for count, body in enumerate(({"inputs": "hi", "stream": True}, {"text": "hi", "stream": True}), 1):
            async with running.client.stream("POST", "/generate", json=body) as reply:
                async for _ in reply.aiter_lines():
                    break
            await eventually(lambda count=count: len(engine.aborted) == count)  # type: ignore[misc]
