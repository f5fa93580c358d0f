"""`penstock bench semantic-cache`: how often the semantic cache is wrong, and how often it helps.

`data/semantic_pairs.tsv` has near duplicates that must not hit (negations, numbers, names, units, comparatives, roles,
scope) and paraphrases that should. A hash of each pair puts it either in the part that the verifier was written with or
in the part held out from it; the second is the one that counts. Every question is also tried against all the others.

What it does not show: the questions of your users. The pairs are short, English, and written by the people who wrote
the verifier; `penstock_cache_suspected_false_hits_total` tells about yours.
"""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from penstock.backends.embedder import Embedder, Embeddings
from penstock.backends.encoder import EncoderBackend
from penstock.caching.semantic import Embeds, SemanticIndex
from penstock.caching.store import CacheKey, MemoryStore
from penstock.interpreter import module

PAIRS = Path(__file__).parent / "data" / "semantic_pairs.tsv"


@dataclass(frozen=True, slots=True)
class Pair:
    kind: str
    first: str
    second: str

    @property
    def held_out(self) -> bool:
        return hashlib.sha256(f"{self.first}\t{self.second}".encode()).digest()[0] % 2 == 0

    @property
    def should_hit(self) -> bool:
        return self.kind == "paraphrase"


def load_pairs() -> list[Pair]:
    return [Pair(*line.split("\t")) for line in PAIRS.read_text(encoding="utf-8").splitlines()]


class Prepared:
    """An embedder that knows the questions of all pairs already: one batch for all of them."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self._known: dict[str, np.ndarray] = {}

    @classmethod
    async def of(cls, embedder: Embedder, pairs: Sequence[Pair]) -> Prepared:
        prepared = cls(embedder)
        await prepared.embed(sorted({question for pair in pairs for question in (pair.first, pair.second)}))
        return prepared

    async def embed(self, texts: Sequence[str], *, priority: int = 0) -> Embeddings:
        missing = [text for text in dict.fromkeys(texts) if text not in self._known]
        if missing:
            self._known.update(
                zip(missing, (await self._embedder.embed(missing, priority=priority)).vectors, strict=True)
            )
        return Embeddings(np.stack([self._known[text] for text in texts]), [])


class Decider:
    """The cache's own search, on one question at a time."""

    def __init__(self, embedder: Embeds, threshold: float) -> None:
        self._embedder = embedder
        self.store = MemoryStore(2**28, 3600, 100_000)
        self.index = SemanticIndex(self.store, embedder, threshold)
        self._partitions = 0

    async def same(self, known: str, asked: str) -> bool:
        """Whether `asked` would get the answer to `known`."""
        self._partitions += 1
        partition = CacheKey("t", "m", str(self._partitions))
        await self.add(partition, known)
        return bool((await self.index.search(partition, asked)).matches)

    async def add(self, partition: CacheKey, question: str) -> None:
        vector = (await self._embedder.embed([question])).vectors[0].tobytes()
        await self.index.add(partition, question, question, vector)


async def collisions(decider: Decider, pairs: list[Pair]) -> tuple[int, list[tuple[str, str]]]:
    """Every question against all others that are no paraphrase of it: how many comparisons, and the false hits."""
    group: dict[str, str] = {}

    def root(question: str) -> str:
        while group.setdefault(question, question) != question:
            question = group[question]
        return question

    for pair in pairs:
        if pair.should_hit:
            group[root(pair.first)] = root(pair.second)
    questions = sorted({question for pair in pairs for question in (pair.first, pair.second)})
    everything = CacheKey("t", "m", "everything")
    for question in questions:
        await decider.add(everything, question)
    false = []
    for question in questions:
        for match in (await decider.index.search(everything, question)).matches:
            if root(match.digest) != root(question):
                false.append((question, match.digest))
    return len(questions) * (len(questions) - 1), false


async def measure(endpoint: str, threshold: float, show: bool, console: Console) -> bool:
    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    embedder = Embedder("minilm", "minilm", EncoderBackend(endpoint), wait_s=60)
    pairs = load_pairs()
    begin = time.perf_counter()
    decider = Decider(await Prepared.of(embedder, pairs), threshold)
    embedded = time.perf_counter() - begin
    hits: Counter[tuple[bool, str]] = Counter()
    totals: Counter[tuple[bool, str]] = Counter()
    begin = time.perf_counter()
    for pair in pairs:
        hit = await decider.same(pair.first, pair.second)
        totals[pair.held_out, pair.kind] += 1
        hits[pair.held_out, pair.kind] += hit
        # The held-out part is never shown: a verifier changed after looking at it could no longer be measured on it.
        if show and hit != pair.should_hit and not pair.held_out:
            say(f"{'false hit' if hit else 'missed   '}  {pair.kind:<12} {pair.first}  |  {pair.second}")
    each = (time.perf_counter() - begin) / len(pairs)
    say(f"threshold {threshold}, {len(pairs)} pairs")
    say(f"{embedded:.1f} s until the vectors of all questions, then {each * 1000:.2f} ms per decision\n")
    say(f"{'kind':<14}{'seen':>14}{'held out':>14}")
    for kind in sorted({pair.kind for pair in pairs}):
        cells = (f"{hits[part, kind]} of {totals[part, kind]}" for part in (False, True))
        say(f"{kind:<14}" + "".join(f"{cell:>14}" for cell in cells))
    false, paraphrases = [], []
    for part in (False, True):
        adversarial = [(part, pair.kind) for pair in pairs if pair.held_out == part and not pair.should_hit]
        false.append(sum(hits[entry] for entry in set(adversarial)) / len(adversarial))
        paraphrases.append(hits[part, "paraphrase"] / totals[part, "paraphrase"])
    say(f"\n{'false hits':<14}" + "".join(f"{share:>14.1%}" for share in false))
    say(f"{'paraphrases':<14}" + "".join(f"{share:>14.1%}" for share in paraphrases))
    compared, wrong = await collisions(decider, pairs)
    say(f"\nevery question against all others: {len(wrong)} false hits in {compared:,} comparisons")
    await embedder.close()
    return false[1] <= 0.01 and paraphrases[1] > 0.6 and not wrong


def main(threshold: float, show: bool, console: Console) -> bool:
    """Measures, prints, and says whether the cache is right often enough."""
    with tempfile.TemporaryDirectory(prefix="ps-") as folder:
        endpoint = f"ipc://{folder}/encoder"
        engine = subprocess.Popen(
            [*module("penstock"), "engine", "minilm", "--endpoint", endpoint, "--log-level", "warning"]
        )
        try:
            return asyncio.run(measure(endpoint, threshold, show, console))
        finally:
            engine.terminate()
            engine.wait()
