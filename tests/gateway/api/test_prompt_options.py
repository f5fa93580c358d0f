"""Parameters that decide how messages become a prompt, as users of vLLM, SGLang and llama.cpp send them."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer

from penstock.engine.request import Request
from penstock.gateway.generation.prompt_options import USUAL, continues, prompt_options
from penstock.gateway.generation.schemas import ChatMessage, ChatRequest
from penstock.protocol.errors import InvalidRequest
from penstock.text import TextModel
from penstock.text.chat_template import ChatTemplate
from penstock.text.infill import infill_tokens
from tests.gateway.conftest import Running, Serving, events
from tests.scripted import ScriptedEngine

ASK = {"role": "user", "content": "hi"}
BEGUN = {"role": "assistant", "content": "Well, "}


def prompt_of(gateway: Running, text: TextModel) -> str:
    return text.decode(gateway.engine.seen[-1].prompt, skip_special=False)


async def test_an_answer_continues_the_last_message(serving: Serving, text: TextModel) -> None:
    async with serving(ScriptedEngine(text, " hello")) as gateway:
        for body in (
            {"continue_final_message": True, "add_generation_prompt": False, "messages": [ASK, BEGUN]},
            {
                "continue_final_message": True,
                "messages": [ASK, {**BEGUN, "content": [{"type": "text", "text": "Well, "}]}],
            },
            {"messages": [ASK, {**BEGUN, "prefix": True}]},
            {"messages": [ASK, {**BEGUN, "partial": True}]},
        ):
            reply = await gateway.chat(**body)
            assert reply.json()["choices"][0]["message"]["content"] == " hello", reply.text
            assert prompt_of(gateway, text) == "<|user|>hi<|end|><|assistant|>Well, "
            reply = await gateway.chat(**body, echo=True, n=2)
            assert [choice["message"]["content"] for choice in reply.json()["choices"]] == ["Well,  hello"] * 2
            reply = await gateway.chat(**body, echo=True, stream=True)
            chunks = [json.loads(line)["choices"][0]["delta"] for line in events(reply.text)[:-1]]
            assert "".join(chunk.get("content", "") for chunk in chunks) == "Well,  hello"

        await gateway.chat(messages=[ASK, BEGUN], add_generation_prompt=False)
        assert prompt_of(gateway, text) == "<|user|>hi<|end|><|assistant|>Well, <|end|>"
        await gateway.chat(messages=[ASK, BEGUN])
        assert prompt_of(gateway, text) == "<|user|>hi<|end|><|assistant|>Well, <|end|><|assistant|>"

        counted = {"model": "tiny", "messages": [ASK, BEGUN], "continue_final_message": True}
        tokens = (await gateway.client.post("/v1/tokenize", json=counted)).json()["tokens"]
        assert text.decode(tokens, skip_special=False) == "<|user|>hi<|end|><|assistant|>Well, "


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"continue_final_message": True}, "messages[0].role"),
        (
            {"messages": [ASK, BEGUN], "continue_final_message": True, "add_generation_prompt": True},
            "add_generation_prompt",
        ),
        ({"messages": [ASK, {**BEGUN, "prefix": True}, ASK]}, "messages[1].prefix"),
        ({"messages": [{**ASK, "partial": True}]}, "messages[0].role"),
    ],
)
def test_what_is_not_a_continuation(change: dict[str, Any], param: str) -> None:
    request = msgspec.convert({"model": "tiny", "messages": [ASK], **change}, ChatRequest)
    with pytest.raises(InvalidRequest) as caught:
        prompt_options(request)
    assert caught.value.param == param


def test_requests_without_options_share_one_object() -> None:
    request = ChatRequest(model="tiny", messages=[ChatMessage(role="user", content="hi")], add_generation_prompt=True)
    assert prompt_options(request) is USUAL
    assert not continues(request)


class Templated:
    """A model whose template knows documents and a variable."""

    SOURCE = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% for d in documents or [] %}[{{ d.title }}]{% endfor %}{% if enable_thinking is defined %}"
        "{{ 'think' if enable_thinking else 'fast' }}{% endif %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )

    @staticmethod
    def of(text: TextModel) -> TextModel:
        return TextModel(
            text._tokenizer, template=ChatTemplate(Templated.SOURCE, {}), eos_token_ids=text.eos_token_ids,
            vocab_size=text.vocab_size, context_length=text.context_length,
        )  # fmt: skip


async def test_variables_and_documents_reach_the_template(serving: Serving, text: TextModel) -> None:
    model = Templated.of(text)
    async with serving(text=model) as gateway:
        reply = await gateway.chat(chat_template_kwargs={"enable_thinking": False, "frobnicate": 1, "messages": []})
        assert prompt_of(gateway, text) == "<|user|>hi<|end|>fast<|assistant|>"
        ignored = reply.headers["x-penstock-ignored"].split(", ")
        assert sorted(ignored) == ["chat_template_kwargs.frobnicate", "chat_template_kwargs.messages"]
        await gateway.chat(documents=[{"title": "one<|end|>", "text": "x"}, {"title": "two"}])
        assert prompt_of(gateway, text) == "<|user|>hi<|end|>[one<|end|>][two]<|assistant|>"
        assert gateway.engine.seen[-1].prompt.count(text.token_id("<|end|>")) == 1, "documents are no control tokens"
        nested: Any = "x"
        for _ in range(400):
            nested = [nested]
        assert (await gateway.chat(chat_template_kwargs={"enable_thinking": nested})).status_code in (200, 400)
        reply = await gateway.chat(chat_template="{{ messages[0].content }}")
        assert reply.json()["error"]["param"] == "chat_template"
    async with serving() as gateway:
        reply = await gateway.chat(documents=[{"title": "one"}])
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "documents")
        reply = await gateway.chat(chat_template_kwargs={"enable_thinking": False})
        assert reply.headers["x-penstock-ignored"] == "chat_template_kwargs.enable_thinking"


async def test_a_template_of_the_request_where_the_operator_allows_it(serving: Serving, text: TextModel) -> None:
    async with serving(request_templates=True) as gateway:
        template = (
            "<|user|>{{ messages[0].content | upper }}<|end|>{% if add_generation_prompt %}<|assistant|>{% endif %}"
        )
        for _ in range(2):
            assert (await gateway.chat(chat_template=template)).status_code == 200
            assert prompt_of(gateway, text) == "<|user|>HI<|end|><|assistant|>"
        for bad, said in (
            ("{% if %}", "cannot be compiled"),
            ("{{ ''.__class__.__mro__ }}", "unsafe"),
            ("{% for i in range(10**9) %}x{% endfor %}", "cannot render"),
            ("{{ raise_exception('no') }}", "refuses"),
        ):
            reply = await gateway.chat(chat_template=bad)
            assert reply.status_code == 400 and said in reply.text, reply.text


async def test_a_prompt_is_truncated_from_the_left(serving: Serving, text: TextModel) -> None:
    async with serving() as gateway:
        long = "".join(chr(97 + i % 26) for i in range(2000))
        reply = await gateway.chat(
            messages=[{"role": "user", "content": long}], truncate_prompt_tokens=10, max_tokens=4
        )
        assert reply.json()["usage"]["prompt_tokens"] == 10
        assert prompt_of(gateway, text) == long[-8:] + "<|end|><|assistant|>"
        await gateway.complete(prompt=long, truncate_prompt_tokens=-1, max_tokens=12, echo=True)
        assert prompt_of(gateway, text) == long[-500:]
        reply = await gateway.complete(prompt=[104, 105, 106], truncate_prompt_tokens=2, echo=True, max_tokens=0)
        assert len(gateway.engine.seen[-1].prompt) == 2
        assert (await gateway.complete(truncate_prompt_tokens=0)).json()["error"]["param"] == "truncate_prompt_tokens"
        short = await gateway.complete(prompt="hi", truncate_prompt_tokens=400, echo=True)
        assert short.json()["choices"][0]["text"].startswith("hi")


async def test_control_tokens_and_stops_in_the_text(serving: Serving, text: TextModel) -> None:
    end, user = text.token_id("<|end|>"), text.token_id("<|user|>")
    assert end is not None and user is not None

    def script(request: Request) -> list[int]:
        return [*text.encode("so<|user|>it is."), end]

    async with serving(ScriptedEngine(text, script)) as gateway:
        for more, content in (
            ({}, "soit is."),
            ({"skip_special_tokens": False}, "so<|user|>it is."),
            ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "so<|user|>it is.<|end|>"),
            ({"include_stop_str_in_output": True}, "soit is."),
            ({"stop": ["it", "xyz"]}, "so"),
            ({"stop": "it", "include_stop_str_in_output": True}, "soit"),
            ({"stop": "it", "no_stop_trim": True}, "soit"),
            ({"stop": "user|>", "skip_special_tokens": False}, "so<|"),
            (
                {"stop_token_ids": [user], "include_stop_str_in_output": True, "skip_special_tokens": False},
                "so<|user|>",
            ),
        ):
            reply = await gateway.chat(**more, n=2)
            assert [choice["message"]["content"] for choice in reply.json()["choices"]] == [content] * 2, more
            reply = await gateway.chat(**more, stream=True)
            chunks = [json.loads(line)["choices"][0]["delta"] for line in events(reply.text)[:-1]]
            assert "".join(chunk.get("content", "") for chunk in chunks) == content
            reply = await gateway.complete(**more, logprobs=1)
            assert reply.json()["choices"][0]["text"] == content


async def test_echo_and_detokenize_are_exact(serving: Serving, text: TextModel) -> None:
    async with serving() as gateway:
        for prompt in ("<|user|>hi", " <|end|> x", "é<|assistant|>"):
            for stream in (False, True):
                reply = await gateway.complete(prompt=prompt, echo=True, max_tokens=0, logprobs=1, stream=stream)
                data = json.loads(events(reply.text)[0]) if stream else reply.json()
                assert data["choices"][0]["text"] == prompt
                tokens, offsets = (data["choices"][0]["logprobs"][name] for name in ("tokens", "text_offset"))
                assert all(
                    prompt[at:].startswith(token)
                    for token, at in zip(tokens, offsets, strict=True)
                    if token[:5] != "bytes"
                )
            body = {"model": "tiny", "prompt": prompt}
            tokens = (await gateway.client.post("/v1/tokenize", json=body)).json()["tokens"]
            reply = await gateway.complete(prompt=tokens, echo=True, max_tokens=0)
            assert reply.json()["choices"][0]["text"] == prompt
            body = {"model": "tiny", "tokens": tokens}
            assert (await gateway.client.post("/v1/detokenize", json=body)).json()["prompt"] == prompt
            plain = (await gateway.client.post("/v1/detokenize", json={**body, "skip_special_tokens": True})).json()
            assert "<|" not in plain["prompt"]


async def test_a_gap_is_filled_where_the_model_has_tokens_for_it(serving: Serving, text: TextModel) -> None:
    async with serving() as gateway:
        reply = await gateway.complete(suffix="there")
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "suffix")
        assert (await gateway.complete(suffix="")).status_code == 200
    tokenizer = Tokenizer.from_str(text._tokenizer.to_str())
    marks = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>"]
    tokenizer.add_special_tokens(marks)
    model = TextModel(tokenizer, eos_token_ids=text.eos_token_ids)
    async with serving(ScriptedEngine(model), text=model) as gateway:
        reply = await gateway.complete(prompt="a = ", suffix="\nprint(a)")
        assert reply.json()["choices"][0]["text"] == "Hello, world!"
        asked = gateway.engine.seen[-1]
        prompt = model.decode(asked.prompt, skip_special=False)
        assert prompt == "<|fim_prefix|>a = <|fim_suffix|>\nprint(a)<|fim_middle|>"
        assert model.token_id("<|fim_pad|>") in asked.params.stop_token_ids
        assert (await gateway.complete(suffix="x", echo=True)).json()["error"]["param"] == "echo"
        # The same under Ollama's path, where editors ask, and whose description says that it can be done.
        asked = {"model": "tiny", "prompt": "b = ", "suffix": "\nprint(b)", "stream": False}
        reply = await gateway.client.post("/api/generate", json=asked)
        assert reply.json()["response"] == "Hello, world!"
        prompt = model.decode(gateway.engine.seen[-1].prompt, skip_special=False)
        assert prompt == "<|fim_prefix|>b = <|fim_suffix|>\nprint(b)<|fim_middle|>"
        assert "insert" in (await gateway.client.post("/api/show", json={"model": "tiny"})).json()["capabilities"]


@pytest.mark.parametrize(
    ("names", "prompt"),
    [
        (["<fim_prefix>", "<fim_suffix>", "<fim_middle>"], ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"]),
        (["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"], ["▁<PRE>", "▁<SUF>", "▁<MID>"]),
        (
            ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"],
            ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"],
        ),
        (["[SUFFIX]", "[PREFIX]"], ["[SUFFIX]", "[PREFIX]"]),
        (["<|im_start|>"], None),
    ],
)
def test_infill_formats(names: list[str], prompt: list[str] | None) -> None:
    found = infill_tokens(lambda name: names.index(name) if name in names else None)
    if prompt is None:
        assert found is None
    else:
        assert found is not None
        assert [names[token] for token in found.prompt([], [])] == prompt
        assert found.ends == ((3,) if len(names) == 4 else ())
