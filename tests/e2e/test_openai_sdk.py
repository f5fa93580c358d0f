"""The official SDK, unchanged, against the real server and the real default model."""

from __future__ import annotations

import math

import openai
import pytest

from tests.e2e.conftest import MODEL, Server


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300, max_retries=0)


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_it_knows_the_capital_of_france(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model=MODEL, messages=ask("What is the capital of France?"), temperature=0, max_tokens=20
    )
    assert "Paris" in (reply.choices[0].message.content or "")
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply.system_fingerprint


def test_a_stream_says_the_same_and_reports_usage(client: openai.OpenAI) -> None:
    messages = ask("What is the capital of France?")
    whole = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=20)
    stream = client.chat.completions.create(
        model=MODEL,
        messages=messages,
        temperature=0,
        max_tokens=20,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, usage, finish = "", None, None
    for chunk in stream:
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
            finish = chunk.choices[0].finish_reason or finish
        usage = chunk.usage or usage
    assert text == whole.choices[0].message.content
    assert finish == "stop"
    assert usage is not None and whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_completions_from_text_and_from_token_ids(client: openai.OpenAI, server: Server) -> None:
    import httpx

    prompt = "One, two, three,"  # what follows is no close call: batches round differently in the last bits
    from_text = client.completions.create(model=MODEL, prompt=prompt, max_tokens=6, temperature=0)
    tokens = httpx.post(f"{server.url}/v1/tokenize", json={"model": MODEL, "prompt": prompt}).json()["tokens"]
    from_ids = client.completions.create(model=MODEL, prompt=tokens, max_tokens=6, temperature=0)
    assert from_text.choices[0].text == from_ids.choices[0].text
    assert from_text.choices[0].text.startswith(" four")
    both = client.completions.create(model=MODEL, prompt=[prompt, "The sky is"], max_tokens=6, temperature=0)
    assert both.choices[0].text == from_text.choices[0].text
    assert both.choices[1].text.startswith(" a")


def test_logprobs_of_chat(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model=MODEL, messages=ask("Say hi."), temperature=0, max_tokens=4, logprobs=True, top_logprobs=3
    )
    choice = reply.choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content
    for entry in choice.logprobs.content:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        # Greedy takes the most likely token.
        assert entry.top_logprobs[0].token == entry.token
        assert entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob
        assert bytes(entry.bytes or []).decode() == entry.token


def test_echo_scores_the_prompt(client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model=MODEL, prompt="The capital of France is Paris", echo=True, logprobs=1, max_tokens=0
    )
    choice = reply.choices[0]
    assert choice.text == "The capital of France is Paris"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens[-1] == " Paris"
    assert choice.logprobs.token_logprobs[0] is None
    # The model expects it.
    assert math.exp(choice.logprobs.token_logprobs[-1]) > 0.2
    offsets = choice.logprobs.text_offset
    assert [choice.text[a:b] for a, b in zip(offsets, [*offsets[1:], None], strict=True)] == choice.logprobs.tokens


def test_two_choices_differ_and_share_the_prompt(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model=MODEL, messages=ask("Invent a name for a cat."), n=2, temperature=1.5, max_tokens=12, seed=3
    )
    first, second = (choice.message.content for choice in reply.choices)
    assert first != second
    assert reply.usage is not None
    assert reply.usage.prompt_tokens < 60


@pytest.mark.slow
def test_the_same_seed_gives_the_same_text_alone_and_in_company(client: openai.OpenAI) -> None:
    def story(seed: int, n: int = 1) -> list[str | None]:
        reply = client.chat.completions.create(
            model=MODEL, messages=ask("Tell a story."), temperature=1.2, top_p=0.95, max_tokens=16, seed=seed, n=n
        )
        return [choice.message.content for choice in reply.choices]

    alone = story(11)
    assert story(11) == alone
    assert story(12) != alone
    assert story(10, n=3)[1] == alone[0]


def test_stop_strings_never_leak(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=ask("Count: one, two, three, four, five. Repeat that."),
        temperature=0,
        max_tokens=40,
        stop=["two", "2"],
        stream=True,
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert "two" not in text and "2" not in text and not text.endswith("tw")
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_shared_prefix_is_cached(client: openai.OpenAI) -> None:
    long = "The quick brown fox jumps over the lazy dog. " * 30
    usages = []
    for question in ("Who jumps?", "Who is lazy?"):
        reply = client.chat.completions.create(model=MODEL, messages=ask(long + question), max_tokens=1)
        assert reply.usage is not None and reply.usage.prompt_tokens_details is not None
        usages.append(reply.usage)
    assert usages[0].prompt_tokens > 250
    assert (usages[1].prompt_tokens_details.cached_tokens or 0) >= 240  # type: ignore[union-attr]


def test_models(client: openai.OpenAI) -> None:
    model, encoder = client.models.list().data
    assert model.id == MODEL
    assert encoder.id == "minilm"
    assert client.models.retrieve(MODEL).id == MODEL
    assert model.model_extra is not None
    assert model.model_extra["context_window"] == 2048


def test_errors_are_the_classes_people_catch(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-9", messages=ask("hi"))
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=ask("hi"), temperature=9)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model=MODEL, messages=ask("word " * 3000), stream=True)
    assert long.value.code == "context_length_exceeded"
    assert "2048" in long.value.message
    with pytest.raises(openai.BadRequestError) as tools:
        client.chat.completions.create(
            model=MODEL,
            messages=ask("hi"),
            tools=[{"type": "function", "function": {"name": "not a name", "parameters": {}}}],
        )
    assert tools.value.param is not None and tools.value.param.startswith("tools")
    assert tools.value.request_id
    with pytest.raises(openai.NotFoundError):
        client.get("/nothing", cast_to=object)


async def test_the_asynchronous_client_can_leave_early(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=ask("Write a very long story."), stream=True, max_tokens=500
        )
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                break
        await stream.close()


def dot(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def test_embeddings_from_an_encoder_that_starts_when_it_is_asked_for(server: Server, client: openai.OpenAI) -> None:
    listed = {model.id: model for model in client.models.list()}
    assert listed["minilm"].capabilities["embeddings"]  # type: ignore[attr-defined]
    texts = ["How do I reset my password?", "I forgot my password", "Bread needs flour"]
    found = client.embeddings.create(model="minilm", input=texts)
    a, b, c = (item.embedding for item in found.data)
    assert dot(a, b) > 0.6 > 0.2 > dot(a, c)
    assert found.usage.prompt_tokens == 20
    assert len(server.children("minilm")) == 1


def test_answers_are_given_again_when_the_client_asks_for_it(server: Server, client: openai.OpenAI) -> None:
    client.embeddings.create(model="minilm", input="start the encoder")

    def asked(text: str, wish: str) -> tuple[str | None, str | None]:
        raw = client.chat.completions.with_raw_response.create(
            model=MODEL, messages=ask(text), temperature=0, max_tokens=16, extra_headers={"x-penstock-cache": wish}
        )
        return raw.headers.get("x-penstock-cache"), raw.parse().choices[0].message.content

    source, first = asked("What is the capital of Portugal?", "semantic")
    assert source == "miss"
    assert asked("What is the capital of Portugal?", "exact") == ("exact", first)
    assert asked("Can you tell me the capital of Portugal?", "semantic") == ("semantic", first)
    assert asked("What is the capital of Hungary?", "semantic")[0] == "miss"
    assert server.metric("penstock_cache_saved_tokens_total") > 0
