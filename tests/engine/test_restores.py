"""Conversations that come back from the host while others run: a few blocks with every step, and nobody waits for them
but they themselves (R-ENG-4). Whatever happens meanwhile, tokens are right and nothing is leaked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.engine import restores
from penstock.engine.backends.reference.backend import ReferenceBackend
from penstock.engine.core import Engine
from penstock.engine.kv.allocator import BlockAllocator
from penstock.engine.kv.host import HostTier, Transfers
from penstock.engine.kv.pool import BlockPool
from penstock.engine.request import Delta
from penstock.engine.restores import MOST
from tests.engine.harness import assert_idle, collect, drain, generate, greedy, make_engine
from tests.engine.tiny import write_checkpoint

HOST = 8 << 20
LONG = 330
"""Tokens of a conversation: 20 full blocks."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama-gqa", tmp_path_factory.mktemp("llama"), spread=0.5)


@pytest.fixture(autouse=True)
def _one_block_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReferenceBackend, "restore_step_bytes", 1)
    monkeypatch.setattr(restores, "MOST_PIECES", 1)


def text(number: int, length: int = LONG) -> list[int]:
    return [(number * 31 + 7 * i * i + 3 * i) % 199 for i in range(length)]


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[int]]:
    engine = make_engine(folder, num_blocks=400, prefix_cache=False)
    return generate(engine, greedy("stream", text(9, 20), 60), *(greedy(f"{i}", text(i), 5) for i in range(MOST + 2)))


def gone(folder: Path, conversations: int = 1, **settings: Any) -> Engine:
    """An engine whose device has forgotten some conversations that its host has."""
    engine = make_engine(folder, **{"num_blocks": 48, "host_memory": HOST, **settings})
    for number in range(conversations):
        generate(engine, greedy(f"past {number}", text(number), 5))
    most, blocks = engine.info.max_model_len // 16, engine.info.num_blocks
    for first in range(0, blocks, most):
        generate(engine, greedy(f"other {first}", text(50 + first, 16 * min(most, blocks - first) - 8), 1))
    return engine


def stream(engine: Engine) -> Iterator[list[Delta]]:
    """Starts a stream, and then the deltas of each step."""
    engine.submit(greedy("stream", text(9, 20), 60))
    while engine.has_work:
        output = engine.step()
        yield [] if output is None else output.deltas


def restoring(engine: Engine) -> int:
    return engine.load_snapshot().restoring


def host_of(engine: Engine) -> Any:
    return engine.scheduler.allocator.pool.host


def test_others_run_on_while_a_conversation_comes_back(folder: Path, expected: dict[str, list[int]]) -> None:
    engine = gone(folder)
    run, most = engine.runner.mover.run, 0  # type: ignore[union-attr]

    def counting(transfers: Transfers) -> None:
        nonlocal most
        most = max(most, len(transfers.back))
        run(transfers)

    engine.runner.mover.run = counting  # type: ignore[union-attr, method-assign]
    before, deltas, meanwhile = engine.load_snapshot(), list[Delta](), 0
    for number, found in enumerate(stream(engine)):
        deltas += found
        if number == 3:
            engine.submit(greedy("0", text(0), 5))
        if restoring(engine):
            meanwhile += 1
            assert [delta.request_id for delta in found] == ["stream"], "no step passes without a token"
    assert collect(deltas) == {name: expected[name] for name in ("stream", "0")}
    assert most == 1 and meanwhile > 10
    load = engine.load_snapshot()
    assert next(delta for delta in deltas if delta.request_id == "0").cached_tokens == 320
    assert load.restored_blocks - before.restored_blocks == 20 and load.host_restores == 1
    assert load.host_restore_s > 0.0 and load.restoring == 0
    assert_idle(engine)


def test_a_step_copies_as_long_as_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restores, "MOST_PIECES", 6)
    host = HostTier(40, idle_s=1e9, returns_at_once=2)
    allocator = BlockAllocator(BlockPool(60, host), 16)
    waiting = restores.Restores(allocator)
    for blocks, copy_s, compute_s, pieces in ((2, 0.01, 0.035, 3), (6, 0.03, 1.0, 6), (12, 0.06, 0.0, 1)):
        waiting.learn(blocks, copy_s, compute_s)
        assert waiting._pieces == pieces
    waiting.learn(0, 0.0, 1.0)
    assert waiting._pieces == 1, "nothing is known of steps that copy nothing"


def test_alone_a_conversation_comes_back_in_larger_pieces(folder: Path, expected: dict[str, list[int]]) -> None:
    engine = gone(folder)
    steps = engine.steps
    engine.submit(greedy("0", text(0), 5))
    assert engine.step() is None and restoring(engine) == 1, "this step only copies"
    assert engine.steps == steps
    assert collect(drain(engine)) == {"0": expected["0"]}
    assert engine.steps == steps + 5
    assert_idle(engine)


