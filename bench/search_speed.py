"""How fast a large collection is searched: 100,000 chunks, the real encoder for the questions, everything else too.

Embedding 100,000 chunks takes hours on two cores and does not change how long a search takes, so the chunks are made:
their text is sentences of the standard library's documentation in random order (the words are as common as in real
text), their vectors are random around a thousand centres.

    python bench/search_speed.py                             some minutes, most of them for filling
    python bench/search_speed.py --library FOLDER            keeps the collection for the next run
    python bench/search_speed.py --chunks 20000 --at-once 4  other sizes; several searches at one time

It prints how long each step takes (they overlap), how many of the true neighbours the index finds, and ends with
status 1 when the 95th percentile of a whole search, embedding the question included, is 50 ms or more.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
from knowledge_encoder import encoder
from retrieval_corpus import corpus
from retrieval_questions import QUESTIONS
from rich.console import Console
from rich.table import Table

from penstock.knowledge.chunks.base import EmbeddedChunk
from penstock.knowledge.late import joined
from penstock.knowledge.library import Library
from penstock.knowledge.limits import LibraryLimits
from penstock.knowledge.model import Chunk, Collection

TENANT, NAME = "bench", "large"
PER_DOCUMENT = 100
TOKENS = 90
LIMIT_S = 0.050
NEIGHBOURS = 20


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


async def index_recall(library: Library, collection: Collection) -> float:
    """Which part of the true nearest neighbours the index finds."""
    async with library.stores.use(collection) as store:
        rows = await store._database.fetch("SELECT key, vector FROM chunks")  # type: ignore[attr-defined]
        keys = np.array([row[0] for row in rows])
        vectors = np.frombuffer(b"".join(row[1] for row in rows), np.float16).reshape(len(rows), -1).astype(np.float32)
        numbers, hits = np.random.default_rng(1), []
        for row in numbers.choice(len(rows), 50, replace=False):
            near = vectors[row] + 0.05 * numbers.standard_normal(vectors.shape[1]).astype(np.float32)
            near /= np.linalg.norm(near)
            true = set(keys[np.argsort(-(vectors @ near))[:NEIGHBOURS]].tolist())
            hits.append(len(true & {key for key, _ in await store.nearest(near, NEIGHBOURS)}) / NEIGHBOURS)
    return float(np.mean(hits))


async def measure(library: Library, collection: Collection, at_once: int) -> dict[str, list[float]]:
    """Seconds of each step of each question. Words never asked for before are counted in the collection first, so the
    first round is a figure of its own."""
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


async def run(folder: Path, chunks: int, at_once: int, console: Console) -> bool:
    async with encoder() as embedder:
        limits = LibraryLimits(readers=1)
        library = await Library.open(f"sqlite:///{folder}", embedder, limits=limits)
        try:
            collection = await fill(library, chunks, console)
            began = time.monotonic()
            await library.retriever.search(collection, "warm")
            console.print(f"index ready after {time.monotonic() - began:.1f} s")
            seconds = await measure(library, collection, at_once)
            recall = await index_recall(library, collection)
        finally:
            await library.close()
    table = Table(title=f"{chunks} chunks, {len(QUESTIONS)} questions, {at_once} at once, milliseconds")
    for column in ("step", "p50", "p95", "p99"):
        table.add_column(column, justify="left" if column == "step" else "right")
    for step, taken in seconds.items():
        table.add_row(step, *(f"{value * 1000:.1f}" for value in np.percentile(taken, (50, 95, 99))))
    console.print(table)
    console.print(f"{recall:.1%} of the true {NEIGHBOURS} nearest are found")
    slow = float(np.percentile(seconds["total"], 95))
    console.print(f"p95 {slow * 1000:.1f} ms, limit {LIMIT_S * 1000:.0f} ms: ratio {slow / LIMIT_S:.2f}")
    return slow < LIMIT_S


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=Path, help="folder of the collection; a temporary one when not given")
    parser.add_argument("--chunks", type=int, default=100_000)
    parser.add_argument("--at-once", type=int, default=1, help="searches at one time")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-search-") as temporary:
        folder = options.library or Path(temporary)
        fast = asyncio.run(run(folder, options.chunks, options.at_once, Console(width=120)))
    sys.exit(0 if fast else 1)


if __name__ == "__main__":
    main()
