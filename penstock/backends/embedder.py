"""Embeds and scores texts, for all features of the gateway that need it.

An `Embedder` is a tokenizer in this process and an engine in another. Neither exists before its first use: then the
supervisor starts the engine, which may have to download its model, and callers wait up to `wait_s`. Invariant: no call
blocks the event loop (long texts are tokenized in threads that tenants share fairly), and lists of any length are sent
in bounded requests.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from penstock.backends.encoder import EncoderBackend
from penstock.backends.encoder_set import EncoderSet
from penstock.engine.encoder.request import EncodeRequest, Wanted
from penstock.engine.request import EngineInfo
from penstock.identity.labels import NO_LABELS, OF_OWN, Demand, Labels, Requirement
from penstock.protocol.errors import EngineUnavailable, InvalidRequest, RequestTimeout
from penstock.sources.resolve import resolve
from penstock.text.encoder import EncoderText, load_encoder_text
from penstock.text.fair_threads import FairThreads

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Matrix = NDArray[np.float32]

T = TypeVar("T")

INLINE_CHARACTERS = 2048
"""Texts up to this total size are tokenized on the event loop."""
TEXTS_PER_REQUEST = 256
FLOAT_BYTES = 4
_serial = itertools.count()


@dataclass(frozen=True, slots=True)
class Embeddings:
    """A unit vector per text (one row each), and the number of tokens of each text."""

    vectors: Matrix
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class TokenVectors:
    """For each text a unit vector per token, without the special tokens at both ends."""

    vectors: list[Matrix]
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class Scores:
    """Relevance of each document to the query; larger is better, comparable only within one call."""

    values: list[float]
    tokens: int


class Embedder:
    """One encoder model."""

    def __init__(
        self,
        name: str,
        source: str,
        backend: EncoderBackend | EncoderSet,
        *,
        ask: Callable[[str], None] | None = None,
        wait_s: float = 30.0,
        time_limit_s: float = 60.0,
        input_price: float = 0.0,
        labels: Labels = NO_LABELS,
    ) -> None:
        """`ask` is called with the name to start the engine. Callers wait up to `wait_s` for it, and `time_limit_s` for
        each request."""
        self.name = name
        self.source = source
        self.backend = backend
        self.wait_s = wait_s
        self.input_price = input_price
        self.labels = labels.over(OF_OWN)
        """For data rules."""
        self._ask = ask
        self._time_limit_s = time_limit_s
        self.threads: FairThreads | None = None
        """Where long texts are tokenized; None: in any thread."""
        self._text: EncoderText | None = None
        self._loading: asyncio.Task[EncoderText] | None = None
        """Of the tokenizer; it goes on where a caller does not wait for its end."""
        self._opening = asyncio.Lock()
        self._started = False

    def unmet(self, demand: Demand) -> list[Requirement]:
        """What of a demand it does not meet; empty: it may get the request's texts."""
        return demand.unmet(self.labels)

    async def embed(self, texts: Sequence[str], *, priority: int = 0) -> Embeddings:
        """Vectors of texts; their dot product is the cosine. Longer texts are truncated to the model's window. Give
        bulk work a `priority` above 0, so that it yields to other requests."""
        info, ids = await self._prepared(texts)
        numbers = await self.run(ids, "sentence", priority=priority)
        return Embeddings(_matrix(numbers, info.dimensions), [len(text) for text in ids])

    async def token_vectors(self, texts: Sequence[str], *, priority: int = 0) -> TokenVectors:
        """Vectors of the tokens of texts, for late interaction."""
        info, ids = await self._prepared(texts)
        rows = _matrix(await self.run(ids, "tokens", priority=priority), info.dimensions)
        ends = list(itertools.accumulate(len(text) for text in ids))
        found = [rows[end - len(text) + 1 : end - 1] for text, end in zip(ids, ends, strict=True)]
        return TokenVectors(found, [len(text) for text in ids])

    async def embed_tokens(self, texts: Sequence[str], *, priority: int = 0) -> tuple[Embeddings, TokenVectors]:
        """Sentence and token vectors from a single forward pass."""
        info, ids = await self._prepared(texts)
        rows = _matrix(await self.run(ids, "both", priority=priority), info.dimensions)
        tokens = [len(text) for text in ids]
        starts = [end - length for end, length in zip(itertools.accumulate(n + 1 for n in tokens), tokens, strict=True)]
        by_token = [rows[start + 1 : start + length - 1] for start, length in zip(starts, tokens, strict=True)]
        return Embeddings(rows[[start - 1 for start in starts]], tokens), TokenVectors(by_token, tokens)

    async def rerank(self, query: str, documents: Sequence[str], *, priority: int = 0, tenant: str = "") -> Scores:
        """Scores of documents for a query: by a cross-encoder if this is one, else by late interaction (the mean over
        query tokens of their best match in the document). The vectors never leave the engine."""
        info = await self.open()
        tokens = 0
        values: list[float] = []
        for some in _portions(documents, TEXTS_PER_REQUEST):
            if info.scores:
                assert self._text is not None
                pair = partial(self._text.encode_pairs, query, some, info.max_model_len)
                ids, seconds = await self._worked(pair, len(query) + sum(map(len, some)), tenant)
                numbers = await self.run(ids, "score", seconds=seconds, priority=priority)
            else:
                ids = await self._cut([query, *some], info.max_model_len, tenant)
                if len(ids[0]) < 3:
                    raise InvalidRequest("The query is empty.", param="query")
                numbers = await self.run(ids, "late", priority=priority)
            tokens += sum(map(len, ids))
            values += memoryview(numbers).cast("f").tolist()
        return Scores(values, tokens)

    async def score_pairs(self, queries: Sequence[str], documents: Sequence[str], *, tenant: str = "") -> Scores:
        """The score of each query with the document beside it: a cross-encoder's logit, or the cosine of vectors."""
        info = await self.open()
        size = sum(map(len, queries)) + sum(map(len, documents))
        if info.scores:

            def encoded() -> tuple[list[list[int]], list[int]]:
                ids, starts = [], []
                for query, document in zip(queries, documents, strict=True):
                    pair, start = self.text.encode_pairs(query, [document], info.max_model_len)
                    ids += pair
                    starts += start
                return ids, starts

            ids, seconds = await self._worked(encoded, size, tenant)
            numbers = await self.run(ids, "score", seconds=seconds)
            return Scores(list(map(float, memoryview(numbers).cast("f"))), sum(map(len, ids)))
        sides = list(dict.fromkeys((*queries, *documents)))
        ids = await self._cut(sides, info.max_model_len, tenant)
        vectors = _matrix(await self.run(ids, "sentence"), info.dimensions)
        at = {text: index for index, text in enumerate(sides)}
        values = [
            float(vectors[at[query]] @ vectors[at[document]])
            for query, document in zip(queries, documents, strict=True)
        ]
        return Scores(values, sum(map(len, ids)))

    async def beginnings(self, texts: Sequence[str], most: int, *, tenant: str = "") -> list[str]:
        """Texts up to their first `most` tokens."""
        await self.open()
        return await self._worked(partial(self.text.beginnings, texts, most), sum(map(len, texts)), tenant)

    async def tokenize(self, texts: Sequence[str], most: int | None = None, *, tenant: str = "") -> list[list[int]]:
        """Token ids with special tokens; of a text with more than `most` tokens only the first, more than `most`."""
        await self.open()
        return await self._worked(partial(self.text.encode, texts, most), sum(map(len, texts)), tenant)

    async def run(
        self,
        ids: Sequence[list[int]],
        wanted: Wanted,
        *,
        seconds: Sequence[int] | None = None,
        priority: int = 0,
    ) -> bytes:
        """The engine's result for token ids, as float32 bytes."""
        await self.open()
        size = len(ids) if wanted == "late" else TEXTS_PER_REQUEST
        parts = []
        for start in range(0, len(ids), size):
            part = slice(start, start + size)
            request = EncodeRequest(
                f"{self.name}:{next(_serial)}",
                list(ids[part]),
                wanted,
                None if seconds is None else list(seconds[part]),
                priority,
            )
            try:
                async with asyncio.timeout(self._time_limit_s):
                    parts.append((await self.backend.encode(request)).numbers)
            except TimeoutError:
                raise RequestTimeout(f"The encoder did not answer in {self._time_limit_s:g} s.") from None
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def open(self) -> EngineInfo:
        """Starts the engine and loads the tokenizer if needed; returns the engine's info when both are ready."""
        if self._text is None or not self.backend.ready:
            async with self._opening:
                if not self._started:
                    await self.backend.start()
                    self._started = True
            await self._wait()
            async with self._opening:
                if self._text is None:
                    self._text = await self._loaded()
        info = self.backend.info
        assert info is not None
        return info

    async def _loaded(self) -> EncoderText:
        if self._loading is None or (self._loading.done() and self._loading.exception() is not None):
            work = asyncio.to_thread(_load_text, self.source)
            self._loading = asyncio.create_task(work, name=f"tokenizer of {self.name}")
        try:
            return await asyncio.shield(self._loading)
        finally:
            if self._loading.done():
                self._loading = None

    async def close(self) -> None:
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.gather(self._loading, return_exceptions=True)
        if self._started:
            await self.backend.close()

    @property
    def up(self) -> bool:
        return self.backend.ready

    @property
    def waiting(self) -> int:
        """Number of texts waiting in the engine."""
        return self.backend.load.waiting

    @property
    def text(self) -> EncoderText:
        """The tokenizer; available after `open`."""
        assert self._text is not None
        return self._text

    async def _wait(self) -> None:
        if self._ask is not None and not self.backend.ready:
            self._ask(self.name)
        try:
            await self.backend.wait_ready(self.wait_s)
        except EngineUnavailable:
            raise EngineUnavailable(
                f"The encoder `{self.name}` is not ready yet: it is started, and its model downloaded, on first "
                "use. Try again; the server's log shows the progress.",
                retry_after=5.0,
            ) from None

    async def _prepared(self, texts: Sequence[str]) -> tuple[EngineInfo, list[list[int]]]:
        info = await self.open()
        return info, await self._cut(texts, info.max_model_len)

    async def _cut(self, texts: Sequence[str], limit: int, tenant: str = "") -> list[list[int]]:
        return [self.text.cut(ids, limit) for ids in await self.tokenize(texts, limit, tenant=tenant)]

    async def _worked(self, work: Callable[[], T], characters: int, tenant: str) -> T:
        if characters <= INLINE_CHARACTERS:
            return work()
        if self.threads is None:
            return await asyncio.to_thread(work)
        return await self.threads.run(tenant, characters, work)


def _portions(items: Sequence[str], size: int) -> list[Sequence[str]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def _load_text(source: str) -> EncoderText:
    """Loads the tokenizer, without the weights where the engine runs on another machine. Imports numpy off the event
    loop too."""
    import numpy  # noqa: F401

    return load_encoder_text(resolve(source, weights=False))


def _matrix(numbers: bytes, width: int) -> Matrix:
    import numpy as np

    return np.frombuffer(numbers, dtype=np.float32).reshape(-1, width)
