"""`penstock bench retrieval`: how well collections are searched.

Measured are the recall of 20 candidates, and the rank of the answer after reranking, on the documentation of the Python
standard library (some 5,000 chunks) with questions written by hand (`questions.py`). The pipeline is the server's:
documents are read, chunked, embedded and searched as there.

The half of the questions called `tuned` was looked at when fusion and reranker were chosen; the figures that count are
those of the other half. It fails unless hybrid search with reranking is the best there.
"""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from penstock.bench.knowledge.corpus import corpus
from penstock.bench.knowledge.encoder import encoder
from penstock.bench.knowledge.questions import DESCRIBED, NAMED, QUESTIONS
from penstock.knowledge.entities import Collection, SearchMode
from penstock.knowledge.library import Library
from penstock.knowledge.limits import LibraryLimits

CANDIDATES = 20
TENANT, NAME = "bench", "stdlib"


@dataclass(frozen=True)
class Way:
    name: str
    mode: SearchMode
    rerank: bool


WAYS = (
    Way("vector", "vector", False),
    Way("BM25", "bm25", False),
    Way("hybrid", "hybrid", False),
    Way("hybrid + rerank", "hybrid", True),
)


@dataclass(frozen=True)
class Answer:
    """The rank of the first right entry, from 1; 0 when it is not among the candidates."""

    question: str
    rank: int
    seconds: float


def tuned(question: str) -> bool:
    return int(hashlib.sha256(question.encode()).hexdigest(), 16) % 2 == 0


async def fill(library: Library, console: Console) -> Collection:
    found = await library.catalogue.collection(TENANT, NAME)
    if found is None:
        found = await library.create_collection(TENANT, NAME)
    for name, text in corpus():
        await library.put_document(found, text.encode(), id=name, name=name, media_type="text/markdown")
    began = time.monotonic()
    with console.status("reading") as status:
        while True:
            counts, chunks, tokens = await library.catalogue.counts(found.id)
            if not counts.keys() & {"queued", "processing"}:
                break
            status.update(f"reading: {counts.get('ready', 0)} of {sum(counts.values())} documents, {chunks} chunks")
            await asyncio.sleep(0.5)
    seconds = time.monotonic() - began
    speed = f", read in {seconds:.0f} s ({chunks / seconds:.0f} chunks/s)" if seconds > 2 else ""
    console.print(f"{counts.get('ready', 0)} documents, {chunks} chunks, {tokens} tokens{speed}")
    return found


async def ask(library: Library, collection: Collection, way: Way, question: str, right: Sequence[str]) -> Answer:
    began = time.perf_counter()
    found = await library.retriever.search(
        collection, question, mode=way.mode, candidates=CANDIDATES, keep=CANDIDATES, rerank=way.rerank
    )
    seconds = time.perf_counter() - began
    entries = [passage.stored.chunk.heading.rpartition(" > ")[2] for passage in found.passages]
    rank = next((place for place, entry in enumerate(entries, start=1) if entry in right), 0)
    return Answer(question, rank, seconds)


def figures(answers: Iterable[Answer]) -> tuple[float, float, float]:
    """Recall of the candidates, MRR of the first ten, and how often the answer is among the four that a prompt gets."""
    ranks = [answer.rank for answer in answers]
    return (
        sum(rank > 0 for rank in ranks) / len(ranks),
        sum(1 / rank for rank in ranks if 0 < rank <= 10) / len(ranks),
        sum(0 < rank <= 4 for rank in ranks) / len(ranks),
    )


async def run(folder: Path, weights: str, console: Console) -> bool:
    async with encoder(weights=weights) as embedder:
        library = await Library.open(f"sqlite:///{folder}", embedder, limits=LibraryLimits(readers=4))
        try:
            collection = await fill(library, console)
            answers = {way: [await ask(library, collection, way, *question) for question in QUESTIONS] for way in WAYS}
        finally:
            await library.close()
    named = {question for question, _ in NAMED}
    table = Table(title=f"{len(DESCRIBED)} described and {len(NAMED)} named questions, {CANDIDATES} candidates")
    table.add_column("search")
    for part in ("test half", "tuned half", "described", "named"):
        table.add_column(f"{part}: recall@20  MRR  top 4", justify="right")
    table.add_column("p50 ms", justify="right")
    results = {}
    for way, found in answers.items():
        parts = (
            [one for one in found if not tuned(one.question)],
            [one for one in found if tuned(one.question)],
            [one for one in found if one.question not in named],
            [one for one in found if one.question in named],
        )
        results[way.name] = figures(parts[0])
        middle = sorted(one.seconds for one in found)[len(found) // 2]
        cells = ("{:.3f}  {:.3f}  {:.3f}".format(*figures(part)) for part in parts)
        table.add_row(way.name, *cells, f"{middle * 1000:.1f}")
    console.print(table)
    recall, mrr, _ = results.pop("hybrid + rerank")
    return all(mrr > other[1] and recall >= other[0] for other in results.values())


def main(library: Path | None, weights: str, console: Console) -> bool:
    """Measures, prints, and says whether hybrid search with reranking is the best. `library`: a folder that keeps the
    collection for the next run."""
    with tempfile.TemporaryDirectory(prefix="penstock-retrieval-") as temporary:
        won = asyncio.run(run(library or Path(temporary), weights, console))
    console.print("hybrid + rerank is the best" if won else "hybrid + rerank is not the best")
    return won
