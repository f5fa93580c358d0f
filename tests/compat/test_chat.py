"""Chat completions: shapes of answers and streams, log-probabilities, bias, templates, company."""

from __future__ import annotations

import concurrent.futures
from typing import Any

import httpx
import openai
import pytest

from tests.compat.conftest import MODEL, user

FRANCE = user("What is the capital of France?")


def chat(client: openai.OpenAI, messages: Any = FRANCE, **more: Any) -> Any:
    asked = {"max_completion_tokens": 6, "temperature": 0, **more}
    return client.chat.completions.create(model=MODEL, messages=messages, **asked)


def test_one_answer(client: openai.OpenAI) -> None:
    answer = chat(client, [{"role": "system", "content": "Be brief."}, *FRANCE])
    (choice,) = answer.choices
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion" and answer.model == MODEL
    assert answer.system_fingerprint and answer.created > 1_600_000_000
    assert choice.index == 0 and choice.message.role == "assistant" and "Paris" in choice.message.content
    assert choice.message.tool_calls is None and choice.message.refusal is None and choice.logprobs is None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_second_turn(client: openai.OpenAI) -> None:
    first = chat(client).choices[0].message
    second = chat(client, [*FRANCE, first, *user("And of Italy?")])
    assert second.choices[0].message.content
    assert second.usage.prompt_tokens > chat(client).usage.prompt_tokens


def test_content_in_parts_and_under_an_alias(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "What is the capital"}, {"type": "text", "text": " of France?"}]
    answer = chat(client, [{"role": "user", "content": parts}])
    assert answer.choices[0].message.content == chat(client).choices[0].message.content
    by_alias = client.chat.completions.create(model="default", messages=FRANCE, max_tokens=6, temperature=0)
    assert by_alias.choices[0].message.content == chat(client).choices[0].message.content


def test_the_shape_of_a_stream(client: openai.OpenAI) -> None:
    whole = chat(client)
    first, *rest = chat(client, stream=True)
    assert first.choices[0].delta.role == "assistant" and not first.choices[0].delta.content
    assert all(chunk.choices[0].delta.role is None for chunk in rest)
    assert len({(chunk.id, chunk.model, chunk.created) for chunk in (first, *rest)}) == 1
    assert all(chunk.object == "chat.completion.chunk" and chunk.usage is None for chunk in rest)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in rest) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in rest[:-1]] == [None] * (len(rest) - 1)
    assert rest[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert not rest[-1].choices[0].delta.content


def test_usage_at_the_end_of_a_stream_or_with_every_chunk(client: openai.OpenAI) -> None:
    *chunks, last = chat(client, stream=True, stream_options={"include_usage": True})
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == [] and last.usage == chat(client).usage
    often = {"include_usage": True, "continuous_usage_stats": True}
    counts = [chunk.usage.completion_tokens for chunk in chat(client, stream=True, stream_options=often)]
    assert counts == sorted(counts) and counts[-1] == last.usage.completion_tokens


def test_log_probabilities(client: openai.OpenAI) -> None:
    choice = chat(client, logprobs=True, top_logprobs=5).choices[0]
    assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content
    for entry in choice.logprobs.content:
        assert entry.logprob <= 0 and bytes(entry.bytes).decode() == entry.token
        assert len(entry.top_logprobs) == 5
        assert entry.top_logprobs[0].token == entry.token  # greedy
    none_beside = chat(client, logprobs=True, top_logprobs=0).choices[0]
    assert all(entry.top_logprobs == [] for entry in none_beside.logprobs.content)
    assert chat(client, logprobs=False).choices[0].logprobs is None


def test_log_probabilities_of_a_stream_are_those_of_the_whole(client: openai.OpenAI) -> None:
    asked = {"logprobs": True, "top_logprobs": 2}
    whole = chat(client, **asked).choices[0].logprobs.content
    streamed = [
        entry
        for chunk in chat(client, stream=True, **asked)
        for entry in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else ())
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in whole]


def test_log_probabilities_of_the_prompt(client: openai.OpenAI) -> None:
    """vLLM's parameter: a list with a place for each token of the prompt, the first unknown."""
    asked = chat(client, extra_body={"prompt_logprobs": 1})
    assert asked.prompt_logprobs[0] is None
    assert len(asked.prompt_logprobs) == asked.usage.prompt_tokens
    assert all(1 <= len(entry) <= 2 for entry in asked.prompt_logprobs[1:])
    with pytest.raises(openai.BadRequestError):
        chat(client, extra_body={"prompt_logprobs": -1})


