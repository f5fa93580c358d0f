"""The collections of this gateway: opened by the first request that needs them, embedded with the gateway's encoders.

A gateway without collections pays nothing for them. If collections exist at the start, they are opened at once, so that
documents that were queued before a restart or by another gateway are processed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.backends.embedder import Embedder as Encoder
from penstock.config.knowledge import KnowledgeConfig
from penstock.errors import ConfigError, needs_extra
from penstock.gateway.app.data_rules import permit
from penstock.gateway.app.exchange import Exchange
from penstock.identity import Caller
from penstock.identity.labels import NO_DEMAND
from penstock.knowledge.embedder import Embedded, EmbedderFacts
from penstock.knowledge.entities import KnowledgeError
from penstock.knowledge.limits import LibraryLimits
from penstock.knowledge.retrieval import Candidate, Question, Reranker, Scorer
from penstock.protocol.errors import NotFound, ServiceUnavailable
from penstock.routing.encoders import Encoders
from penstock.routing.remote_embedder import RemoteEmbedder
from penstock.storage import Database, DatabaseError
from penstock.storage.database import default_url
from penstock.telemetry.knowledge_metrics import KnowledgeMetrics

if TYPE_CHECKING:
    from penstock.knowledge.chunks.base import ChunkStore
    from penstock.knowledge.library import Library

log = logging.getLogger(__name__)

OFF = "off"
SQLITE = "sqlite:///"
REMOTE_WINDOW = 8192
"""Tokens of a text for an embedding model of another server, where the configuration names no window."""
BULK = 1
"""Priority of documents at the encoder: below requests that wait for an answer."""


class KnowledgeLibrary:
    """Opens the library once, on first use."""

    def __init__(
        self, config: KnowledgeConfig, store_url: str | None, encoders: Encoders, metrics: KnowledgeMetrics
    ) -> None:
        self.config = config
        self._url = library_url(config, store_url)
        self._encoders = encoders
        self.metrics = metrics
        self._library: Library | None = None
        self._opening = asyncio.Lock()
        self._shared: Database | None = None

    async def start(self, store: Database | None) -> None:
        """Open an existing library and process queued documents. `store`: the gateway's database, which may hold it."""
        if self._url is None or self._encoder() is None:
            return
        try:
            if not self._url.startswith(SQLITE):
                self._shared = None if self.config.url else store
            if await self._exists(self._url):
                await self._open(self._url)
        except (DatabaseError, KnowledgeError) as error:
            # Requests for collections report the error; other requests do not depend on it.
            log.warning("collections are unavailable: %s", error)

    async def _exists(self, url: str) -> bool:
        """Whether anybody ever made a collection."""
        if url.startswith(SQLITE):
            return await asyncio.to_thread(Path(url.removeprefix(SQLITE)).exists)
        return self._shared is None or await _has_tables(self._shared)

    async def close(self) -> None:
        if self._library is not None:
            await self._library.close()

    async def library(self) -> Library:
        if self._url is None:
            raise NotFound("This server keeps no collections.")
        self.encoder()
        try:
            return self._library or await self._open(self._url)
        except DatabaseError as error:
            raise ServiceUnavailable("The store of collections cannot be reached at the moment.") from error
        except KnowledgeError as error:
            raise ServiceUnavailable(str(error)) from error

    async def _open(self, url: str) -> Library:
        async with self._opening:
            if self._library is None:
                self._library = await self._opened(url)
            return self._library

    async def _opened(self, url: str) -> Library:
        try:
            from penstock.knowledge.library import Library  # the index: only where there are collections
        except ImportError as error:
            raise KnowledgeError(f"Collections: the server {needs_extra('knowledge')}.") from error

        config, encoder = self.config, self._encoder()
        assert encoder is not None
        limits = LibraryLimits(
            collections=config.collections_per_tenant,
            documents=config.documents_per_collection,
            waiting=config.waiting_documents,
            readers=config.readers,
        )
        reranker = CrossEncoder(self._encoders.any(config.reranker)) if config.reranker else None
        embedder: EncoderEmbedder | RemoteDocumentEmbedder
        if isinstance(encoder, RemoteEmbedder):
            embedder = RemoteDocumentEmbedder(encoder)
        else:
            embedder = EncoderEmbedder(encoder)
        return await Library.open(
            url, embedder, shared=self._shared, reranker=reranker, limits=limits, meter=self.metrics
        )

    async def forget_file(self, tenant: str, id: str) -> None:
        """Remove the documents that were made from a file, if there are collections."""
        if self._url is None or self._encoder() is None:
            return
        if self._library is not None or await self._exists(self._url):
            await (await self.library()).forget_file(tenant, id)

    def encoder(self) -> Encoder | RemoteEmbedder:
        """The encoder of questions and documents."""
        found = self._encoder()
        if found is None:
            raise NotFound("This server has no encoder, and collections need one: add it to `encoders`.")
        return found

    def names_encoder(self, caller: Caller, name: str) -> bool:
        """Whether a caller may be told the name of an encoder; one that is gone by now is no secret."""
        if self._encoders.remote(name) is not None:
            return self._encoders.remote(name, caller.access) is not None
        return name not in self._encoders or self._encoders.allows(caller.access, name)

    def permit(self, exchange: Exchange) -> None:
        """Raises where the encoder or the reranker of collections may not see data of a request."""
        if not exchange.demand:
            return
        used = [self._encoder(), self._encoders.any(self.config.reranker) if self.config.reranker else None]
        for encoder in used:
            if encoder is not None:
                permit(exchange, "encoder", encoder.name, encoder.unmet(exchange.demand))

    def _encoder(self) -> Encoder | RemoteEmbedder | None:
        return self._encoders.any(self.config.encoder) if self.config.encoder else self._encoders.default


