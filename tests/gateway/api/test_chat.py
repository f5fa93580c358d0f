"""R-API-1: /v1/chat/completions, streamed and not."""

from __future__ import annotations

import asyncio
import json

import pytest

from penstock.text import TextModel
from tests.gateway.conftest import Serving, events, eventually
from tests.scripted import ScriptedEngine


async def test_answers_a_conversation(serving: Serving, text: TextModel) -> None:
    async with serving() as gateway:
        reply = await gateway.chat(temperature=0, max_tokens=50)
        assert reply.status_code == 200
        body = reply.json()
        assert body["object"] == "chat.completion"
        assert body["model"] == "tiny"
        assert body["system_fingerprint"].startswith("fp_")
        [choice] = body["choices"]
        assert choice["message"] == {
            "role": "assistant",
            "content": "Hello, world!",
            "refusal": None,
            "annotations": [],
        }
        assert choice["finish_reason"] == "stop"
        # Thirteen characters and the end token; the prompt is <|user|>hi<|end|><|assistant|>.
        assert body["usage"]["completion_tokens"] == 14
        assert body["usage"]["prompt_tokens"] == 5
        assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
        prompt = gateway.engine.seen[-1].prompt
        assert text.decode(prompt, skip_special=False) == "<|user|>hi<|end|><|assistant|>"


async def test_streams_role_first_usage_and_done_last(serving: Serving) -> None:
    async with serving() as gateway:
        reply = await gateway.chat(stream=True, stream_options={"include_usage": True})
        assert reply.headers["content-type"].startswith("text/event-stream")
        *lines, done = events(reply.text)
        assert done == "[DONE]"
        chunks = [json.loads(line) for line in lines]
        assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1])
        assert text == "Hello, world!"
        assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] == 14


async def test_every_chunk_has_the_usage_so_far_if_asked_for(serving: Serving, text: TextModel) -> None:
    async with serving(ScriptedEngine(text, step_s=0.03)) as gateway:  # slow enough for more than one chunk
        options = {"include_usage": True, "continuous_usage_stats": True}
        for ask in (gateway.chat, gateway.complete):
            reply = await ask(stream=True, stream_options=options)
            assert "x-penstock-ignored" not in reply.headers
            used = [json.loads(data)["usage"] for data in events(reply.text)[:-1]]
            counts = [usage["completion_tokens"] for usage in used]
            assert counts == sorted(counts) and counts[-1] == 14 and len(set(counts)) > 1
            assert {usage["prompt_tokens"] for usage in used} == {used[-1]["prompt_tokens"]}


async def test_a_stream_without_usage_has_no_usage_key(serving: Serving) -> None:
    async with serving() as gateway:
        chunks = [json.loads(line) for line in events((await gateway.chat(stream=True)).text)[:-1]]
        assert all("usage" not in chunk for chunk in chunks)


async def test_says_which_model_answered_and_echoes_the_request_id(serving: Serving) -> None:
    async with serving() as gateway:
        reply = await gateway.client.post(
            "/v1/chat/completions",
            json={"model": "small", "messages": [{"role": "user", "content": "hi"}]},
            headers={"x-request-id": "my-id.1"},
        )
        assert reply.json()["model"] == "tiny"
        assert reply.headers["x-request-id"] == "my-id.1"
        assert reply.headers["x-penstock-model"] == "tiny"
        assert reply.headers["x-penstock-route"] == "alias"
        assert reply.headers["x-penstock-replica"] == "0"
        assert reply.headers["openai-processing-ms"].isdigit()
        bad = await gateway.client.get("/v1/models", headers={"x-request-id": "bad id"})
        assert bad.headers["x-request-id"].startswith("req_")


async def test_two_requests_with_the_same_id_do_not_disturb_each_other(serving: Serving, text: TextModel) -> None:
    async with serving(ScriptedEngine(text, step_s=0.002)) as gateway:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
        replies = await asyncio.gather(
            *(
                gateway.client.post("/v1/chat/completions", json=body, headers={"x-request-id": "same"})
                for _ in range(4)
            )
        )
        assert [reply.json()["choices"][0]["message"]["content"] for reply in replies] == ["Hello, world!"] * 4


