"""Blocks that one engine computed and another uses: the same tokens, without computing the prompt again (R-ENG-11)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.adapters.spec import AdapterSpec
from penstock.engine.core import Engine
from penstock.engine.kv.exchange import BlockExchange
from penstock.engine.request import Request
from penstock.errors import ConfigError
from tests.engine.adapters.files import write_adapter
from tests.engine.harness import assert_idle, carry, collect, drain, generate, greedy, make_engine
from tests.engine.tiny import write_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama-gqa", tmp_path_factory.mktemp("llama"), spread=0.5)


def text(number: int, length: int) -> list[int]:
    return [(number * 31 + 7 * i * i + 3 * i) % 199 for i in range(length)]


def exchange_of(engine: Engine) -> BlockExchange:
    assert engine.exchange is not None
    return engine.exchange


def hand_over(giver: Engine, taker: Engine, request: Request) -> None:
    carried = carry(giver, taker, exchange_of(taker).names(request))
    exchange_of(taker).release(carried)


@pytest.mark.parametrize(
    "settings",
    [{}, {"kv_dtype": "int8"}, {"kv_dtype": "fp8"}, {"speculation": "ngram"}],
    ids=str,
)
def test_an_engine_goes_on_behind_blocks_that_another_computed(folder: Path, settings: dict[str, Any]) -> None:
    giver = make_engine(folder, role="prefill", **settings)
    taker = make_engine(folder, role="decode", **settings)
    request = greedy("r", text(1, 140), 20)
    expected = generate(giver, request)
    hand_over(giver, taker, request)
    taker.submit(request)
    deltas = drain(taker)
    assert collect(deltas) == expected
    assert deltas[0].cached_tokens == 128, "all but the block of the last token"
    load = taker.load_snapshot()
    assert load.handover is not None and load.handover.blocks_in == 8
    assert load.handover.bytes_in == 8 * taker.runner.kv.shape.block_bytes
    for engine in (giver, taker):
        assert_idle(engine)


def test_only_what_has_the_right_name_is_used(folder: Path) -> None:
    """Another tenant's prompt, or another adapter's, has other names: its blocks are never found."""
    giver, taker = (make_engine(folder, role=role) for role in ("prefill", "decode"))
    theirs = Request("a", text(1, 100), greedy("", [], 5).params, cache_salt="tenant a")
    ours = Request("b", text(1, 100), greedy("", [], 5).params, cache_salt="tenant b")
    generate(giver, theirs)
    hand_over(giver, taker, theirs)
    names = exchange_of(taker).names(ours)
    assert exchange_of(taker).present(names) == 0 and exchange_of(giver).present(names) == 0
    taker.submit(ours)
    assert drain(taker)[0].cached_tokens == 0
    unknown = Request("c", text(1, 100), greedy("", [], 5).params, adapter="nobody")
    assert exchange_of(taker).names(unknown) == [], "weights that are not here name nothing"


def test_blocks_computed_with_an_adapter_are_for_that_adapter(folder: Path, tmp_path: Path) -> None:
    """Both engines name them by the adapter's weights; what it is called does not matter."""
    files = [write_adapter(tmp_path / str(seed), folder, seed=seed) for seed in range(2)]
    giver = make_engine(folder, role="prefill", adapters=(AdapterSpec("tuned", str(files[0])),))
    specs = (AdapterSpec("ours", str(files[0]), pinned=True), AdapterSpec("another", str(files[1]), pinned=True))
    taker = make_engine(folder, role="decode", adapters=specs)
    request = Request("r", text(1, 140), greedy("", [], 12).params, adapter="tuned")
    expected = generate(giver, request)
    for spec in specs:  # read, as it is by the first request that names it
        generate(taker, Request("first", [1, 2], greedy("", [], 2).params, adapter=spec.name))
    ours = replace(request, adapter="ours")
    assert exchange_of(taker).names(ours) == exchange_of(giver).names(request)
    hand_over(giver, taker, ours)
    assert exchange_of(taker).present(exchange_of(taker).names(replace(request, adapter="another"))) == 0
    assert exchange_of(taker).present(exchange_of(taker).names(replace(request, adapter=""))) == 0
    taker.submit(ours)
    deltas = drain(taker)
    assert collect(deltas) == expected and deltas[0].cached_tokens == 128