class EncoderEmbedder:
    """Adapts an encoder to `penstock.knowledge.embedder.Embedder`."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder

    @property
    def name(self) -> str:
        return self._encoder.name

    async def facts(self) -> EmbedderFacts:
        info = await self._encoder.open()
        return EmbedderFacts(info.dimensions, info.max_model_len, str(self._encoder.text.folder))

    def tokens(self, texts: Sequence[str]) -> list[list[str]]:
        return self._encoder.text.spelled(texts)

    async def embed(self, texts: Sequence[str], *, bulk: bool = False) -> Embedded:
        whole, tokens = await self._encoder.embed_tokens(texts, priority=BULK if bulk else 0)
        return Embedded(whole.vectors, tokens.vectors)


class RemoteDocumentEmbedder:
    """The same for an embedding model of another server. It gives a vector per text and none per token, so passages are
    reranked by their vectors alone; its tokenizer is elsewhere, so chunks are measured in words."""

    def __init__(self, encoder: RemoteEmbedder) -> None:
        self._encoder = encoder
        self._dimensions = encoder.model.dimensions

    @property
    def name(self) -> str:
        return self._encoder.name

    async def facts(self) -> EmbedderFacts:
        if self._dimensions is None:
            self._dimensions = (await self._encoder.embed(["How long are your vectors?"])).vectors.shape[1]
        return EmbedderFacts(self._dimensions, self._encoder.model.context_window or REMOTE_WINDOW)

    def tokens(self, texts: Sequence[str]) -> list[list[str]]:
        return [[] for _ in texts]

    async def embed(self, texts: Sequence[str], *, bulk: bool = False) -> Embedded:
        vectors = (await self._encoder.embed(texts, priority=BULK if bulk else 0)).vectors
        return Embedded(vectors, [vectors[:0] for _ in texts])


class CrossEncoder(Reranker):
    """A reranker that reads the question and a passage together."""

    def __init__(self, encoder: Encoder | RemoteEmbedder) -> None:
        self._encoder = encoder

    async def ready(self, question: Question) -> Scorer:
        encoder = self._encoder
        await encoder.open()  # started on first use, while candidates are searched

        async def score(store: ChunkStore, candidates: Sequence[Candidate]) -> list[float]:
            texts = [one.stored.chunk.embedded for one in candidates]
            if isinstance(encoder, RemoteEmbedder):
                return (await encoder.rerank(question.text, texts, demand=NO_DEMAND)).values
            return (await encoder.rerank(question.text, texts)).values

        return score


def library_url(config: KnowledgeConfig, store_url: str | None) -> str | None:
    """Where collections are stored: as configured, by default beside the gateway's store; None: nowhere."""
    if config.url == OFF or (not config.url and store_url is None):
        return None
    if config.url:
        if not config.url.startswith((SQLITE, "postgresql:", "postgres:")):
            raise ConfigError("knowledge.url: use sqlite:///FOLDER, postgresql://USER:PASSWORD@HOST/NAME or off")
        return config.url
    url = store_url or default_url()
    return f"{SQLITE}{Path(url.removeprefix(SQLITE)).parent / 'knowledge'}" if url.startswith(SQLITE) else url


async def _has_tables(database: Database) -> bool:
    rows = await database.fetch("SELECT to_regclass('collections') IS NOT NULL")
    return bool(rows[0][0])
