"""Models that run through `transformers` hand prompts over between engines of any grids."""

from __future__ import annotations

import random
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.core import Engine
from penstock.engine.parallel import blocks
from tests.engine.foreign import without_families, write_foreign
from tests.engine.harness import assert_idle, carry, collect, drain, generate, greedy, make_engine
from tests.engine.models.test_transformers import prompt_of
from tests.engine.parallel.threads import threaded_engine

Grid = tuple[int, int]
TYPES = ["starcoder2", "mimo_v2_flash", "vaultgemma", "bloom", "gpt_neox", "gemma3n_text"]
GRIDS: list[tuple[Grid, Grid]] = [((1, 2), (2, 1)), ((2, 1), (1, 1)), ((1, 1), (2, 2))]
CASES = [
    pytest.param(name, *grids, marks=() if (name, grids) == ("starcoder2", GRIDS[0]) else pytest.mark.slow)
    for name in TYPES
    for grids in GRIDS
]


@pytest.fixture(autouse=True)
def through_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    without_families(monkeypatch)


def opened(stack: ExitStack, folder: Path, role: str, grid: Grid, **settings: Any) -> Engine:
    if grid == (1, 1):
        return make_engine(folder, role=role, **settings)
    return stack.enter_context(threaded_engine(folder, *grid, role=role, **settings))


def check(folder: Path, giving: Grid, taking: Grid, **settings: Any) -> None:
    alone = make_engine(folder, role="prefill", **settings)
    prompt = prompt_of(random.Random(3), 140)
    expected = generate(alone, greedy("r", prompt, 10))["r"]
    with ExitStack() as stack:
        giver = opened(stack, folder, "prefill", giving, **settings)
        taker = opened(stack, folder, "decode", taking, **settings)
        assert giver.info.kv_format == taker.info.kv_format == alone.info.kv_format
        request = greedy("r", prompt, 10)
        assert generate(giver, request)["r"] == expected
        exchange = taker.exchange
        assert exchange is not None
        exchange.release(carry(giver, taker, exchange.names(request)))
        taker.submit(greedy("s", prompt, 10))
        deltas = drain(taker)
        assert collect(deltas)["s"] == expected
        assert deltas[0].cached_tokens == 128, "all but the block of the last token"
        assert exchange.counts.blocks_in > 0
        for engine in (giver, taker):
            assert_idle(engine)


@pytest.mark.parametrize(("model_type", "giving", "taking"), CASES)
def test_a_prompt_computed_on_one_grid_is_continued_on_another(
    model_type: str, giving: Grid, taking: Grid, tmp_path: Path
) -> None:
    check(write_foreign(model_type, tmp_path), giving, taking)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_coarse_caches_cross_between_grids(kind: str, tmp_path: Path) -> None:
    check(write_foreign("mimo_v2_flash", tmp_path), (2, 1), (1, 2), kv_dtype=kind)


@pytest.mark.slow
def test_a_rank_that_shares_no_memory_sends_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "open_shared", lambda *_: None)
    check(write_foreign("mimo_v2_flash", tmp_path), (2, 1), (1, 2))
