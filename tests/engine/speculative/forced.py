"""Engines that speculate whether it pays or not, and draft tokens whose quality a test decides."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.bench.soak.engines import verify_everything
from penstock.engine.core import Engine
from penstock.engine.sequence import Sequence
from penstock.engine.speculative.speculation import Proposer
from tests.engine.harness import make_engine


class Oracle:
    """Draft tokens from known texts, each token wrong with a given probability."""

    def __init__(self, texts: dict[str, list[int]], wrong: float, vocab_size: int, seed: int = 0) -> None:
        self.texts = texts
        self.wrong = wrong
        self.vocab_size = vocab_size
        self.rng = random.Random(seed)

    def outlook(self, seq: Sequence) -> tuple[float, int]:
        return 0.9, self.rng.choice((0, 1, 3, 6))

    def seconds(self, sequences: int) -> float:
        return 0.0

    def propose(self, depths: dict[Sequence, int]) -> dict[Sequence, list[int]]:
        drafts: dict[Sequence, list[int]] = {}
        for seq, depth in depths.items():
            at = len(seq.tokens) - seq.prompt_len
            right = self.texts[seq.id][at : at + depth]
            right += [0] * (depth - len(right))
            drafts[seq] = [
                self.rng.randrange(self.vocab_size) if self.rng.random() < self.wrong else token for token in right
            ]
        return drafts

    def learn(self, seq: Sequence, drafts: tuple[int, ...], tokens: list[int]) -> None:
        assert seq.tokens[-len(tokens) :] == tokens

    def forget(self, seq: Sequence) -> None:
        pass

    def forget_caches(self) -> None:
        pass


def eager_engine(folder: Path, proposer: Callable[[Engine], Proposer] | None = None, **settings: Any) -> Engine:
    """An engine that verifies every draft token its proposer makes."""
    engine = make_engine(folder, **{"speculation": "ngram", **settings})
    speculation = engine.speculation
    assert speculation is not None
    verify_everything(speculation)
    if proposer is not None:
        speculation.proposer = proposer(engine)
    return engine
