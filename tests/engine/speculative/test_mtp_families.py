"""MTP layers that no library has, as drafters: they draft what plain implementations of the published definitions do,
and one that is made to know the next token is right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.bench.soak.engines import verify_everything
from penstock.engine.core import Engine
from penstock.engine.request import Request, SamplingParams
from penstock.engine.sequence import Sequence
from penstock.engine.speculative.head_proposer import HeadProposer
from tests.engine.harness import assert_idle, generate, greedy, make_engine
from tests.engine.parallel.threads import threaded_engine
from tests.engine.speculative.forced import eager_engine
from tests.engine.speculative.heads import noted_drafts
from tests.engine.speculative.plain_mtp import PLAIN, PlainDrafter, known_after
from tests.engine.speculative.test_same_text import any_requests, run

FURTHER = [pytest.param(family, marks=pytest.mark.slow) for family in [*PLAIN][1:]]
EACH = [next(iter(PLAIN)), *FURTHER]
"""Of what one family shows for all: the others are slower."""
PROMPT = [i * 7 % 199 for i in range(70)]
Drawn = tuple[list[int], list[int], Tensor]
"""The tokens before a draft, the draft, and the logits that it was drawn from."""


def noted_scores(engine: Engine) -> list[Drawn]:
    """Fills with what is drafted while the engine runs, for one sequence at a time."""
    found: list[Drawn] = []
    scores: list[Tensor] = []
    proposer: Any = engine.speculation.proposer  # type: ignore[union-attr]
    assert isinstance(proposer, HeadProposer)
    decoder = proposer.runner.executor._decoder  # type: ignore[attr-defined]
    propose, head = proposer.propose, decoder.head

    def noting_head(x: Tensor) -> Tensor:
        logits: Tensor = head(x)
        scores.append(logits[-1:].float())  # the first step may compute known tokens too
        return logits

    def noting(depths: dict[Sequence, int]) -> dict[Sequence, list[int]]:
        scores.clear()
        drafts = propose(depths)
        found.extend((list(seq.tokens), list(draft), torch.cat(scores)) for seq, draft in drafts.items() if draft)
        return drafts

    object.__setattr__(decoder, "head", noting_head)
    proposer.propose = noting
    return found


def check(drawn: list[Drawn], reference: PlainDrafter, at_least: int) -> None:
    assert len(drawn) >= at_least
    for tokens, draft, scores in reversed(drawn):  # the longest first, of which the reference computes the others
        torch.testing.assert_close(scores, reference.scores(tokens, draft), rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("family", PLAIN)
def test_drafts_have_the_scores_of_the_definition(family: str, tmp_path: Path) -> None:
    """Of a prompt in chunks, from the prefix cache, and behind rejected drafts."""
    target = PLAIN[family].write(family, tmp_path)
    plain = make_engine(target, num_blocks=200)
    engine = eager_engine(target, speculation="auto", speculation_depth=3, token_budget=48, num_blocks=200)
    assert engine.config.speculation == "mtp"
    drawn = noted_scores(engine)
    for request in (greedy("a", PROMPT, 10), greedy("b", [5, 4], 6), greedy("c", PROMPT, 6)):
        assert generate(engine, request) == generate(plain, request)
    check(drawn, PLAIN[family](target), at_least=8)
    assert_idle(engine)


@pytest.mark.parametrize("family", EACH)
def test_any_mix_of_requests_gets_the_same_answers(family: str, tmp_path: Path) -> None:
    """Sampled too, with shared prefixes, and preempted."""
    target = PLAIN[family].write(family, tmp_path)
    requests = any_requests(3, count=6)
    expected = run(make_engine(target, num_blocks=400), requests)
    engine = eager_engine(target, speculation="mtp", num_blocks=14, token_budget=64)
    got = run(engine, requests)
    assert {name: delta.tokens for name, delta in got.items()} == {n: delta.tokens for n, delta in expected.items()}
    load = engine.load_snapshot()
    assert load.draft_tokens > 50 and load.preemptions > 0
    assert_idle(engine)


@pytest.mark.parametrize("part", [pytest.param("embedding", marks=pytest.mark.slow), "hidden"])
@pytest.mark.parametrize("family", PLAIN)
def test_one_that_knows_the_next_token_is_always_right(family: str, part: str, tmp_path: Path) -> None:
    """From either of the things it reads, at any temperature."""
    target = PLAIN[family].write_knowing(family, tmp_path, part)
    engine = eager_engine(target, speculation="mtp", speculation_depth=4, num_blocks=100)
    wanted = [11]
    for _ in range(26):
        wanted.append(known_after(wanted[-1]))
    for params in ({"temperature": 0.0}, {"temperature": 0.4, "seed": 5}):
        before = engine.steps
        got = generate(engine, Request("a", [7, 11], SamplingParams(max_tokens=26, **params)))
        assert got["a"] == wanted[1:]
        assert engine.steps - before == 1 + 5
    load = engine.load_snapshot()
    assert load.accepted_tokens == load.draft_tokens > 0


SETTINGS: list[Any] = [
    {"deterministic": True},
    pytest.param({"weights": "int8"}, marks=pytest.mark.slow),
    pytest.param({"kv_dtype": "int8"}, marks=pytest.mark.slow),
    pytest.param({"kv_dtype": "fp8"}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("family", EACH)
def test_settings_of_the_engine(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    target = PLAIN[family].write(family, tmp_path)
    requests = [greedy("a", PROMPT, 14), greedy("b", [3, 1, 4], 14)]
    engine = eager_engine(target, speculation="mtp", num_blocks=100, **settings)
    assert generate(engine, *requests) == generate(make_engine(target, **settings), *requests)
    assert engine.load_snapshot().draft_tokens > 10
    assert_idle(engine)


RANKS: list[Any] = [
    (2, 2, {}),
    pytest.param(1, 3, {}, marks=pytest.mark.slow),
    pytest.param(2, 1, {}, marks=pytest.mark.slow),
    pytest.param(2, 1, {"expert_parallel": True, "attention_parallel": "data"}, marks=pytest.mark.slow),
    pytest.param(2, 2, {"expert_parallel": True, "attention_parallel": "data"}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("tensor", "pipeline", "settings"), RANKS)
@pytest.mark.parametrize("family", EACH)
def test_ranks_have_the_same_drafts(
    family: str, tensor: int, pipeline: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    target = PLAIN[family].write(family, tmp_path)
    requests = [greedy("a", PROMPT, 14), greedy("b", [3, 1, 4], 14)]
    alone = eager_engine(target, speculation="mtp", num_blocks=100)
    expected = generate(alone, *requests)
    with threaded_engine(target, tensor, pipeline, speculation="mtp", num_blocks=100, **settings) as engine:
        assert engine.speculation is not None
        verify_everything(engine.speculation)
        drafts = noted_drafts(engine)
        assert generate(engine, *requests) == expected
        load, wanted = engine.load_snapshot(), alone.load_snapshot()
        assert load.draft_tokens > 10 and load.accepted_tokens == wanted.accepted_tokens
    reference = PLAIN[family](target)
    for tokens, draft in drafts:
        assert reference.scores(tokens, draft).argmax(-1).tolist() == draft


@pytest.mark.slow
@pytest.mark.parametrize("family", PLAIN)
def test_what_it_reads_returns_from_host_memory(family: str, tmp_path: Path) -> None:
    target = PLAIN[family].write(family, tmp_path)
    prompts = [[(29 * i + n) % 199 for i in range(90)] for n in range(4)]
    requests = [greedy(f"r{n}", prompt, 8) for n, prompt in enumerate([*prompts, prompts[0]])]
    expected = generate(make_engine(target, num_blocks=100), *requests)
    engine = eager_engine(target, speculation="mtp", num_blocks=14, max_running=2, host_memory=8 << 20)
    drawn = noted_scores(engine)
    for request in requests:
        assert generate(engine, request)[request.request_id] == expected[request.request_id]
    assert engine.load_snapshot().host_hit_tokens > 0
    check(drawn, PLAIN[family](target), at_least=8)
    assert_idle(engine)
