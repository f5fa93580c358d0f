"""`penstock bench search-speed`: how fast a large collection is searched.

Embedding 100,000 chunks takes hours on two cores and does not change how long a search takes, so the chunks are
synthetic: their text is sentences of the standard library's documentation in random order (words are as common as in
real text), their vectors are random around a thousand centres. The search itself is real: the question goes to the
encoder's engine in its own process, to the vector index, to the word index and through the reranker.

Two tables are printed: wall-clock time of whole searches as they overlap, first with words that were not asked for
before and then with known ones, which depends on what else the machine does; and the CPU time of every step, in this
process and in the encoder's, which hardly does (PostgreSQL's own is not seen). It reports how many of the true
neighbours the index finds, and fails when the 95th percentile of a whole search by the clock, embedding the question
and reranking included, is 50 ms or more.
"""

from __future__ import annotations

import asyncio
import random
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Mapping, Sequence
from typing import TypeVar

import numpy as np
from rich.console import Console
from rich.table import Table

from penstock.bench.knowledge.corpus import corpus
from penstock.bench.knowledge.encoder import encoder
from penstock.bench.knowledge.questions import QUESTIONS
from penstock.knowledge.chunks.base import EmbeddedChunk
from penstock.knowledge.chunks.sqlite import SQLiteChunks
from penstock.knowledge.entities import Chunk, Collection
from penstock.knowledge.fusion import fuse
from penstock.knowledge.late_interaction import LateInteraction, joined
from penstock.knowledge.library import Library
from penstock.knowledge.limits import LibraryLimits
from penstock.knowledge.retrieval import Candidate, Question
from penstock.knowledge.terms import search_terms

TENANT, NAME = "bench", "large"
PER_DOCUMENT = 100
TOKENS = 90
LIMIT_S = 0.050
NEIGHBOURS = 20
CANDIDATES = 20
T = TypeVar("T")


