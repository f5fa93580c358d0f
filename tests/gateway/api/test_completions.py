"""R-API-2: /v1/completions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.text import TextModel
from tests.gateway.conftest import Serving, events
from tests.scripted import ScriptedEngine


async def test_continues_text_with_sixteen_tokens_by_default(serving: Serving, text: TextModel) -> None:
    async with serving(ScriptedEngine(text, "abcdefghijklmnopqrstuvwxyz")) as gateway:
        body = (await gateway.complete()).json()
        assert body["object"] == "text_completion"
        assert body["choices"] == [
            {"index": 0, "text": "abcdefghijklmnop", "logprobs": None, "finish_reason": "length"}
        ]
        assert body["usage"]["total_tokens"] == 18


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("hi", ["hi"]),
        (["hi", "there"], ["hi", "there"]),
        ([72, 73], [[72, 73]]),
        ([[72], [73, 74]], [[72], [73, 74]]),
    ],
)
async def test_every_form_of_prompt(serving: Serving, text: TextModel, prompt: Any, prompts: list[Any]) -> None:
    async with serving() as gateway:
        body = (await gateway.complete(prompt=prompt, n=2)).json()
        expected = [p if isinstance(p, list) else text.encode(p) for p in prompts for _ in range(2)]
        assert [request.prompt for request in gateway.engine.seen] == expected
        assert [choice["index"] for choice in body["choices"]] == list(range(len(expected)))
        assert body["usage"]["prompt_tokens"] == sum(map(len, expected)) // 2


async def test_prompts_are_streamed_side_by_side(serving: Serving) -> None:
    async with serving() as gateway:
        reply = await gateway.complete(prompt=["a", "b"], stream=True, max_tokens=20)
        texts = ["", ""]
        for line in events(reply.text)[:-1]:
            [choice] = json.loads(line)["choices"]
            texts[choice["index"]] += choice["text"]
        assert texts == ["Hello, world!"] * 2


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_logprobs_in_the_older_format(serving: Serving, stream: bool) -> None:
    async with serving() as gateway:
        reply = await gateway.complete(prompt="héy", echo=True, logprobs=2, max_tokens=4, stream=stream)
        if stream:
            choices = [json.loads(line)["choices"][0] for line in events(reply.text)[:-1]]
            shown = "".join(choice["text"] for choice in choices)
            rows = {key: [x for c in choices for x in c["logprobs"][key]] for key in choices[0]["logprobs"]}
        else:
            [choice] = reply.json()["choices"]
            shown, rows = choice["text"], choice["logprobs"]
        assert shown == "héyHell"
        # é is two bytes, and so two tokens that start at the same character.
        assert rows["tokens"] == ["h", "bytes:\\xc3", "bytes:\\xa9", "y", "H", "e", "l", "l"]
        assert rows["text_offset"] == [0, 1, 1, 2, 3, 4, 5, 6]
        assert rows["token_logprobs"] == [None] + [-0.5] * 7
        assert rows["top_logprobs"][0] is None
        assert all(len(top) == 2 for top in rows["top_logprobs"][1:])


async def test_scoring_a_prompt_without_generating(serving: Serving) -> None:
    async with serving() as gateway:
        body = (await gateway.complete(prompt="hey", echo=True, logprobs=0, max_tokens=0)).json()
        [choice] = body["choices"]
        assert choice["text"] == "hey"
        assert choice["logprobs"]["tokens"] == ["h", "e", "y"]
        assert choice["logprobs"]["top_logprobs"] is None
        assert choice["finish_reason"] == "length"
        assert body["usage"]["completion_tokens"] == 0


async def test_echo_without_logprobs(serving: Serving) -> None:
    async with serving() as gateway:
        body = (await gateway.complete(prompt="hey ", echo=True, max_tokens=5)).json()
        assert body["choices"][0]["text"] == "hey Hello"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 3, "stream": True}, "best_of"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt": ["a"] * 65, "best_of": 2}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, [2]]}, "prompt"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [100000]}, "prompt"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": ["a"] * 200}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt": "x" * 600}, "prompt"),
        ({"max_tokens": 600}, "prompt"),
        ({"messages": []}, "messages"),
    ],
)
async def test_refusals_name_the_parameter(serving: Serving, body: dict[str, Any], param: str) -> None:
    async with serving() as gateway:
        reply = await gateway.complete(**body)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == param, reply.text
        assert not gateway.engine.seen
