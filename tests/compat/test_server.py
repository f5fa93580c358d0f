"""What is around generation: models, health, tokens, embeddings, reranking, errors."""

from __future__ import annotations

import base64
import struct

import httpx
import openai
import pytest

from tests.compat.conftest import ENCODER, MODEL, WINDOW, user

SENTENCES = [
    "A machine applies forces to do work.",
    "Learning is how animals acquire skills.",
    "Machine learning finds statistical rules in data.",
    "Paris est une grande ville.",
]
QUERY = "What is machine learning?"


def test_models(client: openai.OpenAI) -> None:
    models = {model.id: model for model in client.models.list()}
    assert models[MODEL].object == "model" and models[MODEL].owned_by and models[MODEL].created
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no-such-model")


def test_health_version_and_metrics(http: httpx.Client) -> None:
    assert http.get("/health").status_code == http.get("/ping").status_code == 200
    assert http.get("/version").json()["version"]
    assert http.head("/health").status_code == 200
    assert "vllm:num_requests_running" in http.get("/metrics").text
    assert http.get("/openapi.json").json()["openapi"].startswith("3.")


def test_text_to_tokens_and_back(http: httpx.Client) -> None:
    text = "<|im_start|>What is the capital of France? 媽 🤗"
    about = http.post("/tokenize", json={"model": MODEL, "prompt": text, "return_token_strs": True}).json()
    assert about["count"] == len(about["tokens"]) == len(about["token_strs"]) and about["max_model_len"] == WINDOW
    back = http.post("/detokenize", json={"model": MODEL, "tokens": about["tokens"]}).json()
    assert back["prompt"] == text
    info = http.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|im_end|>" and "im_start" in info["chat_template"]


def test_vectors_have_length_one_and_count_their_tokens(client: openai.OpenAI) -> None:
    one = client.embeddings.create(model=ENCODER, input=SENTENCES[0], encoding_format="float")
    many = client.embeddings.create(model=ENCODER, input=[SENTENCES[0], *SENTENCES], encoding_format="float")
    (vector,) = (entry.embedding for entry in one.data)
    assert len(vector) == 384 and abs(sum(x * x for x in vector) - 1) < 1e-3
    assert [entry.index for entry in many.data] == [0, 1, 2, 3, 4]
    assert many.data[0].embedding == pytest.approx(vector, abs=2e-3)
    assert one.usage.prompt_tokens == one.usage.total_tokens
    assert many.usage.prompt_tokens > one.usage.prompt_tokens * 3


def test_vectors_as_base64_are_the_same_numbers(http: httpx.Client) -> None:
    asked = {"model": ENCODER, "input": "water"}
    plain = http.post("/v1/embeddings", json=asked).json()["data"][0]["embedding"]
    coded = http.post("/v1/embeddings", json={**asked, "encoding_format": "base64"}).json()["data"][0]["embedding"]
    assert struct.unpack("<384f", base64.b64decode(coded)) == pytest.approx(plain, abs=1e-3)


@pytest.mark.parametrize("text", [[], "", [""], 12, {"content": "x"}, "word " * 20_000], ids=lambda x: str(x)[:20])
def test_what_has_no_vector(http: httpx.Client, text: object) -> None:
    answer = http.post("/v1/embeddings", json={"model": ENCODER, "input": text})
    assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("input")


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_in_the_order_of_their_relevance(http: httpx.Client, path: str) -> None:
    asked = {"model": ENCODER, "query": QUERY, "documents": SENTENCES}
    results = http.post(path, json=asked).json()["results"]
    assert results[0]["index"] == 2 and results[-1]["index"] == 3
    scores = [entry["relevance_score"] for entry in results]
    assert scores == sorted(scores, reverse=True)
    assert len(http.post(path, json={**asked, "top_n": 2}).json()["results"]) == 2
    assert len(http.post(path, json={**asked, "top_n": 99}).json()["results"]) == 4


@pytest.mark.parametrize("documents", [[], None, 123, [1, 2, 3]], ids=str)
def test_documents_that_are_none(http: httpx.Client, documents: object) -> None:
    answer = http.post("/rerank", json={"model": ENCODER, "query": QUERY, "documents": documents})
    assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("documents")


def test_the_score_of_pairs(http: httpx.Client) -> None:
    asked = {"model": ENCODER, "text_1": QUERY, "text_2": SENTENCES}
    data = http.post("/score", json=asked).json()["data"]
    assert [entry["index"] for entry in data] == [0, 1, 2, 3]
    assert max(data, key=lambda entry: entry["score"])["index"] == 2


def test_errors_have_the_shape_that_sdks_read(client: openai.OpenAI, http: httpx.Client) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="no-such-model", messages=user("x"))
    assert unknown.value.code == "model_not_found" and "no-such-model" in unknown.value.message
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model=MODEL, messages=user("word " * 2000))
    assert long.value.code == "context_length_exceeded"
    for answer in (
        http.post("/v1/chat/completions", content=b"{", headers={"content-type": "application/json"}),
        http.post("/v1/chat/completions", json=[1, 2]),
        http.post("/v1/chat/completions", json={"messages": user("x")}),
        http.get("/v1/no-such-path"),
        http.get("/v1/chat/completions"),
    ):
        assert answer.status_code in (400, 404, 405), answer.text
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert answer.headers["x-request-id"]


def test_what_is_not_known_is_named_and_does_not_stop_it(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "messages": user("x"), "max_tokens": 1, "extra_body": {"cache_prompt": True, "zebra": 1}}
    answer = client.chat.completions.with_raw_response.create(**asked)
    assert {"zebra"} <= {name.strip() for name in answer.headers["x-penstock-ignored"].split(",")}
    assert answer.parse().choices