def test_blocks_on_their_way_out_to_the_host_are_not_overwritten(folder: Path) -> None:
    """What comes in takes the place of what was evicted, whose copy to the host tier had not been made yet."""
    giver = make_engine(folder, role="prefill")
    taker = make_engine(folder, role="decode", num_blocks=10, host_memory=1 << 20)
    old, new = greedy("old", text(1, 150), 4), greedy("new", text(2, 150), 4)
    expected = generate(taker, old) | generate(giver, new)
    hand_over(giver, taker, new)
    assert generate(taker, new)["new"] == expected["new"]
    taker.submit(greedy("old", text(1, 150), 4))
    deltas = drain(taker)
    assert collect(deltas)["old"] == expected["old"] and deltas[0].cached_tokens == 144
    assert_idle(taker)


def test_without_room_fewer_come_in_and_the_rest_is_computed(folder: Path) -> None:
    giver = make_engine(folder, role="prefill")
    taker = make_engine(folder, role="decode", num_blocks=12)
    request = greedy("r", text(3, 150), 8)
    expected = generate(giver, request)
    taker.submit(greedy("other", text(4, 90), 6))
    taker.step()
    held = carry(giver, taker, exchange_of(giver).names(request))
    assert 0 < len(held) < 9
    exchange_of(taker).release(held)
    assert generate(taker, request)["r"] == expected["r"]
    assert_idle(taker)


@pytest.mark.parametrize("few", [False, True])
def test_of_sliding_windows_the_last_one_is_handed_over(tmp_path: Path, few: bool) -> None:
    """A window of 40 tokens: three blocks, however long the prompt; blocks before it are gone on both sides."""
    folder = write_checkpoint("mistral-window", tmp_path, spread=0.5)
    small = {"num_blocks": 9, "token_budget": 32} if few else {}
    giver, taker = (make_engine(folder, role=role, **small) for role in ("prefill", "decode"))
    assert giver.info.kv_format == taker.info.kv_format != ""
    for number, length in ((1, 150), (2, 30), (3, 97)):
        request = greedy(f"r{number}", text(number, length), 12)
        expected = generate(make_engine(folder), request)
        assert generate(giver, greedy("p", request.prompt, 1))
        exchange = exchange_of(taker)
        names = exchange.names(request)
        usable, lacking = exchange.missing(names)
        assert usable == 0 and lacking == names[-3:]
        held = carry(giver, taker, lacking)
        assert exchange.missing(names) == (len(names), [])
        again = exchange.hold(names)
        assert again == held
        exchange.release(again)
        exchange.release(held)
        taker.submit(request)
        deltas = drain(taker)
        assert collect(deltas) == expected and deltas[0].cached_tokens == len(names) * 16
        for engine in (giver, taker):
            assert_idle(engine)


def test_roles_that_cannot_be_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="prefix_cache"):
        make_engine(folder, role="decode", prefix_cache=False)
    assert make_engine(folder).exchange is None, "an engine for everything pays for nothing"


def test_engines_that_differ_say_so(folder: Path, tmp_path: Path) -> None:
    same = {make_engine(folder, role=role).info.kv_format for role in ("prefill", "decode")}
    assert len(same) == 1 and "" not in same
    others = [make_engine(folder, role="prefill", **differs).info.kv_format for differs in (
        {"kv_dtype": "int8"}, {"block_size": 32}, {"weights": "int8"},
    )]  # fmt: skip
    trained = make_engine(write_checkpoint("llama-gqa", tmp_path, spread=0.4), role="prefill").info.kv_format
    assert len({*same, *others, trained}) == 5
