"""Vectors and scores from models that other servers run (R-RT-9)."""

from __future__ import annotations

import base64
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.backends.remote.server import RemoteServer
from penstock.backends.remote.upstream import Upstream
from penstock.config.cache import CacheConfig
from penstock.config.guardrails import GuardrailConfig
from penstock.config.knowledge import KnowledgeConfig
from penstock.config.remotes import RemoteConfig
from penstock.identity.labels import demand_of
from penstock.routing.remote_embedder import RemoteEmbedder
from penstock.routing.remotes import RemoteModel
from penstock.text import TextModel
from tests.gateway.conftest import Running, Serving
from tests.wire_server import WireServer, vector, wire_server


@asynccontextmanager
async def encoders(serving: Serving, text: TextModel | None = None, **settings: Any) -> AsyncIterator[Any]:
    async with AsyncExitStack() as stack:
        wire = await stack.enter_async_context(wire_server())
        remotes = []
        for name, kind in (("vectors", "embedding"), ("ranks", "rerank")):
            remote = RemoteModel(name, [RemoteServer("0", Upstream(wire.url, "m"))], aliases=(f"my-{name}",))
            remote.kind, remote.texts_per_request, remote.text = kind, 3, text
            remotes.append(remote)
        priced = (RemoteConfig(name="vectors", model="m", input_price=2.0),)
        front = await stack.enter_async_context(serving(others=remotes, remotes=priced, **settings))
        yield front, wire


async def post(front: Running, path: str, **body: Any) -> httpx.Response:
    return await front.client.post(path, json=body)


async def test_vectors_come_in_batches_in_order_and_both_formats(serving: Serving) -> None:
    async with encoders(serving) as (front, wire):
        texts = [f"text number {n}" for n in range(8)]
        reply = await post(front, "/v1/embeddings", model="vectors", input=texts)
        data = reply.json()["data"]
        assert reply.status_code == 200 and reply.headers["x-penstock-model"] == "vectors"
        assert [entry["index"] for entry in data] == list(range(8))
        for text, entry in zip(texts, data, strict=True):
            assert entry["embedding"] == pytest.approx(vector(text, 4), abs=1e-6)
        assert [len(body["input"]) for _, body in wire.asked] == [3, 3, 2]
        assert reply.json()["usage"] == {"prompt_tokens": 40, "total_tokens": 40}, "what the server counted"
        packed = await post(front, "/v1/embeddings", model="my-vectors", input="one", encoding_format="base64")
        found = struct.unpack("<4f", base64.b64decode(packed.json()["data"][0]["embedding"]))
        assert list(found) == pytest.approx(vector("one", 4), abs=1e-6)
        shorter = await post(front, "/v1/embeddings", model="vectors", input="one", dimensions=2)
        assert len(shorter.json()["data"][0]["embedding"]) == 2 and wire.last["dimensions"] == 2
        ollama = await post(front, "/api/embed", model="vectors", input=["a", "b"])
        assert len(ollama.json()["embeddings"]) == 2


async def test_documents_are_ranked_by_scores_or_by_vectors(serving: Serving) -> None:
    documents = ["red apples", "the sky is blue", "blue sky"]
    async with encoders(serving) as (front, _wire):
        for model in ("ranks", "vectors"):
            reply = await post(
                front, "/v1/rerank", model=model, query="blue sky", documents=documents, top_n=2, return_documents=True
            )
            results = reply.json()["results"]
            assert [results[0]["document"]["text"], len(results)] == ["blue sky", 2], model
            scores = (await post(front, "/v1/score", model=model, text_1="blue sky", text_2=documents)).json()["data"]
            assert max(scores, key=lambda entry: entry["score"])["index"] == 2
        pooled = await post(front, "/pooling", model="vectors", input=["a"])
        assert len(pooled.json()["data"][0]["data"]) == 4


async def test_usage_is_charged_and_limits_and_rules_hold(serving: Serving, tmp_path: Path) -> None:
    rule = GuardrailConfig(name="no secrets", stage="input", words=("secret",))
    store = f"sqlite:///{tmp_path}/store.db"
    async with encoders(serving, store_url=store, guardrails=(rule,)) as (front, wire):
        assert (await post(front, "/v1/embeddings", model="vectors", input=["a", "b"])).status_code == 200
        (row,) = (await front.client.get("/v1/usage?by=model")).json()["data"]
        assert (row["model"], row["prompt_tokens"], float(row["cost"])) == ("vectors", 10, pytest.approx(10 * 2 / 1e6))
        refused = await post(front, "/v1/embeddings", model="vectors", input="my secret")
        assert refused.status_code == 400 and len(wire.asked) == 1, "it was not sent"


