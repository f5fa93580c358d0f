"""Parameters that decide how messages become a prompt, as users of vLLM, SGLang and llama.cpp send them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.gateway.generation.prompt_options import USUAL, continues, prompt_options
from penstock.gateway.generation.schemas import ChatMessage, ChatRequest
from penstock.protocol.errors import InvalidRequest
from penstock.text import TextModel
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
    import msgspec

    request = msgspec.convert({"model": "tiny", "messages": [ASK], **change}, ChatRequest)
    with pytest.raises(InvalidRequest) as caught:
        prompt_options(request)
    assert caught.value.param == param


def test_requests_without_options_share_one_object() -> None:
    request = ChatRequest(model="tiny", messages=[ChatMessage(role="user", content="hi")], add_generation_prompt=True)
    assert prompt_options(request) is USUAL
    assert not continues(request)
