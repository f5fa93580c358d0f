"""Prompts of models with recurrent layers computed by one engine and continued by another (R-ENG-11, R-ENG-17): the
state at the end of the last full block travels with the blocks."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.core import Engine
from penstock.engine.kv.block_hash import is_state
from penstock.engine.parallel import blocks
from penstock.errors import ConfigError
from tests.engine.harness import assert_idle, carry, collect, drain, generate, greedy, make_engine
from tests.engine.parallel.threads import threaded_engine
from tests.engine.tiny import write_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("qwen3-next", tmp_path_factory.mktemp("hybrid"))


def text(number: int, length: int) -> list[int]:
    return [(number * 31 + 7 * i * i + 3 * i) % 199 for i in range(length)]


def hand_over(giver: Engine, taker: Engine, prompt: list[int], count: int = 12) -> None:
    """The prompt's blocks and state, and the answer behind them."""
    request = greedy("r", prompt, count)
    full = (len(prompt) - 1) // 16
    expected = generate(giver, request)["r"]
    exchange = taker.exchange
    assert exchange is not None and giver.exchange is not None
    names = exchange.names(request)
    usable, lacking = exchange.missing(names)
    assert (usable, len(lacking)) == (0, full + 1) and is_state(lacking[-1])
    assert all(map(giver.exchange.has, lacking))
    exchange.release(carry(giver, taker, lacking))
    assert exchange.missing(names) == (full, [])
    taker.submit(greedy("s", prompt, count))
    deltas = drain(taker)
    assert collect(deltas)["s"] == expected
    assert deltas[0].cached_tokens == full * 16, "all but the block of the last token"
    assert exchange.counts.blocks_in == full
    for engine in (giver, taker):
        assert_idle(engine)


@pytest.mark.parametrize(
    "settings",
    [{}, {"kv_dtype": "int8"}, {"kv_dtype": "fp8"}, {"speculation": "ngram"}, {"host_memory": 1 << 22}],
    ids=str,
)
def test_an_engine_goes_on_behind_a_state_that_another_computed(folder: Path, settings: dict[str, Any]) -> None:
    giver, taker = (make_engine(folder, role=role, **settings) for role in ("prefill", "decode"))
    assert giver.info.kv_format == taker.info.kv_format != ""
    hand_over(giver, taker, text(1, 140))


def test_only_the_state_travels_where_the_blocks_are_here(folder: Path) -> None:
    giver, taker = (make_engine(folder, role=role) for role in ("prefill", "decode"))
    prompt = text(1, 140)
    hand_over(giver, taker, prompt)
    longer = greedy("longer", prompt[:128] + text(2, 60), 8)
    expected = generate(giver, longer)["longer"]
    exchange = taker.exchange
    assert exchange is not None and taker.scheduler.allocator.states is not None
    usable, lacking = exchange.missing(exchange.names(longer))
    assert usable == 8 and len(lacking) == 4, "three blocks, and the state behind them"
    exchange.release(carry(giver, taker, lacking))
    assert generate(taker, longer)["longer"] == expected
    for name in exchange.names(longer):
        taker.scheduler.allocator.states.pool.drop(name)
    usable, lacking = exchange.missing(exchange.names(longer))
    assert usable == 0 and [is_state(name) for name in lacking] == [True]
    exchange.release(carry(giver, taker, lacking))
    taker.submit(greedy("again", longer.prompt, 8))
    deltas = drain(taker)
    assert collect(deltas)["again"] == expected and deltas[0].cached_tokens == 176
    assert_idle(taker)


def test_without_room_for_a_state_it_is_computed(folder: Path) -> None:
    """States that no sequence may need are all held: the blocks come in, the state does not."""
    giver = make_engine(folder, role="prefill")
    taker = make_engine(folder, role="decode", max_running=1, kept_states=1)
    request = greedy("r", text(1, 100), 8)
    expected = generate(giver, request)["r"]
    exchange, store = taker.exchange, taker.scheduler.allocator.states
    assert exchange is not None and store is not None
    held = store.pool.allocate()
    _, lacking = exchange.missing(exchange.names(request))
    came = carry(giver, taker, lacking)
    assert len(came) == len(lacking) - 1
    exchange.release(came)
    assert generate(taker, request)["r"] == expected
    store.pool.release(held)
    assert_idle(taker)


