"""Vectors and scores from encoders that other servers run: limited, filtered and charged like those made here.

The server counts the tokens, and what it counted is charged; before that, limits reserve an estimate, or the exact
count where the remote's tokenizer is configured.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from penstock.backends.embedder import Scores
from penstock.gateway.accounting.encoder_work import EncoderWork
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.sampling import check_token_ids
from penstock.gateway.generation.schemas import EmbeddingsRequest, PoolingRequest
from penstock.gateway.moderation.guardrails import Guardrails
from penstock.protocol.errors import InvalidRequest
from penstock.routing.remote_embedder import RemoteEmbedder, estimate

MOST_TEXTS = 2048
"""Texts or documents in one request."""


class RemoteEncodings:
    """Encodes for requests with the models of other servers."""

    def __init__(self, work: EncoderWork, guardrails: Guardrails) -> None:
        self._work = work
        self._guardrails = guardrails

    def find(self, exchange: Exchange, name: str | None) -> RemoteEmbedder | None:
        return None if name is None else self._work.remote(exchange, name)

    async def vectors(
        self,
        exchange: Exchange,
        request: EmbeddingsRequest | PoolingRequest,
        embedder: RemoteEmbedder,
        inputs: Sequence[str | list[int]],
    ) -> tuple[list[bytes], int]:
        """A vector per text as 32-bit floats, and the tokens of all texts."""
        if len(inputs) > MOST_TEXTS:
            raise InvalidRequest(
                f"`input` has {len(inputs)} texts; at most {MOST_TEXTS} go in one request.", param="input"
            )
        texts = [_text(embedder, given) for given in inputs]
        texts = [_shortened(embedder, text, request.truncate_prompt_tokens) for text in texts]
        texts = [await self._guardrails.prompt(exchange, text) for text in texts]
        self._work.check_context(exchange, embedder, (_tokens(embedder, [text]) for text in texts), "input")
        work = embedder.vectors(
            texts, dimensions=request.dimensions, request_id=exchange.request_id, demand=exchange.demand
        )
        rows, tokens = await self._work.run(
            exchange, embedder, len(texts), _tokens(embedder, texts), work, told=lambda found: found[1]
        )
        return [array("f", row).tobytes() for row in rows], tokens

    async def scores(
        self, exchange: Exchange, embedder: RemoteEmbedder, queries: Sequence[str], documents: Sequence[str]
    ) -> Scores:
        """The score of each document for the query beside it, or for the only one."""
        if max(len(queries), len(documents)) > MOST_TEXTS:
            raise InvalidRequest(f"At most {MOST_TEXTS} documents go in one request.", param="documents")
        queries = [await self._guardrails.prompt(exchange, text) for text in queries]
        documents = [await self._guardrails.prompt(exchange, text) for text in documents]
        lengths = (_tokens(embedder, [text]) for text in (*queries, *documents))
        self._work.check_context(exchange, embedder, lengths, "documents")
        if len(queries) == 1:
            work = embedder.rerank(queries[0], documents, request_id=exchange.request_id, demand=exchange.demand)
        else:
            work = embedder.score_pairs(queries, documents, request_id=exchange.request_id, demand=exchange.demand)
        tokens = _tokens(embedder, [*queries, *documents])
        return await self._work.run(exchange, embedder, len(documents), tokens, work, told=lambda found: found.tokens)


def _text(embedder: RemoteEmbedder, given: str | list[int]) -> str:
    if isinstance(given, str):
        return given
    known = embedder.model.text
    if known is None:
        raise InvalidRequest(
            f"`input` is token ids, and `{embedder.name}` runs on another server whose tokenizer is not known here; "
            "send text (`remotes[].tokenizer` would allow ids).",
            param="input",
            code="remote_model",
        )
    check_token_ids(given, known.vocab_size, "input")
    return known.decode(given)


def _shortened(embedder: RemoteEmbedder, text: str, kept: int | None) -> str:
    """`truncate_prompt_tokens`: -1 is as much as the model takes, which the server decides where nothing is known."""
    if kept is None:
        return text
    known, window = embedder.model.text, embedder.model.context_window
    if known is None:
        if kept == -1:
            return text
        raise InvalidRequest(
            f"`truncate_prompt_tokens` counts tokens, and the tokenizer of `{embedder.name}` is not known here "
            "(`remotes[].tokenizer` names it).",
            param="truncate_prompt_tokens",
            code="remote_model",
        )
    most = window if kept == -1 else kept
    if most is None:
        return text
    ids = known.encode(text, most=most)
    return text if len(ids) <= most else known.decode(ids[:most])


def _tokens(embedder: RemoteEmbedder, texts: Sequence[str]) -> int:
    """Before the server has counted them."""
    known: Any = embedder.model.text
    if known is None or sum(map(len, texts)) > 16 * 1024:
        return estimate(texts)
    return sum(len(known.encode(text)) for text in texts)