def test_a_request_with_the_same_beginning_waits_for_the_same_copies(
    folder: Path, expected: dict[str, list[int]]
) -> None:
    engine = gone(folder)
    before, deltas = engine.load_snapshot().restored_blocks, list[Delta]()
    for number, found in enumerate(stream(engine)):
        deltas += found
        if number == 3:
            engine.submit(greedy("0", text(0), 5))
        if number == 7:
            engine.submit(greedy("again", text(0), 5))
        if number == 8:
            assert restoring(engine) == 2
    assert collect(deltas) == {"stream": expected["stream"], "0": expected["0"], "again": expected["0"]}
    assert engine.load_snapshot().restored_blocks - before == 20
    assert_idle(engine)


@pytest.mark.parametrize("shared", [False, True])
def test_a_request_that_is_aborted_on_its_way_leaves_nothing(
    folder: Path, expected: dict[str, list[int]], shared: bool
) -> None:
    engine = gone(folder)
    deltas = list[Delta]()
    for number, found in enumerate(stream(engine)):
        deltas += found
        if number == 3:
            engine.submit(greedy("gone", text(0), 5))
        if number == 6 and shared:
            engine.submit(greedy("0", text(0), 5))
        if number == 9:
            assert restoring(engine) == 1 + shared
            engine.abort("gone")
            assert restoring(engine) == int(shared)
            engine.scheduler.allocator.pool.check()
    said = collect(deltas)
    assert said.pop("gone") == []
    assert said == {"stream": expected["stream"]} | ({"0": expected["0"]} if shared else {})
    assert_idle(engine)
    assert host_of(engine).used > 20, "the host has its copies"
    engine.submit(greedy("0", text(0), 5))
    deltas = drain(engine)
    assert collect(deltas) == {"0": expected["0"]} and deltas[0].cached_tokens == 320
    assert_idle(engine)


def test_few_come_back_at_a_time(folder: Path, expected: dict[str, list[int]]) -> None:
    count = MOST + 2
    engine = gone(folder, count, num_blocks=50 + 21 * count)
    deltas, most, put_off = list[Delta](), 0, False
    for number, found in enumerate(stream(engine)):
        deltas += found
        if number == 3:
            for each in range(count):
                engine.submit(greedy(f"{each}", text(each), 5))
        if number == 5:
            engine.abort(f"{count - 1}")
        if number == 7:
            engine.submit(greedy("short", text(9, 20), 5))
        most = max(most, len(engine.scheduler._restores.waiting))
        put_off |= len(engine.scheduler._restores._put_off) > 0
    assert most == MOST and put_off
    said = collect(deltas)
    assert said.pop(f"{count - 1}") == [] and said.pop("short") == expected["stream"][:5]
    assert said == {name: tokens for name, tokens in expected.items() if name != f"{count - 1}"}
    assert_idle(engine)


@pytest.mark.parametrize("failures", [1, 100])
@pytest.mark.parametrize("beside", [False, True])
def test_a_copy_that_fails_costs_no_request(
    folder: Path, expected: dict[str, list[int]], failures: int, beside: bool
) -> None:
    """Tried again, and computed when it fails again."""
    engine = gone(folder)
    run, left = engine.runner.mover.run, failures  # type: ignore[union-attr]

    def failing(transfers: Transfers) -> None:
        nonlocal left
        if transfers.back and left and restoring(engine):
            left -= 1
            raise RuntimeError("broken")
        run(transfers)

    engine.runner.mover.run = failing  # type: ignore[union-attr, method-assign]
    if beside:
        deltas = list[Delta]()
        for number, found in enumerate(stream(engine)):
            deltas += found
            if number == 3:
                engine.submit(greedy("0", text(0), 5))
        assert collect(deltas) == {name: expected[name] for name in ("stream", "0")}
    else:
        assert generate(engine, greedy("0", text(0), 5)) == {"0": expected["0"]}
    assert left == max(failures - 2, 0)
    assert_idle(engine)


def test_a_copy_that_fails_costs_no_request_that_need_not_wait(
    folder: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReferenceBackend, "restore_step_bytes", None)
    engine = gone(folder)
    run, left = engine.runner.mover.run, 1  # type: ignore[union-attr]

    def failing(transfers: Transfers) -> None:
        nonlocal left
        if transfers.back and left:
            left -= 1
            raise RuntimeError("broken")
        run(transfers)

    engine.runner.mover.run = failing  # type: ignore[union-attr, method-assign]
    assert generate(engine, greedy("0", text(0), 5)) == {"0": expected["0"]} and left == 0
    assert_idle(engine)


