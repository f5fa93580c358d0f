"""POST /v1/embeddings, and /pooling: the same vectors, or one per token, in vLLM's format."""

from __future__ import annotations

import base64
import time
import uuid
from dataclasses import dataclass
from typing import Any

from penstock.backends.embedder import FLOAT_BYTES, Embedder
from penstock.engine.request import EngineInfo
from penstock.gateway.accounting.attribution import identify
from penstock.gateway.accounting.batch_line import batch_line
from penstock.gateway.accounting.encoder_work import EncoderWork
from penstock.gateway.accounting.targets import in_time
from penstock.gateway.api.openai.remote_encodings import RemoteEncodings
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.request_decoder import RequestDecoder
from penstock.gateway.generation.sampling import check_token_ids
from penstock.gateway.generation.schemas import EmbeddingsRequest, PoolingRequest
from penstock.gateway.moderation.guardrails import Guardrails
from penstock.protocol.errors import ContextLengthExceeded, InvalidRequest
from penstock.routing.encoders import Encoders
from penstock.routing.remote_embedder import RemoteEmbedder

_decoder = RequestDecoder(EmbeddingsRequest)
_pooling = RequestDecoder(PoolingRequest)
_FORMS = "`input` must be a string, a list of strings, a list of token ids or a list of lists of token ids."


@dataclass(frozen=True, slots=True)
class Encoded:
    """The vectors of some texts, and how many tokens these had."""

    model: str
    vectors: list[Any]
    tokens: int