class Maker:
    """Chunks that cost nothing to embed."""

    def __init__(self, dimensions: int) -> None:
        texts = (text for _, text in corpus())
        self._sentences = [one for text in texts for one in re.split(r"(?<=[.!?])\s+", text) if 20 < len(one) < 400]
        self._random = random.Random(0)
        self._numbers = np.random.default_rng(0)
        self._centres = self._numbers.standard_normal((1000, dimensions)).astype(np.float32)

    def document(self, number: int) -> list[EmbeddedChunk]:
        return [self._chunk(number, ordinal) for ordinal in range(PER_DOCUMENT)]

    def _chunk(self, number: int, ordinal: int) -> EmbeddedChunk:
        text = " ".join(self._random.choices(self._sentences, k=5))
        centre = self._centres[self._random.randrange(len(self._centres))]
        vector = centre + self._numbers.standard_normal(len(centre)).astype(np.float32)
        vector /= np.linalg.norm(vector)
        signs = self._numbers.integers(0, 256, (TOKENS, len(centre) // 8), np.uint8)
        chunk = Chunk(ordinal, f"Document {number} > Part {ordinal}", text, 0, len(text), None, TOKENS)
        return EmbeddedChunk(chunk, vector, joined(vector, signs))


async def fill(library: Library, chunks: int, console: Console) -> Collection:
    found = await library.catalogue.collection(TENANT, NAME)
    if found is not None:
        return found
    collection = await library.create_collection(TENANT, NAME)
    maker = Maker(collection.dimensions)
    began = time.monotonic()
    with console.status("filling") as status:
        async with library.stores.use(collection) as store:
            for number in range(chunks // PER_DOCUMENT):
                await library.catalogue.put_document(
                    collection, f"doc{number}", name=f"doc{number}", url="", media_type="text/plain", charset="",
                    digest=str(number), metadata={}, body=b"-",
                )  # fmt: skip
                document = await library.catalogue.document(collection.id, f"doc{number}")
                assert document is not None
                await library.queue.finish(document, chunks=PER_DOCUMENT, tokens=PER_DOCUMENT * TOKENS)
                await store.replace(document.id, await asyncio.to_thread(maker.document, number))
                status.update(f"filling: {(number + 1) * PER_DOCUMENT} chunks")
    console.print(f"{chunks} chunks stored in {time.monotonic() - began:.0f} s")
    return collection


async def index_recall(library: Library, collection: Collection) -> float | None:
    """The share of the true nearest neighbours that the index finds; None where the vectors cannot be read."""
    async with library.stores.use(collection) as store:
        if not isinstance(store, SQLiteChunks):
            return None
        rows = await store._database.fetch("SELECT key, vector FROM chunks")
        keys = np.array([row[0] for row in rows])
        vectors = np.frombuffer(b"".join(row[1] for row in rows), np.float16).reshape(len(rows), -1).astype(np.float32)
        numbers, hits = np.random.default_rng(1), []
        for row in numbers.choice(len(rows), 50, replace=False):
            near = vectors[row] + 0.05 * numbers.standard_normal(vectors.shape[1]).astype(np.float32)
            near /= np.linalg.norm(near)
            true = set(keys[np.argsort(-(vectors @ near))[:NEIGHBOURS]].tolist())
            hits.append(len(true & {key for key, _ in await store.nearest(near, NEIGHBOURS)}) / NEIGHBOURS)
    return float(np.mean(hits))


async def by_the_clock(library: Library, collection: Collection, at_once: int) -> dict[str, list[float]]:
    """Seconds of each step of each question. Words that were not asked for before are first looked up in the index, so
    the first round is a figure of its own."""
    seconds: dict[str, list[float]] = defaultdict(list)
    slots = asyncio.Semaphore(at_once)
    for question, _ in QUESTIONS:
        found = await library.retriever.search(collection, question)
        seconds["total, new words"].append(found.seconds["total"])

    async def ask(question: str) -> None:
        async with slots:
            found = await library.retriever.search(collection, question)
        for step, taken in found.seconds.items():
            seconds[step].append(taken)

    await asyncio.gather(*(ask(question) for question, _ in QUESTIONS))
    return seconds


class CpuTime:
    """CPU time of this process and of the encoder's, by step."""

    def __init__(self, pid: int) -> None:
        self._clock = (~pid << 3) | 2  # the kernel's number for the clock of a process
        self.seconds: dict[str, list[float]] = defaultdict(list)

    async def __call__(self, step: str, work: Awaitable[T]) -> T:
        before = self._now()
        found = await work
        self.seconds[step].append(self._now() - before)
        return found

    def _now(self) -> float:
        return time.process_time() + time.clock_gettime(self._clock)


async def by_cpu_time(library: Library, collection: Collection, pid: int) -> dict[str, list[float]]:
    spent = CpuTime(pid)
    search = library.retriever.search
    async with library.stores.use(collection) as store:
        for text, _ in QUESTIONS:
            question = Question(text, library.embedder)
            embedded = await spent("embed", question.embedded())
            nearest = await spent("vector", store.nearest(embedded.vectors[0], CANDIDATES))
            matching = await spent("bm25", store.matching(search_terms(text), CANDIDATES))
            keys = [key for key, _ in fuse([[key for key, _ in ranking] for ranking in (nearest, matching)])][
                :CANDIDATES
            ]
            chunks = await spent("fetch", store.fetch(keys))
            scorer = await LateInteraction().ready(question)
            await spent("rerank", scorer(store, [Candidate(chunks[key], {}) for key in keys]))
            await spent("whole search", search(collection, text, rerank=False))
            await spent("whole search, reranked", search(collection, text))
    return spent.seconds


def table(title: str, seconds: Mapping[str, Sequence[float]]) -> Table:
    shown = Table(title=title)
    for column in ("step", "p50", "p95", "p99"):
        shown.add_column(column, justify="left" if column == "step" else "right")
    for step, taken in seconds.items():
        shown.add_row(step, *(f"{value * 1000:.1f}" for value in np.percentile(taken, (50, 95, 99))))
    return shown


async def run(url: str, chunks: int, at_once: int, weights: str, console: Console) -> bool:
    async with encoder(weights=weights) as embedder:
        limits = LibraryLimits(readers=1)
        library = await Library.open(url, embedder, limits=limits)
        try:
            collection = await fill(library, chunks, console)
            began, spent = time.monotonic(), time.process_time()
            await library.retriever.search(collection, "warm")
            console.print(
                f"index ready after {time.monotonic() - began:.1f} s, {time.process_time() - spent:.1f} s of CPU"
            )
            seconds = await by_the_clock(library, collection, at_once)
            spent_by = await by_cpu_time(library, collection, embedder.pid)
            recall = await index_recall(library, collection)
        finally:
            await library.close()
    what = f"{chunks} chunks, {len(QUESTIONS)} questions, encoder {weights}"
    console.print(table(f"{what}: milliseconds by the clock, {at_once} at once; steps overlap", seconds))
    console.print(table(f"{what}: milliseconds of CPU", spent_by))
    if recall is not None:
        console.print(f"{recall:.1%} of the true {NEIGHBOURS} nearest are found")
    slow = float(np.percentile(seconds["total"], 95))
    console.print(f"p95 {slow * 1000:.1f} ms, limit {LIMIT_S * 1000:.0f} ms: ratio {slow / LIMIT_S:.2f}")
    return slow < LIMIT_S


def main(library: str | None, chunks: int, at_once: int, weights: str, console: Console) -> bool:
    """Measures, prints, and says whether searches are fast enough. `library`: a folder, or a database's URL, that keeps
    the collection for the next run."""
    with tempfile.TemporaryDirectory(prefix="penstock-search-") as temporary:
        where = library or temporary
        url = where if "://" in where else f"sqlite:///{where}"
        return asyncio.run(run(url, chunks, at_once, weights, console))
