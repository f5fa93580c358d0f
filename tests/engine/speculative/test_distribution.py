"""R-ENG-7: what is sampled with speculation is distributed as the target model says, for both proposers.

A model of seven tokens: all texts of four tokens can be listed, and their probabilities computed by the reference.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from pathlib import Path

import pytest
import torch

from penstock.engine.core import Engine
from penstock.engine.request import Request, SamplingParams
from tests.engine.harness import generate, make_engine
from tests.engine.speculative.forced import eager_engine
from tests.engine.tiny import Reference, write_checkpoint

VOCAB, LENGTH, DRAWS = 7, 4, 1500
TEMPERATURE, TOP_K = 0.9, 5
PROMPT = [0, 1, 2, 3, 4, 5, 6, 1, 3, 5, 0, 2, 4, 6, 0, 3, 6, 2, 5, 1, 4, 0, 0, 4, 1, 2, 2, 6, 5, 3, 3, 1, 1]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama-gqa", tmp_path_factory.mktemp("seven"), spread=0.4, vocab_size=VOCAB)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seven-draft")
    return write_checkpoint("qwen2-bias", folder, spread=0.3, vocab_size=VOCAB, num_hidden_layers=1)


@pytest.fixture(scope="module")
def exact(checkpoint: Path) -> dict[tuple[int, ...], float]:
    """Probability of every text of `LENGTH` tokens after the prompt, filtered as the requests ask."""
    reference = Reference(checkpoint)
    beginnings = torch.tensor(list(itertools.product(range(VOCAB), repeat=LENGTH - 1)))
    batch = torch.cat((torch.tensor([PROMPT]).expand(len(beginnings), -1), beginnings), dim=1)
    with torch.inference_mode():
        logits = reference.model(batch).logits[:, len(PROMPT) - 1 :].float() / TEMPERATURE
    weakest = logits.topk(TOP_K, dim=-1).values[..., -1:]
    logprobs = logits.masked_fill(logits < weakest, float("-inf")).log_softmax(-1)
    begun = logprobs[:, :-1].gather(2, beginnings.unsqueeze(2)).squeeze(2).sum(1, keepdim=True)
    scores = (begun + logprobs[:, -1]).exp().reshape(-1)
    return dict(zip(itertools.product(range(VOCAB), repeat=LENGTH), scores.tolist(), strict=True))


def chi_square(counts: Counter[tuple[int, ...]], exact: dict[tuple[int, ...], float], draws: int) -> tuple[float, int]:
    """The statistic and its degrees of freedom; rare texts are taken together."""
    statistic = rare_expected = 0.0
    rare_seen = cells = 0
    for text, probability in exact.items():
        expected = probability * draws
        if expected < 8:
            rare_expected, rare_seen = rare_expected + expected, rare_seen + counts[text]
            continue
        statistic += (counts[text] - expected) ** 2 / expected
        cells += 1
    if rare_expected > 0:
        statistic += (rare_seen - rare_expected) ** 2 / rare_expected
        cells += 1
    return statistic, cells - 1


def deviation(counts: Counter[tuple[int, ...]], exact: dict[tuple[int, ...], float]) -> float:
    """In standard deviations. The cube root of a chi-square over its degrees of freedom is nearly normal."""
    statistic, freedom = chi_square(counts, exact, DRAWS)
    assert freedom > 30
    spread = math.sqrt(2 / (9 * freedom))
    return float(((statistic / freedom) ** (1 / 3) - (1 - spread**2)) / spread)


def draw(engine: Engine, first_seed: int) -> Counter[tuple[int, ...]]:
    requests = [
        Request(
            f"s{seed}",
            PROMPT,
            SamplingParams(max_tokens=LENGTH, temperature=TEMPERATURE, top_k=TOP_K, seed=seed * 7919),
        )
        for seed in range(first_seed, first_seed + DRAWS)
    ]
    return Counter(tuple(text) for text in generate(engine, *requests).values())


@pytest.mark.parametrize("kind", ["ngram", pytest.param("draft", marks=pytest.mark.slow)])
def test_sampled_texts_have_the_targets_distribution(
    checkpoint: Path, draft: Path, exact: dict[tuple[int, ...], float], kind: str
) -> None:
    settings = {"draft_model": str(draft)} if kind == "draft" else {}
    engine = eager_engine(checkpoint, speculation=kind, max_running=32, num_blocks=200, **settings)
    assert engine.speculation is not None
    engine.speculation.most_tokens = 256  # draft tokens for every sequence, not only for as many as usually pay
    counts = draw(engine, 0)
    load = engine.load_snapshot()
    assert load.accepted_tokens > 300 and load.draft_tokens - load.accepted_tokens > 300
    assert abs(deviation(counts, exact)) < 4


def test_the_test_would_notice_a_bias(exact: dict[tuple[int, ...], float]) -> None:
    """Moving one draw in twenty from one text to another is too much."""
    counts = Counter({text: round(probability * DRAWS) for text, probability in exact.items()})
    ordered = sorted(exact, key=lambda text: -exact[text])
    counts[ordered[0]] += DRAWS // 20
    counts[ordered[1]] -= DRAWS // 20
    assert deviation(counts, exact) > 4


def test_the_same_seed_gives_the_same_text_with_and_without(checkpoint: Path, draft: Path) -> None:
    engines = [
        make_engine(checkpoint),
        eager_engine(checkpoint),
        eager_engine(checkpoint, speculation="draft", draft_model=str(draft)),
    ]
    requests = [Request(f"r{i}", PROMPT, SamplingParams(max_tokens=40, temperature=1.0, seed=i)) for i in range(10)]
    texts = [generate(engine, *requests) for engine in engines]
    assert texts[0] == texts[1] == texts[2]
    assert all(engine.load_snapshot().accepted_tokens > 50 for engine in engines[1:])
