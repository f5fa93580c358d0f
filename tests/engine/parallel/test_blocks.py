"""KV blocks of several ranks: in the host tier, and between engines of different grids (R-ENG-4, R-ENG-11)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.engine.core import Engine
from penstock.engine.kv.host import Transfers
from penstock.engine.parallel import blocks
from penstock.engine.parallel.blocks import make_shared, open_shared
from penstock.engine.parallel.channel import Move
from penstock.errors import ConfigError
from tests.engine.harness import assert_idle, carry, collect, drain, generate, greedy, make_engine
from tests.engine.parallel.threads import threaded_engine
from tests.engine.tiny import write_checkpoint

HOST = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama-gqa", tmp_path_factory.mktemp("blocks"), spread=0.5)


@pytest.fixture(scope="module")
def alone(folder: Path) -> Engine:
    return make_engine(folder, role="prefill")


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def text(number: int, length: int) -> list[int]:
    return [(number * 31 + 7 * i * i + 3 * i) % 199 for i in range(length)]


def test_copies_arrive_as_they_were_sent() -> None:
    for sent in (Transfers([(1, 5), (7, 2)], {3: 4, 9: 0, 8: 1}), Transfers([(1, 5)]), Transfers(back={3: 4})):
        assert Move.decode(np.frombuffer(Move(sent).encode(), np.int64)).transfers == sent


@pytest.mark.parametrize(("tensor", "pipeline"), [slow(2, 1), (1, 2), slow(4, 1)])
def test_a_conversation_leaves_all_ranks_and_comes_back(
    folder: Path, alone: Engine, tensor: int, pipeline: int
) -> None:
    with threaded_engine(folder, tensor, pipeline, num_blocks=10, host_memory=HOST) as engine:
        requests = [
            greedy("first", text(1, 140), 6),
            greedy("other", text(2, 150), 6),
            greedy("again", text(1, 140), 6),
        ]
        for request in requests[:2]:
            assert generate(engine, request) == generate(alone, request)
        engine.submit(requests[2])
        deltas = drain(engine)
        assert collect(deltas) == generate(alone, requests[2])
        load = engine.load_snapshot()
        assert deltas[0].cached_tokens == 128 and load.restored_blocks == 8
        # The rank with the largest part of a block decides: 2 of 3 layers, or all of them with half of the heads.
        part = {(2, 1): 6144, (1, 2): 8192, (4, 1): 6144}[tensor, pipeline]
        assert load.total_host_blocks == HOST // part
        assert_idle(engine)


@pytest.mark.slow
def test_preempted_sequences_of_several_ranks_are_restored(folder: Path, alone: Engine) -> None:
    requests = [greedy(f"r{i}", text(i, 45), 60) for i in range(4)]
    with threaded_engine(folder, 2, 2, num_blocks=16, host_memory=HOST, host_idle_s=0.0) as engine:
        assert generate(engine, *requests) == generate(alone, *requests)
        load = engine.load_snapshot()
        assert load.preemptions > 0 and load.restored_blocks > 0
        assert_idle(engine)


@pytest.mark.slow
def test_memory_that_is_too_small_on_some_rank_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"rank 1 .*one KV block needs 8 KiB"):  # it has two of three layers
        make_engine(folder, pipeline_parallel=2, host_memory=7000)


GRIDS = [slow((2, 1), (1, 1)), ((1, 2), (2, 1)), slow((4, 1), (2, 2)), slow((1, 1), (1, 3))]


@pytest.fixture
def engines(folder: Path) -> Iterator[Any]:
    with ExitStack() as stack:

        def open_(role: str, grid: tuple[int, int], **settings: Any) -> Engine:
            if grid == (1, 1):
                return make_engine(folder, role=role, **settings)
            return stack.enter_context(threaded_engine(folder, *grid, role=role, **settings))

        yield open_


@pytest.mark.parametrize(("giving", "taking"), GRIDS)
def test_a_prompt_computed_on_one_grid_is_continued_on_another(
    engines: Any, alone: Engine, giving: tuple[int, int], taking: tuple[int, int]
) -> None:
    check(alone, engines("prefill", giving), engines("decode", taking))


def test_a_rank_that_shares_no_memory_sends_its_part(
    engines: Any, alone: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "open_shared", lambda *_: None)
    check(alone, engines("prefill", (2, 1)), engines("decode", (1, 2)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_coarse_caches_cross_between_grids(engines: Any, folder: Path, kind: str) -> None:
    alone = make_engine(folder, role="prefill", kv_dtype=kind)
    check(alone, engines("prefill", (2, 1), kv_dtype=kind), engines("decode", (1, 2), kv_dtype=kind))


def check(alone: Engine, giver: Engine, taker: Engine) -> None:
    """What `giver` computes of a prompt serves `taker`, and the answer is that of one device."""
    assert giver.info.kv_format == taker.info.kv_format == alone.info.kv_format
    request, again = greedy("r", text(1, 140), 12), greedy("s", text(1, 140), 12)
    expected = generate(alone, request)["r"]
    assert generate(giver, request)["r"] == expected
    exchange = taker.exchange
    assert exchange is not None
    exchange.release(carry(giver, taker, exchange.names(request)))
    taker.submit(again)
    deltas = drain(taker)
    assert collect(deltas)["s"] == expected
    assert deltas[0].cached_tokens == 128, "all but the block of the last token"
    assert exchange.counts.blocks_in == 8
    assert exchange.counts.bytes_in == 8 * alone.runner.kv.shape.block_bytes
    for engine in (giver, taker):
        assert_idle(engine)


def test_shared_memory_is_recognized_by_its_mark(tmp_path: Path) -> None:
    memory, fd, mark = make_shared(100)
    assert fd is not None
    path = f"/proc/{os.getpid()}/fd/{fd}"
    seen = open_shared(path, mark, 100)
    assert seen is not None
    memory[3] = 7
    assert seen[3] == 7
    reading, writing = os.pipe()
    for wrong in ((path, "0" * 32, 100), (path, mark, 99), ("", mark, 100), (f"/proc/self/fd/{reading}", mark, 100)):
        assert open_shared(*wrong) is None
    for each in (fd, reading, writing):
        os.close(each)
