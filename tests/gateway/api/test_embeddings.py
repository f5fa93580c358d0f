"""R-API-5: /v1/embeddings and /v1/rerank with the real default encoder: the wire, the limits, the accounts."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest

from penstock.backends.embedder import Embedder
from penstock.backends.encoder import EncoderBackend
from penstock.config.encoders import EncoderConfig
from penstock.config.schema import LimitConfig, PriceConfig
from penstock.metering.request_log import RequestLog
from penstock.routing.encoders import Encoders
from tests.gateway.conftest import Serving, eventually

TEXTS = ["How do I reset my password?", "I forgot my password", "Bread needs flour"]


@pytest.fixture
def encoders(encoder_endpoint: str) -> Callable[..., Encoders]:
    def make(**options: object) -> Encoders:
        config = EncoderConfig(name="minilm", aliases=("embed",), **options)  # type: ignore[arg-type]
        return Encoders([Embedder("minilm", "minilm", EncoderBackend(encoder_endpoint), wait_s=60)], [config])

    return make


def refused(reply: httpx.Response, param: str | None, *words: str) -> None:
    error = reply.json()["error"]
    assert reply.status_code == 400, reply.text
    assert error["param"] == param
    assert all(word in error["message"] for word in words), error


async def test_the_openai_sdk_gets_vectors_in_every_form(serving: Serving, encoders: Callable[..., Encoders]) -> None:
    async with serving(encoders=encoders()) as running:
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{running.port}/v1", api_key="none", max_retries=0)
        default = await client.embeddings.create(model="minilm", input=TEXTS)  # base64 on the wire
        plain = await client.embeddings.create(model="embed", input=TEXTS, encoding_format="float", dimensions=384)
        rows = np.array([item.embedding for item in default.data])
        assert [item.index for item in default.data] == [0, 1, 2]
        assert np.allclose(rows, [item.embedding for item in plain.data], atol=1e-6)
        assert rows[0] @ rows[1] > 0.6 > 0.2 > rows[0] @ rows[2]
        assert default.model == plain.model == "minilm"
        assert default.usage.prompt_tokens == default.usage.total_tokens == 9 + 6 + 5
        one = await client.embeddings.create(model="minilm", input=TEXTS[0])
        ids = (await running.parts.encoders.find("minilm").tokenize(TEXTS[:1]))[0]
        marked = await client.embeddings.create(model="minilm", input=[ids])
        bare = await client.embeddings.create(model="minilm", input=ids[1:-1])
        for found in (one, marked, bare):
            assert np.allclose(found.data[0].embedding, rows[0], atol=1e-5)
            assert found.usage.prompt_tokens == 9
        await client.close()
        latest = (await running.client.get("/v1/traces?limit=1")).json()["data"][0]
        assert latest["route"] == "/v1/embeddings"
        assert [phase["name"] for phase in latest["phases"]] == ["authenticate", "receive", "prepare", "encode"]


async def test_encoders_are_listed_as_the_api_document_says(
    serving: Serving, encoders: Callable[..., Encoders]
) -> None:
    async with serving(encoders=encoders()) as running:
        listed = (await running.client.get("/v1/models")).json()["data"]
        paths = (await running.client.get("/openapi.json")).json()["paths"]
        answer = paths["/v1/models/{model}"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
        assert {"tiny", "minilm"} <= {model["id"] for model in listed}
        assert all(set(answer["required"]) <= model.keys() for model in listed), listed
        kinds = paths["/v1/files/{file}/content"]["get"]["responses"]["200"]["content"]
        assert kinds.keys() == {"application/jsonl", "application/octet-stream"}, "batches, and documents"


async def test_what_cannot_be_embedded_is_refused(serving: Serving, encoders: Callable[..., Encoders]) -> None:
    async with serving(encoders=encoders(max_texts=3)) as running:

        async def embed(**body: object) -> httpx.Response:
            return await running.client.post("/v1/embeddings", json={"model": "minilm", **body})

        refused(await embed(input="word " * 300), "input", "256 tokens", "302 tokens")
        refused(await embed(input=["a", ""]), "input", "input[1]", "empty")
        refused(await embed(input=[]), "input", "empty")
        refused(await embed(input=["a", 3]), "input", "list of strings")
        refused(await embed(input=[[30522]]), "input", "30522")
        refused(await embed(input=["a"] * 4), "input", "at most 3")
        refused(await embed(input="a", dimensions=100), "dimensions", "384")
        refused(await embed(input="a", encoding_format="int8"), "encoding_format")
        refused(await embed(input="a", truncate_prompt_tokens=1), "truncate_prompt_tokens", "from 3 to 256")
        refused(await embed(input="a", normalize=False), "normalize", "not supported")
        assert (await embed(input="a", colour="red")).headers["x-penstock-ignored"] == "colour"
        unknown = await running.client.post("/v1/embeddings", json={"model": "tiny", "input": "a"})
        message = "There is no model `tiny` for embeddings, scores or ranking here. Available: `embed`, `minilm`."
        assert unknown.status_code == 404 and unknown.json()["error"]["message"] == message
        cut = await embed(input="word " * 300, truncate_prompt_tokens=-1)
        assert cut.json()["usage"]["prompt_tokens"] == 256


async def test_rerank_puts_the_answer_first(serving: Serving, encoders: Callable[..., Encoders]) -> None:
    documents = ["Bananas are yellow.", {"text": "Paris is the capital of France."}, "France borders Spain.", ""]
    body = {"model": "minilm", "query": "What is the capital of France?", "documents": documents}
    async with serving(encoders=encoders()) as running:
        reply = await running.client.post("/v1/rerank", json={**body, "top_n": 2, "return_documents": True})
        found = reply.json()
        assert [result["index"] for result in found["results"]] == [1, 2]
        assert found["results"][0]["document"] == {"text": "Paris is the capital of France."}
        assert 1 >= found["results"][0]["relevance_score"] > found["results"][1]["relevance_score"]
        assert found["usage"]["total_tokens"] == 9 + 6 + 9 + 6 + 2
        whole = (await running.client.post("/v1/rerank", json=body)).json()["results"]
        assert [result["index"] for result in whole] == [1, 2, 0, 3]
        assert "document" not in whole[0]
        refused(await running.client.post("/v1/rerank", json={**body, "query": " "}), "query", "empty")
        refused(await running.client.post("/v1/rerank", json={**body, "documents": []}), "documents", "empty")
        refused(await running.client.post("/v1/rerank", json={**body, "query": "w " * 300}), "query", "256")


async def test_tokens_are_limited_charged_and_logged(
    serving: Serving, encoders: Callable[..., Encoders], tmp_path: Path
) -> None:
    settings = {
        "store_url": f"sqlite:///{tmp_path}/store.db",
        "prices": (PriceConfig(model="minilm", input_price=2.0),),
        "limits": (LimitConfig(per="tenant", tokens_per_minute=30),),
    }
    async with serving(encoders=encoders(), **settings) as running:
        body = {"model": "minilm", "input": TEXTS}
        first = await running.client.post("/v1/embeddings", json=body, headers={"x-feature": "search"})
        assert first.status_code == 200
        assert first.headers["x-ratelimit-remaining-tokens"] == "10"
        assert first.headers["x-penstock-model"] == "minilm"
        second = await running.client.post("/v1/embeddings", json=body)
        assert second.status_code == 429
        assert second.headers["x-penstock-reason"] == "rate_limit"
        usage = (await running.client.get("/v1/usage?by=model,feature")).json()["data"]
        assert [(row["model"], row["feature"], row["prompt_tokens"]) for row in usage] == [("minilm", "search", 20)]
        assert usage[0]["cost"] == "0.00004"
        assert await running.metric('penstock_encoder_tokens_total{encoder="minilm"}') == 20
        assert await running.metric('penstock_encoder_up{encoder="minilm"}') == 1
        assert isinstance(running.parts.request_log, RequestLog)
        records = []
        for _ in range(1200):
            records = (await running.client.get("/v1/admin/requests")).json()["data"]
            if any(record["route"] == "/v1/embeddings" for record in records):
                break
            await asyncio.sleep(0.05)
        logged = [record for record in records if record["finish_reason"] == "stop"]
        assert logged[0]["prompt_tokens"] == 20 and logged[0]["model_version"] == "minilm"


async def test_models_lists_encoders(serving: Serving, encoders: Callable[..., Encoders]) -> None:
    async with serving(encoders=encoders()) as running:
        listed = (await running.client.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == ["tiny", "minilm"]
        assert listed[1]["ready"] is False and listed[1]["capabilities"] == {"embeddings": True, "rerank": True}
        await running.client.post("/v1/embeddings", json={"model": "minilm", "input": "a"})
        one = (await running.client.get("/v1/models/embed")).json()
        assert one["ready"] is True and one["dimensions"] == 384 and one["context_window"] == 256
        assert (await running.client.get("/health/ready")).json()["models"].keys() == {"tiny"}


async def test_a_client_that_leaves_is_not_encoded_for(serving: Serving, encoders: Callable[..., Encoders]) -> None:
    async with serving(encoders=encoders()) as running:
        backend = running.parts.encoders.find("minilm").backend
        await running.client.post("/v1/embeddings", json={"model": "minilm", "input": "a"})
        texts = ["some words to keep it busy " * 30] * 200
        leaving = asyncio.create_task(running.client.post("/v1/embeddings", json={"model": "minilm", "input": texts}))
        await eventually(lambda: backend.in_flight == 1)
        leaving.cancel()
        await eventually(lambda: backend.in_flight == 0)
        await eventually(lambda: backend.load.waiting == 0)
        await eventually(lambda: running.parts.metrics.disconnects.value == 1)


async def test_a_vector_on_the_wire_is_little_endian_float32(
    serving: Serving, encoders: Callable[..., Encoders]
) -> None:
    async with serving(encoders=encoders()) as running:
        body = {"model": "minilm", "input": "a", "encoding_format": "base64"}
        written = (await running.client.post("/v1/embeddings", json=body)).json()["data"][0]["embedding"]
        vector = np.frombuffer(base64.b64decode(written), "<f4")
        assert vector.shape == (384,) and abs(np.linalg.norm(vector) - 1) < 1e-5


async def test_a_batch_of_embeddings_is_answered_and_paid_for_at_half_the_price(
    serving: Serving, encoders: Callable[..., Encoders], tmp_path: Path
) -> None:
    prices = (PriceConfig(model="minilm", input_price=1.0),)
    body = {"model": "minilm", "input": TEXTS}
    line = {"custom_id": "x", "method": "POST", "url": "/v1/embeddings", "body": body}
    async with serving(encoders=encoders(), store_url=f"sqlite:///{tmp_path / 'x.db'}", prices=prices) as running:
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{running.port}/v1", api_key="none", max_retries=0)
        file = await client.files.create(file=("x", json.dumps(line).encode()), purpose="batch")
        made = await client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
        for _ in range(3000):
            batch = await client.batches.retrieve(made.id)
            if batch.status == "completed":
                break
            await asyncio.sleep(0.02)
        assert batch.output_file_id is not None, batch
        answer = json.loads((await client.files.content(batch.output_file_id)).text)["response"]["body"]
        assert len(answer["data"]) == 3
        (used,) = (await running.client.get("/v1/usage")).json()["data"]
        assert (used["requests"], used["prompt_tokens"], float(used["cost"])) == (1, 20, 20 * 0.5 / 1e6)
        await client.close()