def test_a_bias_bans_a_token(client: openai.OpenAI, http: httpx.Client) -> None:
    choice = chat(client, logprobs=True).choices[0]
    first = choice.logprobs.content[0].token
    (id,) = http.post("/tokenize", json={"prompt": first, "add_special_tokens": False}).json()["tokens"]
    biased = chat(client, logprobs=True, logit_bias={str(id): -100})
    assert biased.choices[0].logprobs.content[0].token != first


def test_the_prompt_is_the_template_s(http: httpx.Client, client: openai.OpenAI) -> None:
    """What /tokenize says of messages is what the chat is billed for, and reads as the template wrote it."""
    about = http.post("/tokenize", json={"messages": FRANCE}).json()
    assert about["count"] == chat(client).usage.prompt_tokens
    text = http.post("/detokenize", json={"tokens": about["tokens"]}).json()["prompt"]
    assert text.endswith("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")


def test_an_answer_begun_by_the_client_goes_on(client: openai.OpenAI) -> None:
    begun = [*FRANCE, {"role": "assistant", "content": "The capital of France is"}]
    answer = chat(client, begun, extra_body={"continue_final_message": True, "add_generation_prompt": False})
    assert answer.choices[0].message.content.startswith(" Paris")


def test_ids_of_tokens_on_request(client: openai.OpenAI, http: httpx.Client) -> None:
    answer = chat(client, extra_body={"return_token_ids": True})
    assert len(answer.prompt_token_ids) == answer.usage.prompt_tokens
    said = http.post("/detokenize", json={"tokens": answer.choices[0].token_ids, "skip_special_tokens": True}).json()
    assert said["text"] == answer.choices[0].message.content


@pytest.mark.slow
def test_many_at_once_say_what_each_would_say_alone(client: openai.OpenAI) -> None:
    asked = [user(f"Count from {n} to {n + 4}.") for n in range(4)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda messages: chat(client, messages, seed=7).choices[0].message.content, asked))
    assert all(together)
    # Which of two equally likely tokens wins may depend on the batch, so not every answer needs to be the same.
    alone = [chat(client, messages, seed=7).choices[0].message.content for messages in asked]
    assert sum(a == b for a, b in zip(together, alone, strict=True)) >= 3


def test_a_stream_that_is_left_ends(client: openai.OpenAI, http: httpx.Client) -> None:
    def running() -> float:
        rows = http.get("/metrics").text.splitlines()
        return sum(float(row.rpartition(" ")[2]) for row in rows if row.startswith("vllm:num_requests_running{"))

    stream = chat(client, user("Tell a very long story."), stream=True, max_completion_tokens=900)
    next(iter(stream))
    stream.close()
    for _ in range(600):
        if running() == 0:
            return
        http.get("/health")
    raise AssertionError("the engine goes on with an answer that nobody reads")


@pytest.mark.parametrize(
    "messages",
    [
        None,
        "text",
        [],
        [123],
        [{}],
        [{"role": 123}],
        [{"role": "system", "content": 123}],
        [{"content": "hello"}],
        [{"role": "clown", "content": "hello"}],
        [{"role": "user", "content": [{"type": "sound"}]}],
    ],
    ids=repr,
)
def test_messages_that_are_none(http: httpx.Client, messages: Any) -> None:
    answer = http.post("/v1/chat/completions", json={"model": MODEL, "messages": messages})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["param"].startswith("messages")


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"temperature": "warm"}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"logit_bias": {"word": 1}}, "logit_bias"),
        ({"response_format": {"type": "sound"}}, "response_format"),
        ({"stop": [""]}, "stop"),
    ],
    ids=str,
)
def test_parameters_that_cannot_be(http: httpx.Client, more: dict[str, Any], named: str) -> None:
    for stream in (False, True):
        body = {"model": MODEL, "messages": FRANCE, "stream": stream, **more}
        if named == "stream_options" and stream:
            continue
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400, answer.text
        assert named in answer.json()["error"]["param"]
