"""POST /score and /v1/score: how well pairs of texts go together, in vLLM's format. A cross-encoder's score is between
0 and 1; with any other encoder it is the cosine of the two vectors."""

from __future__ import annotations

import time
import uuid

from penstock.gateway.accounting.attribution import identify
from penstock.gateway.accounting.encoder_work import EncoderWork
from penstock.gateway.accounting.targets import in_time
from penstock.gateway.api.openai.remote_encodings import RemoteEncodings
from penstock.gateway.api.openai.rerank import share
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.request_decoder import RequestDecoder
from penstock.gateway.generation.schemas import ScoreRequest, ScoreTexts
from penstock.gateway.moderation.guardrails import Guardrails
from penstock.protocol.errors import ContextLengthExceeded, InvalidRequest
from penstock.routing.encoders import Encoders

_decoder = RequestDecoder(ScoreRequest)
_LEFT = ("text_1", "data_1", "queries")
_RIGHT = ("text_2", "data_2", "documents", "items")


class ScoreEndpoints:
    """Scores pairs of texts."""

    def __init__(self, encoders: Encoders, encoder_work: EncoderWork, guardrails: Guardrails, body_limit: int) -> None:
        self._encoders = encoders
        self._encoder_work = encoder_work
        self._guardrails = guardrails
        self._body_limit = body_limit
        self._remotes = RemoteEncodings(encoder_work, guardrails)

    async def score(self, exchange: Exchange) -> None:
        request = _decoder(exchange, await exchange.body(self._body_limit))
        identify(exchange, request.user, None)
        queries, left = _side(request, _LEFT)
        documents, right = _side(request, _RIGHT)
        remote = self._remotes.find(exchange, request.model)
        if remote is not None:
            _check_sides(queries, left, documents, right)
            found_there = await self._remotes.scores(exchange, remote, queries, documents)
            await self._reply(exchange, remote.name, found_there.values, found_there.tokens)
            return
        embedder = self._encoder_work.find(exchange, request.model or None)
        most = self._encoders.configs[embedder.name].max_texts
        if max(len(queries), len(documents)) > most:
            raise InvalidRequest(f"At most {most} pairs go in one request.", param=right)
        _check_sides(queries, left, documents, right)
        queries = [await self._guardrails.prompt(exchange, text) for text in queries]
        documents = [await self._guardrails.prompt(exchange, text) for text in documents]
        async with in_time(exchange):
            info = await embedder.open()
        window, tenant = info.max_model_len, exchange.caller.tenant
        async with in_time(exchange), self._encoder_work.text_work(exchange, embedder, exchange.body_size):
            found = await embedder.tokenize([*queries, *documents], window, tenant=tenant)
            lengths = [min(len(ids), window) for ids in found]
            longest = max(lengths[: len(queries)])
            if longest >= window:
                raise ContextLengthExceeded(limit=window, prompt_tokens=longest, param=left)
            self._encoder_work.check_context(exchange, embedder, lengths, right)
        queries *= 1 if len(queries) == len(documents) else len(documents)
        # A cross-encoder reads the query again with every document.
        asked = lengths[: len(found) - len(documents)]
        tokens = sum(lengths) if not info.scores or len(asked) > 1 else sum(lengths[1:]) + asked[0] * len(documents)
        work = embedder.score_pairs(queries, documents, tenant=tenant)
        values = (await self._encoder_work.run(exchange, embedder, len(documents), tokens, work)).values
        await self._reply(exchange, embedder.name, [share(each) if info.scores else each for each in values], tokens)

    async def _reply(self, exchange: Exchange, model: str, scores: list[float], tokens: int) -> None:
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
        await exchange.reply_json(
            {
                "id": f"score-{uuid.uuid4().hex}",
                "object": "list",
                "created": int(time.time()),
                "model": model,
                "data": data,
                "usage": {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens},
            }
        )


def _check_sides(queries: list[str], left: str, documents: list[str], right: str) -> None:
    if len(queries) not in (1, len(documents)):
        raise InvalidRequest(
            f"`{left}` has {len(queries)} texts and `{right}` {len(documents)}; send one, or as many as the other.",
            param=left,
        )


def _side(request: ScoreRequest, names: tuple[str, ...]) -> tuple[list[str], str]:
    """The texts of one side of the pairs and the parameter they came in."""
    given: list[tuple[str, ScoreTexts]] = [
        (name, value) for name in names if (value := getattr(request, name)) is not None
    ]
    if len(given) != 1:
        raise InvalidRequest(f"Send exactly one of {', '.join(f'`{name}`' for name in names)}.", param=names[0])
    ((name, texts),) = given
    return [texts] if isinstance(texts, str) else list(texts), name
