"""Conversations that leave the device and come back: the same tokens, without computing the prompt again."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.engine.core import Engine
from penstock.engine.request import Delta
from penstock.errors import ConfigError
from tests.engine.harness import assert_idle, collect, drain, generate, greedy, make_engine
from tests.engine.tiny import write_checkpoint

HOST = 8 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama-gqa", tmp_path_factory.mktemp("llama"), spread=0.5)


def conversation(number: int, length: int) -> list[int]:
    return [(number * 31 + 7 * i * i + 3 * i) % 199 for i in range(length)]


def first(deltas: list[Delta], request_id: str) -> Delta:
    return next(delta for delta in deltas if delta.request_id == request_id)


def run(engine: Engine, request_id: str, prompt: list[int], count: int = 6) -> tuple[Delta, list[int]]:
    engine.submit(greedy(request_id, prompt, count))
    deltas = drain(engine)
    return first(deltas, request_id), collect(deltas)[request_id]


def test_an_evicted_conversation_comes_back(folder: Path) -> None:
    outcomes = {}
    for host_memory in (0, HOST):
        engine = make_engine(folder, num_blocks=10, host_memory=host_memory)
        _, once = run(engine, "first", conversation(1, 140))
        run(engine, "other", conversation(2, 150))  # needs the whole device
        delta, again = run(engine, "again", conversation(1, 140))
        assert again == once
        outcomes[host_memory] = (delta.cached_tokens, engine.load_snapshot())
        assert_idle(engine)
    cached, load = outcomes[0]
    assert cached == 0 and load.offloaded_blocks == load.restored_blocks == load.total_host_blocks == 0
    cached, load = outcomes[HOST]
    assert cached == 128, "all but the block of the last token"
    assert load.host_hit_tokens == 128 and load.restored_blocks == 8 and load.offloaded_blocks >= 8
    assert 0 < load.host_blocks <= load.total_host_blocks


@pytest.mark.parametrize("settings", [{}, {"kv_dtype": "int8"}, {"kv_dtype": "fp8"}, {"speculation": "ngram"}], ids=str)
def test_a_small_device_with_a_host_equals_a_large_device(folder: Path, settings: dict[str, str]) -> None:
    """Turns of several conversations, in waves of three at once; every turn continues what its last one said."""

    def talk(engine: Engine) -> list[dict[str, list[int]]]:
        histories = {f"c{i}": conversation(i, 40 + 11 * i) for i in range(5)}
        said = []
        for turn in range(3):
            for wave in (("c0", "c3", "c1"), ("c4", "c2")):
                answers = generate(engine, *(greedy(f"{c}.{turn}", histories[c], 9) for c in wave))
                said.append(answers)
                for c in wave:
                    histories[c] = histories[c] + answers[f"{c}.{turn}"] + conversation(turn, 5)
        assert_idle(engine)
        return said

    large = make_engine(folder, num_blocks=400, **settings)
    small = make_engine(folder, num_blocks=15, host_memory=HOST, token_budget=48, **settings)
    assert talk(small) == talk(large)
    load = small.load_snapshot()
    assert load.restored_blocks > 10 and load.offloaded_blocks > 10
    assert load.prefix_hit_tokens >= large.load_snapshot().prefix_hit_tokens, "the host lost something that fits"


def test_a_host_too_small_for_all_loses_some_and_breaks_nothing(folder: Path) -> None:
    engine = make_engine(folder, num_blocks=10, host_memory=5 * 12288, max_running=2)
    assert engine.load_snapshot().total_host_blocks == 5
    expected = {i: run(make_engine(folder), "x", conversation(i, 60 + 20 * i))[1] for i in range(4)}
    for turn in range(3):
        for i in (0, 2, 1, 3, 1):
            assert run(engine, f"{turn}.{i}", conversation(i, 60 + 20 * i))[1] == expected[i]
    assert_idle(engine)


def test_a_preempted_sequence_is_restored_and_not_computed_again(folder: Path) -> None:
    prompts = {f"r{i}": conversation(i, 45) for i in range(4)}
    alone = {name: run(make_engine(folder), name, prompt, 60)[1] for name, prompt in prompts.items()}
    computed = {}
    for host_memory in (0, HOST):
        engine = make_engine(folder, num_blocks=16, host_memory=host_memory)
        schedule, tokens = engine.scheduler.schedule, 0

        def counting(*args: object, schedule=schedule) -> object:  # type: ignore[no-untyped-def]
            nonlocal tokens
            batch = schedule(*args)
            tokens += batch.num_tokens if batch is not None else 0
            return batch

        engine.scheduler.schedule = counting  # type: ignore[method-assign, assignment]
        assert generate(engine, *(greedy(name, prompt, 60) for name, prompt in prompts.items())) == alone
        load = engine.load_snapshot()
        assert load.preemptions > 0
        computed[host_memory] = tokens
        if host_memory:
            # Only the last, unfinished block of a preempted sequence is computed again.
            assert load.restored_blocks > 0
            assert tokens <= 4 * (45 + 60) + 16 * load.preemptions
        assert_idle(engine)
    assert computed[HOST] < computed[0]


def test_blocks_idle_for_long_are_on_the_host_before_they_are_evicted(folder: Path) -> None:
    engine = make_engine(folder, num_blocks=100, host_memory=HOST, host_idle_s=30)
    now = 1000.0
    engine.clock = lambda: now
    run(engine, "a", conversation(1, 100))
    run(engine, "b", conversation(2, 20))
    assert engine.load_snapshot().offloaded_blocks == 0
    now += 31
    run(engine, "c", conversation(3, 20))
    assert engine.load_snapshot().offloaded_blocks >= 6
    assert engine.load_snapshot().cached_blocks >= 6, "they stay on the device too, as long as there is room"
    assert_idle(engine)


def test_a_failed_step_costs_only_what_it_was_to_copy(folder: Path) -> None:
    engine = make_engine(folder, num_blocks=10, host_memory=HOST)
    _, once = run(engine, "first", conversation(1, 140))
    run(engine, "other", conversation(2, 150))
    assert engine.load_snapshot().host_blocks > 0
    launch, broken = engine.runner.executor.run, True

    def failing(*args: object) -> object:
        nonlocal broken
        if broken:
            broken = False
            raise RuntimeError("broken")
        return launch(*args)  # type: ignore[arg-type]

    engine.runner.executor.run = failing  # type: ignore[method-assign, assignment]
    engine.submit(greedy("x", conversation(4, 150), 3))
    engine.submit(greedy("y", conversation(4, 3), 3))
    drain(engine)
    assert not broken
    delta, again = run(engine, "again", conversation(1, 140))
    assert again == once and delta.cached_tokens == 128, "what came to the host before is right"
    delta, _ = run(engine, "other again", conversation(2, 150))
    assert delta.cached_tokens is not None and delta.cached_tokens < 144, "some of it left with the step that failed"
    assert_idle(engine)


def test_an_error_of_the_device_voids_everything(folder: Path) -> None:
    engine = make_engine(folder, num_blocks=10, host_memory=HOST)
    run(engine, "first", conversation(1, 140))
    run(engine, "other", conversation(2, 150))
    launch = engine.runner.executor.run

    def failing(*args: object) -> object:
        engine.runner.executor.run = launch  # type: ignore[method-assign]
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    engine.runner.executor.run = failing  # type: ignore[method-assign, assignment]
    run(engine, "x", conversation(4, 3))
    assert engine.load_snapshot().host_blocks == 0
    assert_idle(engine)


def test_settings_that_cannot_work_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="one KV block needs"):
        make_engine(folder, host_memory=100)
    with pytest.raises(ConfigError, match="prefix_cache"):
        make_engine(folder, host_memory=HOST, prefix_cache=False)