@pytest.mark.parametrize("stream", [False, True])
async def test_n_choices_have_consecutive_seeds_and_are_billed_together(serving: Serving, stream: bool) -> None:
    async with serving() as gateway:
        reply = await gateway.chat(
            n=3, seed=7, stream=stream, stream_options={"include_usage": True} if stream else None
        )
        assert sorted(request.params.seed for request in gateway.engine.seen) == [7, 8, 9]
        if stream:
            chunks = [json.loads(line) for line in events(reply.text)[:-1]]
            texts = ["", "", ""]
            for chunk in chunks:
                for choice in chunk["choices"]:
                    texts[choice["index"]] += choice["delta"].get("content", "")
            usage = chunks[-1]["usage"]
        else:
            texts = [choice["message"]["content"] for choice in reply.json()["choices"]]
            usage = reply.json()["usage"]
        assert texts == ["Hello, world!"] * 3
        assert usage["completion_tokens"] == 42
        assert usage["prompt_tokens"] == 5


async def test_without_a_seed_each_request_gets_its_own(serving: Serving) -> None:
    async with serving() as gateway:
        await gateway.chat()
        await gateway.chat()
        first, second = gateway.engine.seen
        assert first.params.seed != second.params.seed


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", ["wor", ["xyz", "wor"], ["o, w"]])
async def test_stop_strings_cut_the_text_and_stop_the_engine(
    serving: Serving, text: TextModel, stream: bool, stop: str | list[str]
) -> None:
    engine = ScriptedEngine(text, "Hello, world! " + "and so on " * 20, step_s=0.002)
    async with serving(engine) as gateway:
        reply = await gateway.chat(stop=stop, stream=stream)
        if stream:
            chunks = [json.loads(line) for line in events(reply.text)[:-1]]
            shown = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
            last = chunks[-1]["choices"][0]
        else:
            last = reply.json()["choices"][0]
            shown = last["message"]["content"]
            assert reply.json()["usage"]["completion_tokens"] < 20
        assert shown == ("Hell" if stop == ["o, w"] else "Hello, ")
        assert last["finish_reason"] == "stop"
        assert last["stop_reason"] == (stop if isinstance(stop, str) else stop[-1])
        await eventually(lambda: engine.aborted == [engine.seen[0].request_id])


async def test_a_stop_string_does_not_end_before_min_tokens(serving: Serving) -> None:
    async with serving() as gateway:
        reply = await gateway.chat(stop="l", min_tokens=6)
        assert reply.json()["choices"][0]["message"]["content"] == "Hello, wor"


async def test_text_held_for_a_stop_string_is_not_lost(serving: Serving) -> None:
    async with serving() as gateway:
        reply = await gateway.chat(stop="world!?", stream=True)
        chunks = [json.loads(line) for line in events(reply.text)[:-1]]
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "Hello, world!"


async def test_characters_are_never_split(serving: Serving, text: TextModel) -> None:
    answer = "naïve 日本語 🎉👩‍👩‍👧"
    async with serving(ScriptedEngine(text, answer)) as gateway:
        reply = await gateway.chat(stream=True)
        parts = [json.loads(line)["choices"][0]["delta"].get("content", "") for line in events(reply.text)[:-1]]
        assert "".join(parts) == answer
        assert not any("�" in part for part in parts)


async def test_an_answer_cut_inside_a_character_ends_with_a_replacement(serving: Serving, text: TextModel) -> None:
    async with serving(ScriptedEngine(text, "日本")) as gateway:
        reply = await gateway.chat(max_tokens=4)
        assert reply.json()["choices"][0]["message"]["content"] == "日�"
        assert reply.json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs(serving: Serving, stream: bool) -> None:
    async with serving() as gateway:
        reply = await gateway.chat(logprobs=True, top_logprobs=5, stream=stream)
        if stream:
            chunks = [json.loads(line) for line in events(reply.text)[:-1]]
            content = [
                entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
            ]
        else:
            content = reply.json()["choices"][0]["logprobs"]["content"]
        # The end token is not part of the text, so it has no entry.
        assert "".join(entry["token"] for entry in content) == "Hello, world!"
        assert content[0]["bytes"] == [ord("H")]
        assert content[0]["logprob"] == -0.5
        assert len(content[0]["top_logprobs"]) == 5
        assert content[0]["top_logprobs"][4]["logprob"] == -9999.0


