"""A full pipeline: as many steps in flight as stages, and still the output of one device (R-ENG-10)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from penstock.bench.soak.engines import verify_everything
from penstock.engine.batch import Batch
from penstock.engine.core import Engine
from penstock.engine.parallel.channel import Forward
from penstock.engine.parallel.decoder import Arriving
from penstock.engine.parallel.rank import ServedModel
from penstock.engine.request import Delta, Request, SamplingParams
from penstock.engine.runner.eager import EagerExecutor
from penstock.engine.runner.runner import Runner
from tests.engine.harness import assert_idle, collect, drain, generate, greedy, make_engine
from tests.engine.parallel.threads import threaded_engine
from tests.engine.speculative.forced import Oracle
from tests.engine.tiny import write_checkpoint

STAGES = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama-gqa", tmp_path_factory.mktemp("pipeline") / "model")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with threaded_engine(folder, 1, STAGES, token_budget=32) as engine:
        yield engine


@pytest.fixture(scope="module")
def alone(folder: Path) -> Engine:
    return make_engine(folder, token_budget=32)


def prompt(number: int, length: int) -> list[int]:
    return [(number * 17 + j * 5) % 190 for j in range(length)]


@contextmanager
def launches(engine: Engine) -> Iterator[list[int]]:
    """How many steps were in flight after each launch."""
    seen: list[int] = []
    run = engine.runner.run

    def counted(batch: Batch) -> Any:
        seen.append(len(engine._in_flight) + 1)
        return run(batch)

    with patch.object(engine.runner, "run", counted):
        yield seen


@contextmanager
def last_stage_waits_for(count: int) -> Iterator[None]:
    """The last stage begins nothing until rank 0 has launched that many steps: with fewer in flight it would never."""
    launched = threading.Semaphore(0)
    begun = threading.Event()
    run, forward = Runner.run, ServedModel.forward

    def counted(runner: Runner, batch: Batch) -> Any:
        step = run(runner, batch)
        launched.release()
        return step

    def waits(model: ServedModel, message: Forward, arriving: Arriving | None) -> None:
        if model.stage.groups.place.stage == STAGES - 1 and not begun.is_set():
            for _ in range(count):
                assert launched.acquire(timeout=120), "rank 0 waits for a step before it launches the next"
            begun.set()
        forward(model, message, arriving)

    with patch.object(Runner, "run", counted), patch.object(ServedModel, "forward", waits):
        yield


@pytest.mark.parametrize("lengths", [[30, 25, 31, 20], [95]], ids=["several prompts", "chunks of one prompt"])
def test_a_step_for_every_stage_is_in_flight(engine: Engine, alone: Engine, lengths: list[int]) -> None:
    asked = [greedy(f"r{i}", prompt(i, length), 1) for i, length in enumerate(lengths)]
    with last_stage_waits_for(STAGES):
        assert generate(engine, *asked) == generate(alone, *asked)
    assert_idle(engine)


def test_sequences_that_decode_take_turns(engine: Engine, alone: Engine) -> None:
    asked = [greedy(f"d{i}", prompt(i, 4), 20) for i in range(STAGES + 1)]
    with launches(engine) as seen:
        assert generate(engine, *asked) == generate(alone, *asked)
    assert seen[0] == 1 and set(seen[STAGES:]) == {STAGES}


def test_a_single_sequence_waits_for_nothing_but_its_own_steps(engine: Engine, alone: Engine) -> None:
    before = engine.steps
    with launches(engine) as seen:
        assert generate(engine, greedy("a", prompt(1, 9), 8)) == generate(alone, greedy("a", prompt(1, 9), 8))
    assert engine.steps - before == 8 and set(seen) == {1}


def mixed() -> list[Request]:
    """Long and short prompts, and sampling of all kinds, so that a row in the wrong hands would show."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": 5, "top_k": 40, "frequency_penalty": 0.8},
        {"temperature": 0.0, "repetition_penalty": 1.7, "logprobs": 1},
        {"temperature": 0.7, "seed": 9, "allowed_token_ids": tuple(range(20, 90))},
        {"temperature": 0.0, "logit_bias": {7: 3.0}, "prompt_logprobs": 0},
    ]
    lengths = [3, 60, 14, 33, 1, 41, 8, 75]
    return [
        Request(f"m{i}", prompt(i, length), SamplingParams(max_tokens=5 + 3 * i, **kinds[i % len(kinds)]))
        for i, length in enumerate(lengths)
    ]


def test_prompts_decodes_and_preempted_sequences_together_are_those_of_one_device(folder: Path) -> None:
    settings = {"block_size": 4, "token_budget": 16, "max_running": 4}
    expected = generate(make_engine(folder, **settings), *mixed())
    with threaded_engine(folder, 1, STAGES, num_blocks=34, **settings) as engine:
        assert generate(engine, *mixed()) == expected
        assert engine.load_snapshot().preemptions > 0
        assert_idle(engine)


def test_requests_that_are_aborted_in_flight_leave_others_alone(engine: Engine, alone: Engine) -> None:
    expected = generate(alone, *mixed())
    for request in mixed():
        engine.submit(request)
    engine.submit(greedy("gone", prompt(3, 5), 400))
    engine.submit(greedy("soon", prompt(5, 90), 400))  # aborted while its prompt is computed
    deltas: list[Delta] = []
    for turn in range(12):
        output = engine.step()
        deltas += output.deltas if output is not None else []
        if turn == 4:
            engine.abort("soon")
    assert engine.scheduler.get("gone") in [chunk.seq for step in engine._in_flight for chunk in step.batch.chunks]
    engine.abort("gone")
    found = collect(deltas + drain(engine))
    assert {name: found[name] for name in expected} == expected
    assert_idle(engine)


def test_a_request_that_breaks_its_step_when_that_comes_back_fails_alone(engine: Engine, alone: Engine) -> None:
    expected = generate(alone, *mixed())
    sample = EagerExecutor._sample

    def breaks(executor: EagerExecutor, step: Any, logits: Any, request: Any) -> None:
        if any(chunk.seq.id == "poison" for chunk in request.chunks):
            raise ArithmeticError("poisoned")
        sample(executor, step, logits, request)

    with patch.object(EagerExecutor, "_sample", breaks):
        for request in [*mixed(), greedy("poison", prompt(2, 11), 9)]:
            engine.submit(request)
        deltas = drain(engine)
    failed = {delta.request_id: delta.error for delta in deltas if delta.finish_reason == "error"}
    assert list(failed) == ["poison"] and "poisoned" in (failed["poison"] or "")
    found = collect(deltas)
    assert {name: found[name] for name in expected} == expected
    assert_idle(engine)


def test_draft_tokens_are_verified_with_other_steps_in_flight(folder: Path) -> None:
    expected = generate(make_engine(folder), *mixed())
    beside: list[bool] = []
    with threaded_engine(folder, 1, STAGES, speculation="ngram", num_blocks=40, block_size=4) as engine:
        assert engine.speculation is not None
        verify_everything(engine.speculation)
        engine.speculation.proposer = Oracle(expected, 0.3, engine.info.vocab_size)
        run = engine.runner.run

        def noted(batch: Batch) -> Any:
            if batch.speculative:
                beside.append(len(engine._in_flight) == STAGES - 1)
            return run(batch)

        with patch.object(engine.runner, "run", noted):
            assert generate(engine, *mixed()) == expected
        assert sum(beside) > 5 and engine.load_snapshot().accepted_tokens > 0
        assert_idle(engine)
