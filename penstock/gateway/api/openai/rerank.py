"""POST /v1/rerank, /rerank and /v2/rerank: documents in order of how well they answer a query, as clients of Cohere,
Jina and vLLM expect it."""

from __future__ import annotations

import math
import uuid
from typing import Any

from penstock.gateway.accounting.attribution import identify
from penstock.gateway.accounting.encoder_work import EncoderWork
from penstock.gateway.accounting.targets import in_time
from penstock.gateway.api.openai.remote_encodings import RemoteEncodings
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.request_decoder import RequestDecoder
from penstock.gateway.generation.schemas import RerankRequest
from penstock.gateway.moderation.guardrails import Guardrails
from penstock.protocol.errors import ContextLengthExceeded, InvalidRequest
from penstock.routing.encoders import Encoders

_decoder = RequestDecoder(RerankRequest)


class RerankEndpoints:
    """Ranks documents."""

    def __init__(self, encoders: Encoders, encoder_work: EncoderWork, guardrails: Guardrails, body_limit: int) -> None:
        self._encoders = encoders
        self._encoder_work = encoder_work
        self._guardrails = guardrails
        self._body_limit = body_limit
        self._remotes = RemoteEncodings(encoder_work, guardrails)

    async def rerank(self, exchange: Exchange) -> None:
        request = _decoder(exchange, await exchange.body(self._body_limit))
        identify(exchange, request.user, None)
        if not request.query.strip():
            raise InvalidRequest("`query` is empty.", param="query")
        if not request.documents:
            raise InvalidRequest("`documents` is empty.", param="documents")
        texts = [document if isinstance(document, str) else document.text for document in request.documents]
        remote = self._remotes.find(exchange, request.model)
        if remote is not None:
            found_there = await self._remotes.scores(exchange, remote, [request.query], texts)
            await self._reply(exchange, request, remote.name, texts, found_there.values, found_there.tokens)
            return
        embedder = self._encoder_work.find(exchange, request.model)
        most = self._encoders.configs[embedder.name].max_texts
        if len(texts) > most:
            raise InvalidRequest(
                f"There are {len(texts)} documents; at most {most} go in one request.", param="documents"
            )
        query = request.query
        query = await self._guardrails.prompt(exchange, query)
        texts = [await self._guardrails.prompt(exchange, text) for text in texts]
        whole = texts
        async with in_time(exchange):
            info = await embedder.open()
        window, tenant = info.max_model_len, exchange.caller.tenant
        async with in_time(exchange), self._encoder_work.text_work(exchange, embedder, exchange.body_size):
            if request.max_tokens_per_doc:
                texts = await embedder.beginnings(texts, request.max_tokens_per_doc, tenant=tenant)
            found = await embedder.tokenize([query, *texts], window, tenant=tenant)
            asked, *lengths = [min(len(ids), window) for ids in found]
            if asked >= window:
                raise ContextLengthExceeded(limit=window, prompt_tokens=asked, param="query")
            self._encoder_work.check_context(exchange, embedder, (asked, *lengths), "documents")
        # A cross-encoder reads the query again with every document.
        tokens = sum(lengths) + asked * (len(texts) if info.scores else 1)
        work = embedder.rerank(query, texts, tenant=tenant)
        values = (await self._encoder_work.run(exchange, embedder, len(texts), tokens, work)).values
        scores = [share(value) for value in values] if info.scores else values
        await self._reply(exchange, request, embedder.name, whole, scores, tokens)

    async def _reply(
        self,
        exchange: Exchange,
        request: RerankRequest,
        model: str,
        texts: list[str],
        scores: list[float],
        tokens: int,
    ) -> None:
        order = sorted(range(len(texts)), key=lambda index: -scores[index])
        results: list[dict[str, Any]] = []
        for index in order[: request.top_n or None]:
            result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
            if request.return_documents:
                result["document"] = {"text": texts[index]}
            results.append(result)
        await exchange.reply_json(
            {
                "id": f"rerank-{uuid.uuid4().hex}",
                "object": "list",
                "model": model,
                "results": results,
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
                "meta": {"billed_units": {"input_tokens": tokens}},
            }
        )


def share(logit: float) -> float:
    """The logit of a cross-encoder as a score between 0 and 1."""
    return 1.0 / (1.0 + math.exp(-logit)) if logit > -700 else 0.0