async def test_logprobs_are_cut_with_the_text(serving: Serving) -> None:
    async with serving() as gateway:
        reply = await gateway.chat(logprobs=True, stop="wor")
        content = reply.json()["choices"][0]["logprobs"]["content"]
        assert "".join(entry["token"] for entry in content) == "Hello, "
        assert all(entry["top_logprobs"] == [] for entry in content)


async def test_every_engine_parameter_arrives(serving: Serving, text: TextModel) -> None:
    async with serving() as gateway:
        reply = await gateway.chat(
            temperature=0.5,
            top_p=0.9,
            top_k=40,
            min_p=0.05,
            presence_penalty=0.1,
            frequency_penalty=-0.2,
            repetition_penalty=1.1,
            logit_bias={"5": -100, "7": 3.5},
            seed=-1,
            min_tokens=2,
            max_completion_tokens=20,
            stop_token_ids=[9],
            service_tier="priority",
            speculation=False,
        )
        assert reply.status_code == 200, reply.text
        assert reply.json()["service_tier"] == "priority"
        for asked, served in (("fast", "priority"), ("scale", "default"), ("auto", "default"), ("flex", "flex")):
            assert (await gateway.chat(service_tier=asked)).json()["service_tier"] == served
        request = gateway.engine.seen[0]
        params = request.params
        assert request.priority < 0 and not request.speculation
        assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 40, 0.05)
        assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.1, -0.2, 1.1)
        assert params.logit_bias == {5: -100.0, 7: 3.5}
        assert params.seed == 2**63 - 1
        assert (params.min_tokens, params.max_tokens) == (2, 20)
        assert params.stop_token_ids == (*text.eos_token_ids, 9)
        await gateway.chat(ignore_eos=True, stop_token_ids=[9], max_tokens=3)
        assert gateway.engine.seen[-1].params.stop_token_ids == (9,)
        assert gateway.engine.seen[-1].speculation


async def test_null_means_not_given(serving: Serving) -> None:
    names = [
        "temperature",
        "top_p",
        "n",
        "stop",
        "max_tokens",
        "max_completion_tokens",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "logprobs",
        "top_logprobs",
        "seed",
        "stream",
        "stream_options",
        "user",
        "metadata",
        "service_tier",
        "tools",
        "tool_choice",
        "response_format",
        "parallel_tool_calls",
        "functions",
        "store",
        "modalities",
        "reasoning_effort",
    ]
    async with serving() as gateway:
        reply = await gateway.chat(**dict.fromkeys(names))
        assert reply.status_code == 200, reply.text


async def test_an_earlier_answer_can_be_sent_back_as_it_was_received(serving: Serving, text: TextModel) -> None:
    async with serving() as gateway:
        message = (await gateway.chat()).json()["choices"][0]["message"]
        messages = [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
            {**message, "tool_calls": None, "function_call": None, "audio": None},
            {"role": "user", "content": "again", "name": "ann"},
        ]
        reply = await gateway.chat(messages=messages)
        assert reply.status_code == 200, reply.text
        prompt = text.decode(gateway.engine.seen[-1].prompt, skip_special=False)
        assert prompt == (
            "<|system|>Be brief.<|end|><|user|>hi<|end|><|assistant|>Hello, world!<|end|>"
            "<|user|>again<|end|><|assistant|>"
        )


async def test_a_large_conversation_is_tokenized_off_the_event_loop(serving: Serving, text: TextModel) -> None:
    async with serving(ScriptedEngine(text, max_model_len=100_000)) as gateway:
        reply = await gateway.chat(messages=[{"role": "user", "content": "word " * 10_000}], max_tokens=1)
        assert reply.json()["usage"]["prompt_tokens"] == 50_003


async def test_a_model_without_a_template_says_so(serving: Serving, tmp_path_factory: pytest.TempPathFactory) -> None:
    from tests.scripted import make_text

    plain = make_text(tmp_path_factory.mktemp("plain"), chat=False)
    async with serving(ScriptedEngine(plain), text=plain) as gateway:
        reply = await gateway.chat()
        assert reply.status_code == 400
        assert reply.json()["error"]["code"] == "no_chat_template"
