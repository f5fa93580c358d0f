"""The offline benchmark drives a real engine (tiny random weights) and counts what it did."""

import pytest

from penstock.bench import shapes
from penstock.bench.engine import BenchError, Run, run, summarize
from penstock.bench.workloads import Workload, warm_up
from penstock.engine.config import EngineConfig
from penstock.engine.core import Engine
from penstock.engine.loading.random_checkpoint import RandomCheckpoint
from penstock.engine.request import Request, SamplingParams

TINY = shapes.named("smollm2-135m") | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 512,
}
LOOP = Workload("loop", 12, (20, 40), (5, 9), concurrency=3)


@pytest.fixture(scope="module")
def engine() -> Engine:
    config = EngineConfig(
        model="tiny", device="cpu", dtype="float32", threads=1, max_running=4, token_budget=32, num_blocks=64
    )
    return Engine.load(config, checkpoint=RandomCheckpoint(TINY))


def test_a_closed_loop_returns_every_token_and_never_exceeds_its_concurrency(engine: Engine) -> None:
    most = 0
    real_step = engine.step

    class Watched:
        info, submit, load_snapshot = engine.info, engine.submit, engine.load_snapshot

        @property
        def has_work(self) -> bool:
            return engine.has_work

        def step(self):  # type: ignore[no-untyped-def]
            nonlocal most
            load = engine.load_snapshot()
            most = max(most, load.running + load.waiting)
            return real_step()

    trace = run(Watched(), LOOP, salt="loop")
    lengths = list(LOOP.lengths())
    assert trace.prompt_tokens == sum(inputs for inputs, _ in lengths)
    assert trace.output_tokens == sum(outputs for _, outputs in lengths)
    assert len(trace.ttft) == len(trace.latency) == LOOP.requests
    assert most == LOOP.concurrency
    assert sum(step.sampled for step in trace.steps) == trace.output_tokens
    assert sum(step.seconds for step in trace.steps) <= trace.seconds


def test_steps_with_a_prompt_in_them_are_told_from_pure_decoding(engine: Engine) -> None:
    trace = run(engine, Workload("one", 1, (100, 100), (10, 10)), salt="one")
    # A budget of 32 tokens: the prompt takes four steps, of which only the last gives a token.
    assert [step.decode_only for step in trace.steps] == [False] + [True] * 9
    assert [step.context for step in trace.steps] == list(range(101, 111))


def test_figures_follow_from_the_trace(engine: Engine) -> None:
    trace = run(engine, LOOP, salt="figures")
    cost = shapes.cost(TINY, weight_bytes=4, kv_bytes=4)
    metrics = summarize(trace, cost, read_gbps=10.0, matmul_tflops=0.1)
    assert metrics.output_tps == pytest.approx(trace.output_tokens / trace.seconds)
    decode = [step for step in trace.steps if step.decode_only]
    moved = sum(cost.weights(step.sampled) + step.context * cost.kv_elements * 4 for step in decode)
    assert metrics.gbps == pytest.approx(moved / sum(step.seconds for step in decode) / 1e9)
    assert metrics.memory_share == pytest.approx(metrics.gbps / 10.0)
    assert 0 < metrics.bound_share < 1


def test_neither_another_run_nor_another_workload_reuses_a_prefix(engine: Engine) -> None:
    before = engine.load_snapshot().prefix_hit_tokens
    single, twin = (Workload(name, 1, (64, 64), (2, 2)) for name in ("single", "twin"))
    for workload, salt in ((single, "x"), (single, "y"), (twin, "x")):
        run(engine, workload, salt=salt)
    assert engine.load_snapshot().prefix_hit_tokens == before


def test_a_run_that_reused_a_prefix_is_refused(engine: Engine) -> None:
    workload = Workload("again", 1, (64, 64), (2, 2))
    run(engine, workload, salt="x")
    with pytest.raises(BenchError, match="48 prompt tokens of workload again came from the cache"):
        run(engine, workload, salt="x")


def test_the_warm_up_runs(engine: Engine) -> None:
    trace = Run(engine, warm_up(LOOP, 128), None)()
    assert len(trace.latency) == LOOP.concurrency


def test_a_request_that_comes_back_short_is_an_error_not_a_fast_run(engine: Engine) -> None:
    stop = Request("stopped", [1, 2, 3], SamplingParams(max_tokens=50, temperature=0, stop_token_ids=tuple(range(128))))
    with pytest.raises(BenchError, match="gave 1 of 50 tokens and stopped: finish_reason 'stop'"):
        Run(engine, [stop], None)()


def test_a_refused_request_says_why(engine: Engine) -> None:
    bad = Request("bad", [100_000], SamplingParams(max_tokens=5))
    with pytest.raises(
        BenchError, match="gave 0 of 5 tokens and stopped: the request has unknown tokens: token ids must be"
    ):
        Run(engine, [bad], None)()


def test_a_workload_longer_than_the_context_is_refused_with_both_numbers(engine: Engine) -> None:
    with pytest.raises(BenchError, match=r"needs a context of 1001 tokens; tiny is loaded with 512"):
        run(engine, Workload("long", 1, (1000, 1000), (1, 1)), salt="long")
