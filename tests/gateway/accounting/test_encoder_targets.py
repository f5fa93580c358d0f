"""`x-slo-ttft-ms` where answers come whole: vectors, scores and ranks are there in time, or refused and free."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from penstock.backends.embedder import Embedder
from penstock.backends.encoder import EncoderBackend
from penstock.config.encoders import EncoderConfig
from penstock.config.schema import PriceConfig
from penstock.engine.encoder.request import EncodeRequest, Encoding
from penstock.routing.encoders import Encoders
from tests.gateway.conftest import Serving, eventually

PATHS: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "a text"},
    "/pooling": {"input": "a text"},
    "/v1/rerank": {"query": "q", "documents": ["one", "two"]},
    "/v1/score": {"text_1": "q", "text_2": ["one", "two"]},
    "/api/embed": {"input": "a text"},
}


def encoders_of(endpoint: str) -> Encoders:
    embedder = Embedder("minilm", "minilm", EncoderBackend(endpoint), wait_s=60)
    return Encoders([embedder], [EncoderConfig(name="minilm")])


class Stuck(EncoderBackend):
    """Accepts requests and answers none."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint)
        self.asked: list[EncodeRequest] = []
        self.dropped: list[str] = []

    async def encode(self, request: EncodeRequest) -> Encoding:
        self.asked.append(request)
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        self.dropped.append(request.request_id)
        raise asyncio.CancelledError


@pytest.mark.parametrize("path", PATHS)
async def test_an_encoder_that_does_not_come_up_is_not_waited_for(serving: Serving, tmp_path: Path, path: str) -> None:
    encoders = encoders_of(f"ipc://{tmp_path / 'nobody'}")
    async with serving(encoders=encoders) as running:
        body = {"model": "minilm", **PATHS[path]}
        refused = await asyncio.wait_for(running.client.post(path, json=body, headers={"x-slo-ttft-ms": "80"}), 20)
        assert refused.status_code == 503 and refused.headers["x-penstock-reason"] == "queue_timeout"
        assert "x-slo-ttft-ms" in refused.text


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank"])
async def test_a_stuck_encoder_drops_what_is_late_and_nothing_is_charged(
    serving: Serving, tmp_path: Path, encoder_endpoint: str, path: str
) -> None:
    backend = Stuck(encoder_endpoint)
    encoders = Encoders([Embedder("minilm", "minilm", backend, wait_s=60)], [EncoderConfig(name="minilm")])
    prices = (PriceConfig(model="minilm", input_price=1e6),)
    store = f"sqlite:///{tmp_path / 'x.db'}"
    async with serving(encoders=encoders, store_url=store, prices=prices) as running:
        await encoders.find("minilm").open()
        body = {"model": "minilm", **PATHS[path]}
        reply = await asyncio.wait_for(running.client.post(path, json=body, headers={"x-slo-ttft-ms": "2000"}), 20)
        assert reply.status_code == 503 and reply.headers["x-penstock-reason"] == "queue_timeout"
        await eventually(lambda: backend.dropped == [request.request_id for request in backend.asked])
        assert len(backend.asked) == 1
        (used,) = (await running.client.get("/v1/usage")).json()["data"]
        assert float(used["cost"]) == 0.0


async def test_what_is_in_time_is_answered(serving: Serving, encoder_endpoint: str) -> None:
    async with serving(encoders=encoders_of(encoder_endpoint)) as running:
        for path, body in PATHS.items():
            reply = await running.client.post(
                path, json={"model": "minilm", **body}, headers={"x-slo-ttft-ms": "600000"}
            )
            assert reply.status_code == 200 and "x-penstock-ignored" not in reply.headers, reply.text


@pytest.mark.parametrize("path", PATHS)
async def test_what_is_no_target_is_refused_and_a_gap_is_named_as_ignored(
    serving: Serving, encoder_endpoint: str, path: str
) -> None:
    async with serving(encoders=encoders_of(encoder_endpoint)) as running:
        body = {"model": "minilm", **PATHS[path]}
        for name in ("x-slo-ttft-ms", "x-slo-tpot-ms"):
            refused = await running.client.post(path, json=body, headers={name: "soon"})
            assert refused.status_code == 400 and name in refused.text
        named = await running.client.post(path, json=body, headers={"x-slo-tpot-ms": "20"})
        assert named.status_code == 200 and named.headers["x-penstock-ignored"] == "x-slo-tpot-ms"
