"""A cross-encoder that is configured: at /v1/rerank, in searches and in answers, the order is the reference's."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
import transformers

from penstock.backends.embedder import Embedder
from penstock.backends.encoder import EncoderBackend
from penstock.config.knowledge import KnowledgeConfig
from penstock.config.schema import EncoderConfig
from penstock.engine.encoder.config import EncoderEngineConfig
from penstock.engine.encoder.core import EncoderEngine
from penstock.routing.encoders import Encoders
from penstock.text import TextModel
from tests.engine_host.client import serving as engine_serving
from tests.gateway.conftest import Running, Serving
from tests.gateway.rag.test_collections import filled, says

Scores = Callable[[str, Sequence[str]], list[float]]
QUESTION = "When does the office open?"


@pytest.fixture(scope="module")
def cross_encoder(encoder_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str, Scores]]:
    """A folder with a small cross-encoder of random weights, where its engine listens, and the reference's scores."""
    folder = tmp_path_factory.mktemp("cross")
    torch.manual_seed(3)
    shape = transformers.BertConfig(
        vocab_size=30522, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=256, initializer_range=0.5, num_labels=1,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(shape).eval()
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        shutil.copy(encoder_model / file, folder / file)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def scores(query: str, documents: Sequence[str]) -> list[float]:
        found = []
        for document in documents:  # one at a time: no padding that could hide a mistake
            pair = tokenizer(query, document, truncation="only_second", max_length=256, return_tensors="pt")
            with torch.inference_mode():
                found.append(float(model(**pair).logits))
        return found

    engine = EncoderEngine.load(EncoderEngineConfig(str(folder), name="cross", threads=1))
    with tempfile.TemporaryDirectory(prefix="ps-") as sockets, engine_serving(engine, f"ipc://{sockets}/e") as running:
        yield folder, running.endpoint, scores


@asynccontextmanager
async def with_cross_encoder(
    serving: Serving, minilm: str, cross: tuple[Path, str, Scores], folder: Path, text: TextModel
) -> AsyncIterator[Running]:
    path, endpoint, _ = cross
    embedders = [
        Embedder("minilm", "minilm", EncoderBackend(minilm), wait_s=10),
        Embedder("cross", str(path), EncoderBackend(endpoint), wait_s=10),
    ]
    encoders = Encoders(embedders, [EncoderConfig(name="minilm"), EncoderConfig(source=str(path), name="cross")])
    async with serving(
        says(text, "At eight."),
        encoders=encoders,
        store_url=f"sqlite:///{folder / 'state.db'}",
        knowledge=KnowledgeConfig(reranker="cross"),
    ) as running:
        yield running


async def test_a_cross_encoder_orders_everything_as_the_reference_does(
    serving: Serving,
    encoder_endpoint: str,
    cross_encoder: tuple[Path, str, Scores],
    tmp_path: Path,
    text: TextModel,
) -> None:
    reference = cross_encoder[2]
    async with with_cross_encoder(serving, encoder_endpoint, cross_encoder, tmp_path, text) as running:
        documents = ["Paris.", "The office opens at eight in the morning.", "word " * 400, "[SEP] [CLS] tricks"]
        reply = await running.client.post(
            "/v1/rerank", json={"model": "cross", "query": QUESTION, "documents": documents}
        )
        got = {result["index"]: result["relevance_score"] for result in reply.json()["results"]}
        # Marks of the model inside a document are text for us and marks for the reference: not compared.
        expected = [1 / (1 + math.exp(-score)) for score in reference(QUESTION, documents[:3])]
        assert [got[index] for index in range(3)] == pytest.approx(expected, abs=1e-4)
        assert list(got) == sorted(got, key=lambda index: -got[index])

        await filled(running)
        found = (await running.client.post("/v1/collections/handbook/search", json={"query": QUESTION})).json()["data"]
        passages = {one["chunk_id"]: f"{one['heading']}\n{one['text']}" for one in found}
        assert len(passages) == 3
        scores = [one["scores"]["rerank"] for one in found]
        assert scores == sorted(scores, reverse=True)
        assert scores == pytest.approx(reference(QUESTION, list(passages.values())), abs=1e-3)
        plain = await running.client.post(
            "/v1/collections/handbook/search", json={"query": QUESTION, "rerank": False, "mode": "vector"}
        )
        assert [one["chunk_id"] for one in plain.json()["data"]] != list(passages), "the cross-encoder decides"

        answer = await running.client.post(
            "/v1/chat/completions",
            json={
                "model": "tiny",
                "messages": [{"role": "user", "content": QUESTION}],
                "rag": {"collection": "handbook", "top_k": 2},
            },
        )
        sources = answer.json()["rag"]["sources"]
        assert [source["chunk_id"] for source in sources] == list(passages)[:2]


async def test_a_cross_encoder_makes_no_vectors(
    serving: Serving,
    encoder_endpoint: str,
    cross_encoder: tuple[Path, str, Scores],
    tmp_path: Path,
    text: TextModel,
) -> None:
    async with with_cross_encoder(serving, encoder_endpoint, cross_encoder, tmp_path, text) as running:
        refused = await running.client.post("/v1/embeddings", json={"model": "cross", "input": "x"})
        assert refused.status_code == 400 and "cross-encoder" in refused.json()["error"]["message"]