def test_an_engine_that_keeps_no_state_has_no_role(folder: Path) -> None:
    with pytest.raises(ConfigError, match="kept_states: 0"):
        make_engine(folder, role="prefill", kept_states=0)
    with pytest.raises(ConfigError, match="prefix_cache"):
        make_engine(folder, role="decode", prefix_cache=False)


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


GRIDS = [slow((2, 1), (1, 1)), ((1, 2), (2, 1)), slow((2, 2), (1, 4)), slow((1, 1), (2, 2))]


@pytest.mark.parametrize(("giving", "taking"), GRIDS)
def test_states_cross_between_grids(folder: Path, giving: tuple[int, int], taking: tuple[int, int]) -> None:
    check_grids(folder, giving, taking)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_states_cross_beside_coarse_caches(folder: Path, kind: str) -> None:
    check_grids(folder, (2, 1), (1, 2), kv_dtype=kind)


@pytest.mark.slow
@pytest.mark.parametrize(("giving", "taking"), [((1, 2), (2, 1)), ((2, 2), (1, 1))])
def test_states_of_other_layers_cross_too(tmp_path: Path, giving: tuple[int, int], taking: tuple[int, int]) -> None:
    for family in ("granite4-hybrid", "falcon-h1", "mamba2", "lfm2", "kimi-linear"):
        check_grids(write_checkpoint(family, tmp_path / family), giving, taking)


SEVERAL = {
    "deepseek-v4": {},
    "qwen4-exp": {"ple_layer_ids": [1, 4]},
    "glm5-next": {},
}
"""Families whose layers keep things of several kinds, and sizes with which stages have them in other orders."""


@pytest.mark.parametrize("family", ["deepseek-v4", slow("qwen4-exp")])
@pytest.mark.parametrize(("giving", "taking"), GRIDS)
def test_several_kinds_cross_between_grids(
    tmp_path: Path, family: str, giving: tuple[int, int], taking: tuple[int, int]
) -> None:
    check_grids(write_checkpoint(family, tmp_path, **SEVERAL[family]), giving, taking)


@pytest.mark.slow
@pytest.mark.parametrize("family", SEVERAL)
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_several_kinds_cross_in_few_bits(tmp_path: Path, family: str, kind: str) -> None:
    check_grids(write_checkpoint(family, tmp_path, **SEVERAL[family]), (2, 1), (1, 2), kv_dtype=kind)


@pytest.mark.slow
@pytest.mark.parametrize("family", SEVERAL)
def test_several_kinds_cross_without_shared_memory(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "open_shared", lambda *_: None)
    check_grids(write_checkpoint(family, tmp_path, **SEVERAL[family]), (2, 1), (1, 2))


def test_a_rank_that_shares_no_memory_sends_its_part_of_a_state(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "open_shared", lambda *_: None)
    check_grids(folder, (2, 1), (1, 2))


def check_grids(folder: Path, giving: tuple[int, int], taking: tuple[int, int], **settings: Any) -> None:
    alone = make_engine(folder, role="prefill", **settings)
    with ExitStack() as stack:

        def open_(role: str, grid: tuple[int, int]) -> Engine:
            if grid == (1, 1):
                return make_engine(folder, role=role, **settings)
            return stack.enter_context(threaded_engine(folder, *grid, role=role, **settings))

        giver, taker = open_("prefill", giving), open_("decode", taking)
        assert giver.info.kv_format == taker.info.kv_format == alone.info.kv_format
        hand_over(giver, taker, text(3, 140))
        kv = alone.runner.kv.shape
        assert taker.exchange is not None
        assert taker.exchange.counts.bytes_in == 8 * kv.block_bytes + kv.state_bytes