def test_deadlines_pass_while_requests_wait_for_their_blocks(folder: Path, expected: dict[str, list[int]]) -> None:
    """Of one that has its blocks, and of one that is put off because too many have."""
    count = MOST + 1
    engine = gone(folder, count, num_blocks=50 + 21 * count)
    clock, past = engine.clock, 0.0
    engine.clock = lambda: clock() + past
    deltas = list[Delta]()
    for number, found in enumerate(stream(engine)):
        deltas += found
        if number == 3:
            for each in range(count):
                late = each in (MOST - 1, MOST)
                engine.submit(replace(greedy(f"{each}", text(each), 5), timeout_s=3600.0 if late else None))
        if number == 6:
            assert restoring(engine) == count and len(engine.scheduler._restores._put_off) == 1
            past = 7200.0
        if number == 7:
            assert restoring(engine) == count - 2
    reasons = {delta.request_id: delta.finish_reason for delta in deltas if delta.finish_reason}
    assert reasons == {"stream": "length"} | {f"{i}": "timeout" if i >= MOST - 1 else "length" for i in range(count)}
    said = {name: tokens for name, tokens in collect(deltas).items() if reasons[name] == "length"}
    assert said == {name: expected[name] for name in said}
    assert_idle(engine)


def test_a_step_that_fails_beside_it(folder: Path, expected: dict[str, list[int]]) -> None:
    engine = gone(folder)
    launch, broken = engine.runner.executor.run, 0

    def failing(*args: Any) -> Any:
        nonlocal broken
        if restoring(engine) and broken < 2:
            broken += 1
            raise RuntimeError("broken")
        return launch(*args)

    engine.runner.executor.run = failing  # type: ignore[method-assign]
    deltas = list[Delta]()
    for number, found in enumerate(stream(engine)):
        deltas += found
        if number == 3:
            engine.submit(greedy("0", text(0), 5))
    assert broken == 2
    assert collect(deltas) == {name: expected[name] for name in ("stream", "0")}
    assert_idle(engine)


@pytest.mark.parametrize("aborted", [False, True])
def test_what_comes_back_can_be_erased(folder: Path, expected: dict[str, list[int]], aborted: bool) -> None:
    engine = gone(folder)
    deltas = list[Delta]()
    for number, found in enumerate(stream(engine)):
        deltas += found
        if number == 3:
            engine.submit(greedy("0", text(0), 5))
        if number == 8:
            erasure = engine.erase("")
            assert erasure.blocks >= 20 and not erasure.advance(), "some are still to be copied back"
            host_of(engine).check()
            engine.submit(greedy("later", text(0), 5))
            if aborted:
                engine.abort("0")
                assert erasure.advance()
        if number == 11:
            assert engine.scheduler.get("later") is not None
    assert erasure.advance()
    said = collect(deltas)
    assert said.pop("later") == expected["0"]
    assert next(delta for delta in deltas if delta.request_id == "later").cached_tokens == 0
    assert said == {"stream": expected["stream"], "0": [] if aborted else expected["0"]}
    assert_idle(engine)


def test_one_that_comes_back_is_preempted_for_those_before_it(folder: Path, expected: dict[str, list[int]]) -> None:
    engine = gone(folder, num_blocks=23)
    deltas = list[Delta]()
    for number, found in enumerate(stream(engine)):
        deltas += found
        if number == 3:
            engine.submit(greedy("0", text(0), 5))
    assert collect(deltas) == {name: expected[name] for name in ("stream", "0")}
    assert engine.load_snapshot().preemptions > 0
    assert_idle(engine)


def test_states_come_back_with_their_blocks(tmp_path: Path) -> None:
    folder = write_checkpoint("qwen3-next-dense", tmp_path, spread=0.5)
    requests = [greedy("stream", text(9, 20), 40), greedy("0", text(0), 5)]
    expected = generate(make_engine(folder, num_blocks=400, prefix_cache=False), *requests)
    engine = make_engine(folder, num_blocks=40, host_memory=HOST, state_interval=64, kept_states=3, max_running=3)
    generate(engine, greedy("past", text(0), 5))
    generate(engine, greedy("other", text(50, 600), 1))
    deltas, waited = list[Delta](), False
    engine.submit(requests[0])
    for number in range(10_000):
        output = engine.step()
        deltas += [] if output is None else output.deltas
        waited |= restoring(engine) > 0
        if number == 3:
            engine.submit(requests[1])
        if not engine.has_work:
            break
    assert collect(deltas) == expected and waited
    assert (next(delta for delta in deltas if delta.request_id == "0").cached_tokens or 0) >= 256
    assert_idle(engine)
