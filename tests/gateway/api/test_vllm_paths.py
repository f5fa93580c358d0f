"""Paths of vLLM, Cohere and OpenAI that other endpoints answer too: tokenize, score, pooling, rerank, moderations."""

from __future__ import annotations

import base64
from collections.abc import Callable

import numpy as np
import openai
import pytest

from penstock.backends.embedder import Embedder
from penstock.backends.encoder import EncoderBackend
from penstock.config.encoders import EncoderConfig
from penstock.config.guardrails import GuardrailConfig
from penstock.routing.encoders import Encoders
from penstock.text import TextModel
from tests.gateway.conftest import Serving
from tests.gateway.moderation.test_moderation import EVIL, Endpoint, endpoint, rule

__all__ = ["endpoint"]
TEXTS = ["How do I reset my password?", "I forgot my password", "Bread needs flour"]


@pytest.fixture
def encoders(encoder_endpoint: str) -> Callable[..., Encoders]:
    def make(**options: object) -> Encoders:
        config = EncoderConfig(name="minilm", **options)  # type: ignore[arg-type]
        return Encoders([Embedder("minilm", "minilm", EncoderBackend(encoder_endpoint), wait_s=60)], [config])

    return make


async def test_tokenize_under_vllms_path(serving: Serving, text: TextModel) -> None:
    async with serving() as gateway:
        body = (await gateway.client.post("/tokenize", json={"prompt": "hé", "return_token_strs": True})).json()
        assert body["tokens"] == text.encode("hé") and body["count"] == len(body["tokens"]) == len(body["token_strs"])
        assert body["max_model_len"] == 512
        assert [text.token_id(spelling) for spelling in body["token_strs"]] == body["tokens"]
        back = await gateway.client.post("/detokenize", json={"tokens": body["tokens"]})
        assert back.json()["prompt"] == "hé"
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "add_special_tokens": False}
        reply = await gateway.client.post("/tokenize", json=chat)
        assert reply.status_code == 200 and reply.json()["token_strs"] is None


async def test_scores_and_pooled_vectors(serving: Serving, encoders: Callable[..., Encoders]) -> None:
    async with serving(encoders=encoders(max_texts=3)) as gateway:
        post = gateway.client.post
        pooled = (await post("/pooling", json={"model": "minilm", "input": TEXTS})).json()
        rows = np.array([item["data"] for item in pooled["data"]])
        assert rows.shape == (3, 384) and pooled["data"][0]["object"] == "pooling"
        tokens = {"input": TEXTS[0], "task": "token_embed", "encoding_format": "base64"}
        by_token = (await post("/pooling", json=tokens)).json()
        width = np.frombuffer(base64.b64decode(by_token["data"][0]["data"]), np.float32).reshape(-1, 384)
        assert len(width) == by_token["usage"]["prompt_tokens"] == 9
        many = (await post("/score", json={"text_1": TEXTS[0], "text_2": TEXTS[1:]})).json()
        assert [item["index"] for item in many["data"]] == [0, 1]
        assert [item["score"] for item in many["data"]] == pytest.approx(rows[1:] @ rows[0], abs=1e-4)
        pairs = {"queries": TEXTS[:2], "documents": TEXTS[1:], "model": "minilm"}
        scores = [item["score"] for item in (await post("/v1/score", json=pairs)).json()["data"]]
        assert scores == pytest.approx([rows[0] @ rows[1], rows[1] @ rows[2]], abs=1e-4)
        for wrong in (
            {"text_1": TEXTS[:2], "text_2": TEXTS},
            {"text_1": "a"},
            {"text_1": "a", "text_2": ["b"] * 4},
            {"text_1": "word " * 300, "text_2": "a"},
            {"text_1": "a", "queries": "a", "text_2": "b"},
        ):
            assert (await post("/score", json=wrong)).status_code == 400, wrong
        ranked = await post("/v2/rerank", json={"model": "minilm", "query": TEXTS[0], "documents": TEXTS, "top_n": 0})
        assert len(ranked.json()["results"]) == 3
        cut = {"model": "minilm", "query": TEXTS[0], "documents": ["flour I forgot my password"], "top_n": 1}
        long = (await post("/rerank", json=cut)).json()["results"][0]["relevance_score"]
        short = (await post("/rerank", json={**cut, "max_tokens_per_doc": 1, "return_documents": True})).json()
        assert short["results"][0]["relevance_score"] < long
        assert short["results"][0]["document"]["text"] == "flour I forgot my password"


async def test_moderations(serving: Serving, endpoint: Endpoint) -> None:
    words = GuardrailConfig(name="secrets", words=("hunter2",), action="redact")
    others = rule(name="theirs", url=endpoint.url, tenants=("someone",))
    async with serving(guardrails=(rule(url=endpoint.url, threshold=0.7), words, others)) as gateway:
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{gateway.port}/v1", api_key="none", max_retries=0)
        found = await client.moderations.create(input=["fine", f"some {EVIL}", "my hunter2"])
        assert [result.flagged for result in found.results] == [False, True, False], "a redacted word is not refused"
        reply = await gateway.client.post("/v1/moderations", json={"input": "my hunter2", "model": "secrets"})
        (result,) = reply.json()["results"]
        assert result["categories"] == {"secrets": True} and result["category_scores"] == {"secrets": 1.0}
        parts = [{"type": "text", "text": "some"}, {"type": "text", "text": EVIL}]
        (result,) = (await gateway.client.post("/v1/moderations", json={"input": parts})).json()["results"]
        assert result["flagged"] and result["category_scores"]["harm"] == 0.8
        image = [{"type": "image_url", "image_url": {"url": "data:"}}]
        assert (await gateway.client.post("/v1/moderations", json={"input": image})).status_code == 400
        unknown = await gateway.client.post("/v1/moderations", json={"input": "x", "model": "theirs"})
        assert unknown.status_code == 404
        endpoint.status = 500
        assert (await gateway.client.post("/v1/moderations", json={"input": "x"})).status_code == 503
        await client.close()
    async with serving() as gateway:
        assert (await gateway.client.post("/v1/moderations", json={"input": "x"})).status_code == 404
