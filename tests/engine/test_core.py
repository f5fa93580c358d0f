"""The engine as its callers see it: stops, aborts, deadlines, log-probabilities, seeds, failures that stay alone."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
import torch

from penstock.backends.errors import error_of
from penstock.engine.batch import Batch
from penstock.engine.core import Engine
from penstock.engine.request import Request, SamplingParams
from penstock.engine.runner.step import PendingStep
from penstock.protocol.errors import Overloaded
from tests.engine.harness import assert_idle, collect, drain, generate, greedy, make_engine
from tests.engine.tiny import Reference, write_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama-gqa", tmp_path_factory.mktemp("core"), shard_size="50KB")


@pytest.fixture
def engine(checkpoint: Path) -> Engine:
    return make_engine(checkpoint, num_blocks=64, token_budget=64)


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(199) for _ in range(length)]


def test_it_reads_sharded_checkpoints(checkpoint: Path, engine: Engine) -> None:
    assert len(list(checkpoint.glob("*.safetensors"))) > 1
    assert Reference(checkpoint).agrees(prompt(20), generate(engine, greedy("a", prompt(20), 4))["a"])


def test_a_stop_token_ends_the_sequence_and_is_its_last_token(engine: Engine) -> None:
    full = generate(engine, greedy("a", prompt(20), 10))["a"]
    stop = full[4]
    engine.submit(greedy("b", prompt(20), 10, stop_token_ids=(stop,)))
    deltas = drain(engine)
    assert collect(deltas)["b"] == full[: full.index(stop) + 1]
    assert deltas[-1].finish_reason == "stop"
    engine.submit(greedy("c", prompt(20), 10, stop_token_ids=(stop,), min_tokens=8))
    assert len(collect(drain(engine))["c"]) >= 8


def test_a_request_tells_how_long_each_of_its_phases_took(engine: Engine) -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.25
        return now

    engine.clock = clock
    begin = now
    engine.submit(greedy("a", prompt(20), 5))
    deltas = drain(engine)
    first, last = deltas[0], deltas[-1]
    assert first.queue_s and first.prefill_s and last.decode_s
    assert first.queue_s + first.prefill_s + last.decode_s <= now - begin
    assert last.decode_s > first.prefill_s, "four more steps than one"
    for delta in deltas[1:-1]:
        assert delta.queue_s is delta.prefill_s is delta.decode_s is None, "nothing is said per token"


def test_the_window_ends_a_sequence(checkpoint: Path) -> None:
    engine = make_engine(checkpoint, max_model_len=32)
    engine.submit(greedy("a", prompt(20), 100))
    deltas = drain(engine)
    assert len(collect(deltas)["a"]) == 12 and deltas[-1].finish_reason == "length"


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (greedy("x", [], 3), "empty"),
        (greedy("x", [1, 500], 3), "between 0 and 198"),
        (greedy("x", [-1], 3), "between 0 and 198"),
        (greedy("x", [1] * 5000, 3), "5000 tokens"),
        (greedy("x", [1], 0), "max_tokens"),
        (greedy("x", [1], 3, logit_bias={999: 1.0}), "bias token ids"),
    ],
)
def test_a_request_that_cannot_run_is_refused_alone(engine: Engine, bad: Request, says: str) -> None:
    engine.submit(greedy("good", prompt(9), 3))
    engine.submit(bad)
    deltas = drain(engine)
    (error,) = [delta for delta in deltas if delta.request_id == "x"]
    assert error.finish_reason == "error" and error.error is not None and says in error.error
    assert len(collect(deltas)["good"]) == 3
    assert_idle(engine)


def test_the_queue_is_bounded(checkpoint: Path) -> None:
    engine = make_engine(checkpoint, max_waiting=2)
    for index in range(4):
        engine.submit(greedy(f"r{index}", prompt(5), 2))
    refused = [delta.request_id for delta in drain(engine) if delta.finish_reason == "error"]
    assert refused == ["r2", "r3"]


def test_abort_frees_blocks_at_once_also_in_prefill(engine: Engine) -> None:
    engine.submit(greedy("long", prompt(300), 5))
    engine.submit(greedy("short", prompt(4), 40))
    engine.step()
    assert engine.load_snapshot().used_blocks > 0
    engine.abort("long")
    engine.abort("short")
    engine.abort("never seen")
    load = engine.load_snapshot()
    assert load.used_blocks == 0 and load.running == 0 and load.waiting == 0
    assert {d.request_id: d.finish_reason for d in drain(engine) if d.finish_reason} == {
        "long": "abort",
        "short": "abort",
    }
    assert_idle(engine)


def test_deadlines_are_enforced_while_waiting_and_while_running(engine: Engine) -> None:
    now = 0.0
    engine.clock = lambda: now
    params = SamplingParams(max_tokens=500, temperature=0.0)
    engine.submit(Request("a", prompt(10), params, timeout_s=5.0))
    engine.step()
    engine.submit(Request("b", prompt(10), params, timeout_s=1.0))
    now = 6.0
    output = engine.step()
    assert output is not None
    assert {d.request_id: d.finish_reason for d in output.deltas if d.finish_reason} == {"a": "timeout", "b": "timeout"}
    assert_idle(engine)


def test_what_may_not_wait_is_refused_unless_it_can_begin_at_once(checkpoint: Path) -> None:
    engine = make_engine(checkpoint, num_blocks=128, token_budget=64, max_running=2)
    now = 0.0
    engine.clock = lambda: now
    params = SamplingParams(max_tokens=500, temperature=0.0)
    impatient = SamplingParams(max_tokens=3, temperature=0.0)
    engine.submit(Request("alone", prompt(10), impatient, patience_s=0.0))
    assert {d.request_id: d.finish_reason for d in drain(engine) if d.finish_reason} == {"alone": "length"}
    for i in range(2):
        engine.submit(Request(f"long{i}", prompt(10, seed=i), params))
    while engine.load_snapshot().waiting:
        engine.step()
    engine.submit(Request("resumed", prompt(10), impatient, produced=[5], patience_s=1.0))
    engine.submit(Request("late", prompt(10), impatient, patience_s=1.0))
    engine.submit(Request("patient", prompt(10), impatient))
    ended = {}
    for now in (0.5, 0.9, 1.5, 1.6):
        output = engine.step()
        ended |= {} if output is None else {d.request_id: d for d in output.deltas if d.finish_reason}
        assert ("late" in ended) == (now > 1.0)
    assert set(ended) == {"late"} and ended["late"].finish_reason == "error"
    refused = error_of(ended["late"])
    assert isinstance(refused, Overloaded) and refused.reason == "queue_timeout" and refused.retry_after
    for i in range(2):
        engine.abort(f"long{i}")
    assert {d.request_id for d in drain(engine) if d.finish_reason == "length"} >= {"resumed", "patient"}
    assert_idle(engine)


def test_an_engine_says_that_it_begins_before_the_step_that_does(checkpoint: Path) -> None:
    engine = make_engine(checkpoint, num_blocks=128, token_budget=16, max_running=1)
    told: list[tuple[list[str], int]] = []
    engine.on_begun = lambda ids: told.append((ids, len(computed)))
    computed: list[int] = []
    run = engine.runner.run

    def counted(batch: Batch) -> PendingStep:
        computed.append(batch.num_tokens)
        return run(batch)

    engine.runner.run = counted  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=3, temperature=0.0)
    for name, patience_s in (("a", 60.0), ("b", None), ("c", 60.0)):
        engine.submit(Request(name, prompt(40), params, patience_s=patience_s))
    engine.step()
    assert told == [(["a"], 0)]
    drain(engine)
    assert [ids for ids, _ in told] == [["a"], ["c"]], "once each, and nothing of requests that may wait"
    assert_idle(engine)


def test_a_seed_gives_the_same_text_in_any_batch(engine: Engine) -> None:
    def sampled(name: str, seed: int) -> Request:
        return Request(name, prompt(30), SamplingParams(max_tokens=20, temperature=0.9, top_p=0.95, seed=seed))

    alone = generate(engine, sampled("a", 11))["a"]
    crowd = [greedy(f"g{i}", prompt(17 * i + 1, seed=i), 30) for i in range(5)]
    busy = generate(engine, *crowd, sampled("a", 11), sampled("b", 12))
    assert busy["a"] == alone
    assert busy["b"] != alone


def test_logprobs_match_the_reference(checkpoint: Path, engine: Engine) -> None:
    reference = Reference(checkpoint)
    tokens = prompt(40)
    engine.submit(greedy("a", tokens, 5, logprobs=3, prompt_logprobs=2))
    deltas = drain(engine)
    output = collect(deltas)["a"]
    truth = reference.logprobs(tokens + output)
    scored = [logprob for delta in deltas for logprob in delta.logprobs or []]
    assert len(scored) == 5
    for index, got in enumerate(scored):
        row = truth[len(tokens) + index - 1]
        assert got.logprob == pytest.approx(float(row[output[index]]), abs=2e-3)
        assert got.top_ids == row.topk(3).indices.tolist()
    prompt_scores = deltas[0].prompt_logprobs
    assert prompt_scores is not None and len(prompt_scores) == 40 and prompt_scores[0] is None
    for index, got_prompt in enumerate(prompt_scores[1:], start=1):
        assert got_prompt is not None and len(got_prompt.top_ids) == 2
        row = truth[index - 1]
        assert got_prompt.logprob == pytest.approx(float(row[tokens[index]]), abs=2e-3)
        assert got_prompt.rank == int((row > row[tokens[index]]).sum()) + 1


@pytest.mark.parametrize("budget", [7, 512])
def test_prompt_logprobs_in_chunks_and_beside_a_cached_prefix(checkpoint: Path, budget: int) -> None:
    engine = make_engine(checkpoint, token_budget=budget)
    tokens = prompt(70)
    truth = Reference(checkpoint).logprobs(tokens)
    generate(engine, greedy("cached", tokens, 2))
    # Also where another engine has produced something already.
    for request in (
        greedy("scored", tokens, 2, prompt_logprobs=1),
        dataclasses.replace(greedy("moved", tokens, 4, prompt_logprobs=1), produced=[5, 6]),
    ):
        engine.submit(request)
        found = next(delta.prompt_logprobs for delta in drain(engine) if delta.prompt_logprobs is not None)
        assert len(found) == 70 and found[0] is None
        for index, score in enumerate(found[1:], start=1):
            assert score is not None
            assert score.logprob == pytest.approx(float(truth[index - 1][tokens[index]]), abs=2e-3)


def test_a_repeated_prefix_is_taken_from_the_cache(engine: Engine) -> None:
    shared = prompt(200)
    engine.submit(greedy("first", shared + [1], 4))
    drain(engine)
    engine.submit(greedy("second", shared + [2], 4))
    deltas = drain(engine)
    assert deltas[0].cached_tokens == 192
    engine.submit(Request("other tenant", shared + [3], SamplingParams(max_tokens=1), cache_salt="other"))
    assert drain(engine)[0].cached_tokens == 0


class _Poison:
    """Makes the runner raise whenever a certain token is in the batch, as a kernel fault would."""

    def __init__(self, engine: Engine, token: int, error: Exception) -> None:
        self.run = engine.runner.run
        self.token, self.error, self.raised = token, error, 0
        engine.runner.run = self  # type: ignore[method-assign]

    def __call__(self, batch: Batch) -> object:
        if any(self.token in chunk.seq.tokens for chunk in batch.chunks):
            self.raised += 1
            raise self.error
        return self.run(batch)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_that_breaks_the_step_fails_alone(engine: Engine, overlap: bool) -> None:
    engine._depth = int(overlap)
    healthy = [greedy(f"ok{i}", [t % 190 for t in prompt(20 * i + 3, seed=i)], 12) for i in range(4)]
    expected = generate(engine, *healthy)
    _Poison(engine, 198, RuntimeError("illegal instruction"))
    engine.submit(healthy[0])
    engine.submit(healthy[1])
    first = engine.step()
    engine.submit(greedy("poison", [1, 198, 3], 4))
    engine.submit(healthy[2])
    engine.submit(healthy[3])
    deltas = (first.deltas if first else []) + drain(engine)
    failed = {d.request_id: d.error for d in deltas if d.finish_reason == "error"}
    assert list(failed) == ["poison"] and "illegal instruction" in (failed["poison"] or "")
    got = collect(deltas)
    assert {name: got[name] for name in expected} == expected
    assert_idle(engine)


def test_out_of_memory_shrinks_the_step_instead_of_failing(checkpoint: Path) -> None:
    engine = make_engine(checkpoint, token_budget=64, prefix_cache=False)
    run = engine.runner.run

    def small_device(batch: Batch) -> object:
        if batch.num_tokens > 24:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(batch)

    expected = generate(engine, greedy("a", prompt(150), 8))
    engine.runner.run = small_device  # type: ignore[method-assign, assignment]
    assert generate(engine, greedy("a", prompt(150), 8)) == expected
    assert engine.scheduler.token_budget == 16
    assert_idle(engine)


def test_overlapped_steps_give_the_same_tokens(checkpoint: Path) -> None:
    """The CUDA schedule, where a step is launched before the previous one's tokens are known, run on CPU."""
    requests = [greedy(f"r{i}", prompt(23 * i + 1, seed=i), 15 + i) for i in range(6)]
    plain = generate(make_engine(checkpoint, num_blocks=40, token_budget=50), *requests)
    engine = make_engine(checkpoint, num_blocks=24, token_budget=50)
    engine._depth = 1
    assert generate(engine, *requests) == plain
    stop = plain["r3"][6]
    engine.submit(greedy("s", prompt(70, seed=3), 18, stop_token_ids=(stop,)))
    deltas = drain(engine)
    assert collect(deltas)["s"] == plain["r3"][: plain["r3"].index(stop) + 1]
    assert_idle(engine)


def test_a_long_prompt_is_not_launched_whole(engine: Engine) -> None:
    """Steps that sample nothing are waited for like others, so that what comes meanwhile is seen in time."""
    ends: list[bool] = []

    class Point:
        def synchronize(self) -> None:
            ends.append(True)

        def query(self) -> bool:
            return False

        def elapsed_time(self, end_event: object) -> float:
            return 1.0

    engine._depth = 1
    engine.runner.backend.mark = Point  # type: ignore[method-assign, assignment]
    engine.submit(greedy("a", prompt(64 * 5), 1))
    for launched in range(1, 6):
        engine.step()
        assert len(ends) == launched - 1 and len(engine._in_flight) == 1
    drain(engine)