class EmbeddingEndpoints:
    """Vectors of texts."""

    def __init__(self, encoders: Encoders, encoder_work: EncoderWork, guardrails: Guardrails, body_limit: int) -> None:
        self._encoders = encoders
        self._encoder_work = encoder_work
        self._guardrails = guardrails
        self._body_limit = body_limit
        self._remotes = RemoteEncodings(encoder_work, guardrails)

    async def embeddings(self, exchange: Exchange) -> None:
        request = _decoder(exchange, await exchange.body(self._body_limit))
        identify(exchange, request.user, None)
        found = await self.encode(exchange, request)
        data = [
            {"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(found.vectors)
        ]
        usage = {"prompt_tokens": found.tokens, "total_tokens": found.tokens}
        await exchange.reply_json({"object": "list", "data": data, "model": found.model, "usage": usage})

    async def encode(self, exchange: Exchange, request: EmbeddingsRequest) -> Encoded:
        """The vectors of a request, limited and charged. Without a model the first encoder makes them."""
        inputs = _inputs(request)
        remote = self._remotes.find(exchange, request.model or None)
        if remote is not None:
            rows, tokens = await self._remotes.vectors(exchange, request, remote, inputs)
            return Encoded(remote.name, [_written(row, request.encoding_format) for row in rows], tokens)
        embedder = self._encoder_work.find(exchange, request.model or None)
        async with in_time(exchange):
            info = await embedder.open()
            ids = await self._prepared(exchange, request, embedder, info, inputs)
        tokens = sum(map(len, ids))
        work = embedder.run(ids, "sentence", priority=_priority(exchange))
        numbers = await self._encoder_work.run(exchange, embedder, len(ids), tokens, work)
        vectors = _vectors(numbers, info.dimensions, 0, len(ids))
        return Encoded(embedder.name, [_written(vector, request.encoding_format) for vector in vectors], tokens)

    async def pooling(self, exchange: Exchange) -> None:
        request = _pooling(exchange, await exchange.body(self._body_limit))
        identify(exchange, request.user, None)
        inputs = _inputs(request)
        remote = self._remotes.find(exchange, request.model)
        if remote is not None:
            await self._pool_remote(exchange, request, remote, inputs)
            return
        embedder = self._encoder_work.find(exchange, request.model or None)
        async with in_time(exchange):
            info = await embedder.open()
            ids = await self._prepared(exchange, request, embedder, info, inputs)
        each = request.task == "token_embed"
        work = embedder.run(ids, "tokens" if each else "sentence", priority=_priority(exchange))
        tokens = sum(map(len, ids))
        numbers = await self._encoder_work.run(exchange, embedder, len(ids), tokens, work)
        data, start = [], 0
        for index, text in enumerate(ids):
            rows = len(text) if each else 1
            vectors = _vectors(numbers, info.dimensions, start, rows)
            start += rows
            if request.encoding_format == "base64":
                value: Any = _written(b"".join(vectors), "base64")
            else:
                value = [_written(vector, "float") for vector in vectors] if each else _written(vectors[0], "float")
            data.append({"index": index, "object": "pooling", "data": value})
        await self._pooled(exchange, embedder.name, data, tokens)

    async def _pool_remote(
        self, exchange: Exchange, request: PoolingRequest, remote: RemoteEmbedder, inputs: list[str | list[int]]
    ) -> None:
        if request.task == "token_embed":
            raise InvalidRequest(
                f"`{remote.name}` runs on another server, which gives one vector per text.",
                param="task",
                code="remote_model",
            )
        rows, tokens = await self._remotes.vectors(exchange, request, remote, inputs)
        data = [
            {"index": index, "object": "pooling", "data": _written(row, request.encoding_format)}
            for index, row in enumerate(rows)
        ]
        await self._pooled(exchange, remote.name, data, tokens)

    async def _pooled(self, exchange: Exchange, model: str, data: list[dict[str, Any]], tokens: int) -> None:
        await exchange.reply_json(
            {
                "id": f"pool-{uuid.uuid4().hex}",
                "object": "list",
                "created": int(time.time()),
                "model": model,
                "data": data,
                "usage": {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens},
            }
        )

    async def _prepared(
        self,
        exchange: Exchange,
        request: EmbeddingsRequest | PoolingRequest,
        embedder: Embedder,
        info: EngineInfo,
        inputs: list[str | list[int]],
    ) -> list[list[int]]:
        """The token ids that the encoder reads."""
        most = self._encoders.configs[embedder.name].max_texts
        if len(inputs) > most:
            raise InvalidRequest(f"`input` has {len(inputs)} texts; at most {most} go in one request.", param="input")
        _check(request, embedder, info)
        async with self._encoder_work.text_work(exchange, embedder, sum(map(len, inputs))):
            found = await self._ids(exchange, embedder, info, inputs)
            fitted = [_fitted(text, request, embedder, info) for text in found]
            self._encoder_work.check_context(exchange, embedder, map(len, fitted), "input")
            return fitted

    async def _ids(
        self, exchange: Exchange, embedder: Embedder, info: EngineInfo, inputs: list[str | list[int]]
    ) -> list[list[int]]:
        texts = [text for text in inputs if isinstance(text, str)]
        if texts:
            texts = [await self._guardrails.prompt(exchange, text) for text in texts]
            return await embedder.tokenize(texts, info.max_model_len, tenant=exchange.caller.tenant)
        first, last = embedder.text.first, embedder.text.last
        found = []
        for ids in inputs:
            assert isinstance(ids, list)
            check_token_ids(ids, info.vocab_size, "input")
            whole = ids[0] == first and ids[-1] == last and len(ids) > 1
            found.append(ids if whole else [first, *ids, last])
        return found


def _priority(exchange: Exchange) -> int:
    """Requests of batches have a lower priority."""
    return 0 if batch_line(exchange) is None else 1


def _vectors(numbers: bytes, dimensions: int, start: int, rows: int) -> list[bytes]:
    """`rows` vectors from the one numbered `start`."""
    size = dimensions * FLOAT_BYTES
    return [numbers[row * size : (row + 1) * size] for row in range(start, start + rows)]


def _inputs(request: EmbeddingsRequest | PoolingRequest) -> list[str | list[int]]:
    given = request.input
    if isinstance(given, str):
        given = [given]
    if not given:
        raise InvalidRequest("`input` is empty.", param="input")
    kind = type(given[0])
    if any(type(item) is not kind for item in given):
        raise InvalidRequest(_FORMS, param="input")
    inputs: list[Any] = [given] if kind is int else list(given)
    for index, text in enumerate(inputs):
        if not text or (isinstance(text, str) and not text.strip()):
            where = "`input`" if isinstance(request.input, str) else f"`input[{index}]`"
            raise InvalidRequest(f"{where} is empty; there is nothing to embed.", param="input")
    return inputs


def _check(request: EmbeddingsRequest | PoolingRequest, embedder: Embedder, info: EngineInfo) -> None:
    if info.scores:
        raise InvalidRequest(
            f"`{embedder.name}` is a cross-encoder: it scores pairs of texts (/v1/rerank) and has no vectors.",
            param="model",
        )
    if request.dimensions is not None and request.dimensions != info.dimensions:
        raise InvalidRequest(
            f"`dimensions` is {request.dimensions}; the vectors of `{embedder.name}` have {info.dimensions}, and it "
            "was not trained for shorter ones.",
            param="dimensions",
            code="unsupported_parameter",
        )
    kept = request.truncate_prompt_tokens
    if kept is not None and kept != -1 and not 3 <= kept <= info.max_model_len:
        raise InvalidRequest(
            f"`truncate_prompt_tokens` is -1 or from 3 to {info.max_model_len} for this model.",
            param="truncate_prompt_tokens",
        )


def _fitted(
    ids: list[int], request: EmbeddingsRequest | PoolingRequest, embedder: Embedder, info: EngineInfo
) -> list[int]:
    if request.truncate_prompt_tokens is not None:
        limit = request.truncate_prompt_tokens
        return embedder.text.cut(ids, info.max_model_len if limit == -1 else limit)
    if len(ids) > info.max_model_len:
        most = info.max_model_len
        raise ContextLengthExceeded(limit=most, prompt_tokens=len(ids), at_least=len(ids) == most + 1, param="input")
    return ids


def _written(vector: bytes, form: str | None) -> Any:
    return base64.b64encode(vector).decode() if form == "base64" else memoryview(vector).cast("f").tolist()
