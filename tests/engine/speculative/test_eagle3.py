"""EAGLE-3 heads in both layouts: they draft what a plain implementation drafts, and the text stays the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.engine.core import Engine
from tests.engine.harness import assert_idle, collect, drain, generate, greedy, make_engine
from tests.engine.speculative.forced import eager_engine
from tests.engine.speculative.heads import PlainHead, noted_drafts, write_head, write_original
from tests.engine.speculative.test_same_text import any_requests, run
from tests.engine.tiny import write_checkpoint

LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("original", {}),
    ("original", {"pickled": True, "draft_vocab": 199}),
    ("speculators", {}),
    ("speculators", {"norm_before_residual": False, "hidden": 32}),
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama-gqa", tmp_path_factory.mktemp("target"), spread=0.3, num_hidden_layers=4)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_original(tmp_path_factory.mktemp("head"))


@pytest.fixture(scope="module")
def plain(target: Path) -> Engine:
    return make_engine(target, num_blocks=400)


def drafting(target: Path, head: Path, **settings: object) -> Engine:
    return eager_engine(target, speculation="eagle3", draft_model=str(head), **settings)


@pytest.mark.parametrize(("layout", "changes"), LAYOUTS)
def test_drafts_are_those_of_a_plain_implementation(
    target: Path, plain: Engine, tmp_path: Path, layout: str, changes: dict[str, Any]
) -> None:
    """Behind every number of accepted tokens, in batches, with prompts in chunks and shared prefixes."""
    folder = write_head(layout, tmp_path / "head", **changes)
    engine = drafting(target, folder, speculation_depth=4, token_budget=48)
    drafts = noted_drafts(engine)
    prompt = [i * 7 % 199 for i in range(100)]
    requests = [greedy("a", prompt, 20), greedy("b", [5, 4], 20), greedy("c", prompt[:70], 12)]
    expected = generate(plain, *requests)
    assert generate(engine, *requests) == expected
    engine.submit(greedy("d", prompt, 20))
    assert collect(drain(engine))["d"] == expected["a"]
    reference = PlainHead(folder, target)
    assert len(drafts) > 20
    for tokens, draft in drafts:
        assert draft == reference.draft(tokens, len(draft))
    assert_idle(engine)


@pytest.mark.parametrize("seed", range(2))
def test_any_mix_of_requests_gets_the_same_answers(target: Path, head: Path, plain: Engine, seed: int) -> None:
    requests = any_requests(200 + seed)
    expected = run(plain, requests)
    engine = drafting(target, head, num_blocks=11, token_budget=64)
    got = run(engine, requests)
    assert {name: delta.tokens for name, delta in got.items()} == {n: d.tokens for n, d in expected.items()}
    load = engine.load_snapshot()
    assert load.draft_tokens > 100 and load.preemptions > 0
    assert_idle(engine)
