"""Text completions: prompts of every kind, choices, echo, stop strings, seeds, streams."""

from __future__ import annotations

import openai
import pytest

from tests.compat.conftest import MODEL

COUNT = "One, two, three,"


def complete(client: openai.OpenAI, prompt: object = COUNT, **more: object) -> openai.types.Completion:
    return client.completions.create(model=MODEL, prompt=prompt, **{"max_tokens": 5, "temperature": 0, **more})


def test_one_prompt(client: openai.OpenAI) -> None:
    answer = complete(client)
    (choice,) = answer.choices
    assert answer.id.startswith("cmpl-") and answer.object == "text_completion" and answer.system_fingerprint
    assert choice.text.startswith(" four") and choice.finish_reason == "length" and choice.logprobs is None
    assert answer.usage is not None and answer.usage.completion_tokens == 5
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 5
    assert answer.usage.prompt_tokens_details is not None


def test_ids_and_lists_of_prompts_say_the_same(client: openai.OpenAI, http: object) -> None:
    ids = http.post("/tokenize", json={"prompt": COUNT}).json()["tokens"]  # type: ignore[attr-defined]
    text = complete(client).choices[0].text
    assert complete(client, ids).choices[0].text == text
    for prompts in ([COUNT, COUNT], [ids, ids]):
        answer = complete(client, prompts)
        assert [choice.index for choice in answer.choices] == [0, 1]
        assert [choice.text for choice in answer.choices] == [text, text]


def test_choices_come_in_the_order_of_the_prompts(client: openai.OpenAI) -> None:
    answer = complete(client, [COUNT, "The sky is"], n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    first, second, third, fourth = (choice.text for choice in answer.choices)
    assert first == second and third == fourth and first != third


@pytest.mark.parametrize("stream", [False, True])
def test_choices_of_one_prompt_differ(client: openai.OpenAI, stream: bool) -> None:
    asked = {"n": 3, "temperature": 1.0, "seed": 42, "max_tokens": 6, "stream": stream}
    answer = complete(client, "Once upon a time", **asked)
    texts, finished = ["", "", ""], 0
    for part in answer if stream else [answer]:
        for choice in part.choices:
            texts[choice.index] += choice.text
            finished += choice.finish_reason is not None
    assert len(set(texts)) == 3 and all(texts)
    assert finished == 3


def test_a_stream_is_the_whole_in_parts(client: openai.OpenAI) -> None:
    chunks = list(complete(client, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == complete(client).choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks].count(None) == len(chunks) - 1
    assert chunks[-1].choices[0].finish_reason == "length"
    assert len({chunk.id for chunk in chunks}) == 1


def test_usage_in_a_stream_only_when_asked_for(client: openai.OpenAI) -> None:
    assert all(chunk.usage is None for chunk in complete(client, stream=True))
    *chunks, last = complete(client, stream=True, stream_options={"include_usage": True})
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)
    assert last.choices == [] and last.usage.completion_tokens == 5


def test_echo_puts_the_prompt_first(client: openai.OpenAI) -> None:
    alone, echoed = complete(client), complete(client, echo=True)
    assert echoed.choices[0].text == COUNT + alone.choices[0].text
    assert complete(client, echo=True, max_tokens=0, logprobs=0).choices[0].text == COUNT


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    whole = complete(client, max_tokens=6).choices[0].text
    for stop in (" five", [" five", " never"]):
        choice = complete(client, max_tokens=6, stop=stop).choices[0]
        assert choice.text == whole.partition(" five")[0] and choice.finish_reason == "stop"
        streamed = "".join(chunk.choices[0].text for chunk in complete(client, max_tokens=6, stop=stop, stream=True))
        assert streamed == choice.text
    kept = complete(client, max_tokens=6, stop=" five", extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].text.endswith(" five")


@pytest.mark.slow
def test_a_seed_decides(client: openai.OpenAI) -> None:
    def story(seed: int) -> str:
        return complete(client, "Once upon a time", temperature=1.0, seed=seed, max_tokens=6).choices[0].text

    assert story(1) == story(1)
    assert len({story(seed) for seed in range(3)}) == 3


def test_log_probabilities(client: openai.OpenAI) -> None:
    found = complete(client, logprobs=3).choices[0]
    about = found.logprobs
    assert "".join(about.tokens) == found.text and len(about.token_logprobs) == 5
    assert all(value <= 0 for value in about.token_logprobs)
    assert all(3 <= len(top) <= 4 for top in about.top_logprobs)
    assert about.text_offset[0] == 0
    none_beside = complete(client, logprobs=0).choices[0].logprobs
    assert none_beside.tokens == about.tokens and none_beside.top_logprobs is None
    assert complete(client, logprobs=None).choices[0].logprobs is None


def test_log_probabilities_of_a_stream_are_those_of_the_whole(client: openai.OpenAI) -> None:
    whole = complete(client, logprobs=2).choices[0].logprobs
    parts = [chunk.choices[0].logprobs for chunk in complete(client, logprobs=2, stream=True)]
    assert [token for part in parts if part for token in part.tokens] == whole.tokens
    assert [offset for part in parts if part for offset in part.text_offset] == whole.text_offset


def test_an_ignored_end_and_banned_tokens(client: openai.OpenAI) -> None:
    asked = {"max_tokens": 12, "extra_body": {"ignore_eos": True}}
    assert complete(client, "The end.<|im_end|>", **asked).usage.completion_tokens == 12
    first = complete(client, max_tokens=1, logprobs=1)
    banned = client.post(  # by id, as the SDK types it
        "/completions",
        body={"model": MODEL, "prompt": COUNT, "max_tokens": 1, "temperature": 0, "bad_words": [" four"]},
        cast_to=object,
    )
    assert banned["choices"][0]["text"] != first.choices[0].text


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [999_999]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "x", "temperature": -1}, "temperature"),
        ({"prompt": "x", "top_p": 2}, "top_p"),
        ({"prompt": "x", "n": 0}, "n"),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "word " * 3000}, "prompt"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_by_name(client: openai.OpenAI, body: dict[str, object], named: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/completions", body={"model": MODEL, **body}, cast_to=object)
    assert named in (caught.value.param or "") or named in str(caught.value)