async def test_what_cannot_be_is_said(serving: Serving, text: TextModel) -> None:
    async with encoders(serving) as (front, wire):
        for body, param in (
            ({"input": [1, 2]}, "input"),
            ({"input": ""}, "input"),
            ({"input": "a", "truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
            ({"input": ["a"] * 2049}, "input"),
        ):
            refusal = await post(front, "/v1/embeddings", model="vectors", **body)
            assert refusal.status_code == 400 and refusal.json()["error"]["param"] == param
        assert (await post(front, "/v1/embeddings", model="ranks", input="a")).status_code == 400
        chat = await front.chat(model="vectors")
        assert chat.status_code == 400 and "/v1/embeddings" in chat.json()["error"]["message"]
        listed = {model["id"]: model for model in (await front.client.get("/v1/models")).json()["data"]}
        assert listed["vectors"]["capabilities"] == {"embeddings": True, "rerank": True}
        wire.dimensions = 3
        assert (await post(front, "/v1/embeddings", model="vectors", input="a")).status_code == 200
        wire.dimensions = 5
        changed = await post(front, "/v1/embeddings", model="vectors", input="a")
        assert changed.status_code == 503, "vectors of another length are of another model"
    async with encoders(serving, text) as (front, wire):
        ids = await post(front, "/v1/embeddings", model="vectors", input=text.encode("hi", special=False))
        assert ids.status_code == 200 and wire.last["input"] == ["hi"]
        cut = await post(front, "/v1/embeddings", model="vectors", input="hello", truncate_prompt_tokens=2)
        assert cut.status_code == 200 and wire.last["input"] == ["he"]


async def test_a_remote_encoder_compares_questions_of_the_semantic_cache(serving: Serving) -> None:
    cache = CacheConfig(semantic="on", encoder="vectors", threshold=0.9)
    async with encoders(serving, cache=cache) as (front, _wire):
        ask = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
        assert (await front.chat(**ask)).headers["x-penstock-cache"] == "miss"
        await front.parts.background.close()
        again = {**ask, "messages": [{"role": "user", "content": "what is the capital of France"}]}
        assert (await front.chat(**again)).headers["x-penstock-cache"] == "semantic"


async def test_a_server_that_is_away(serving: Serving) -> None:
    async with encoders(serving) as (front, wire):
        assert isinstance(wire, WireServer)
        front.parts.registry.remotes["vectors"].members[0].server.upstream = Upstream("http://127.0.0.1:1/v1", "m")
        away = front.parts.registry.remotes["vectors"].members[0].server
        away.dialect.upstream = Upstream("http://127.0.0.1:1/v1", "m")
        reply = await post(front, "/v1/embeddings", model="vectors", input="a")
        assert reply.status_code == 503 and "127.0.0.1" not in reply.text


async def test_collections_are_embedded_and_reranked_elsewhere(serving: Serving, tmp_path: Path) -> None:
    from tests.gateway.rag.test_collections import filled

    for reranker in ("", "ranks"):
        settings = {
            "store_url": f"sqlite:///{tmp_path}/{reranker}x.db",
            "knowledge": KnowledgeConfig(encoder="vectors", reranker=reranker, url=f"sqlite:///{tmp_path}/k{reranker}"),
        }
        async with encoders(serving, **settings) as (front, wire):
            wire.dimensions = 64
            id = await filled(front)
            found = (await front.client.get(f"/v1/collections/{id}")).json()
            assert (found["embedding_model"], found["dimensions"]) == ("vectors", 64), found
            assert found["documents"]["ready"] == 1, found
            body = {"query": "weeks of paid leave for parents"}
            hits = (await front.client.post(f"/v1/collections/{id}/search", json=body)).json()["data"]
            assert "twelve weeks" in hits[0]["text"], hits
            assert any(path == "/rerank" for path, _ in wire.asked) is bool(reranker)
            answer = await front.chat(messages=[{"role": "user", "content": body["query"]}], rag={"collection": id})
            assert answer.status_code in (200, 400), answer.text


async def test_a_demand_holds_for_every_server_where_nobody_says_for_whom_it_asks() -> None:
    servers = [RemoteServer(str(number), Upstream("http://127.0.0.1:1/v1", "m")) for number in range(2)]
    spread = RemoteEmbedder(RemoteModel("vectors", servers, regions=("eu", "us")))
    demand = demand_of([("region", "eu")], "test")
    assert spread.unmet(demand) and not spread.model.unmet(demand)
    alike = RemoteEmbedder(RemoteModel("vectors", servers, regions=("eu", "eu")))
    assert not alike.unmet(demand)
