"""A recorded forward pass gives the very bits of the pass it was recorded from, and refuses what it cannot repeat."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.engine.backends import cpu
from penstock.engine.backends.cpu.executor import RecordedExecutor, row_arrays
from penstock.engine.backends.cpu.layout import LayoutError
from penstock.engine.backends.cpu.recorded_step import Forward, Head, RecordedStep, record
from penstock.engine.backends.interface import AttentionBatch, HostBatch
from penstock.engine.core import Engine
from penstock.engine.runner.runner import Runner
from tests.engine.harness import drain, greedy, make_engine
from tests.engine.tiny import write_checkpoint

pytestmark = pytest.mark.skipif(not cpu.status().available, reason="no native kernels here")


def executor_of(runner: Runner) -> RecordedExecutor:
    assert isinstance(runner.executor, RecordedExecutor)
    return runner.executor


def recorded_in(runner: Runner) -> RecordedStep:
    recorded = executor_of(runner).plain
    assert recorded is not None
    return recorded


def scored(engine: Engine) -> dict[str, list[float]]:
    """Log-probabilities of prompts and answers of every length, alone and together, in chunks and whole."""
    for index, length in enumerate((3, 40, 1, 17, 90)):
        prompt = [(5 * index + 11 * position) % 199 for position in range(length)]
        engine.submit(greedy(f"r{index}", prompt, 6 + index, logprobs=0, prompt_logprobs=0))
    values: dict[str, list[float]] = {}
    for delta in drain(engine):
        parts = [*(delta.prompt_logprobs or []), *(delta.logprobs or [])]
        values.setdefault(delta.request_id, []).extend(part.logprob for part in parts if part is not None)
    return values


@pytest.mark.parametrize("family", ["llama-gqa", "mistral-window", "qwen2-bias", "qwen3-qknorm", "gemma2", "phi3"])
def test_a_recorded_step_gives_the_bits_of_the_pass(family: str, tmp_path: Path) -> None:
    engine = make_engine(write_checkpoint(family, tmp_path), weights="int8", token_budget=48, prefix_cache=False)
    executor = executor_of(engine.runner)
    assert executor.plain is not None
    recorded = scored(engine)
    executor.plain = None
    assert recorded == scored(engine)
    assert sum(map(len, recorded.values())) > 150


def test_times_are_kept_by_function(tmp_path: Path) -> None:
    engine = make_engine(write_checkpoint("llama-gqa", tmp_path), weights="int8")
    recorded = recorded_in(engine.runner)
    recorded.timed = True
    scored(engine)
    spent = recorded.seconds()
    assert {name: calls for name, (calls, _) in spent.items()} == {
        "pk_embed": 2, "pk_rms_norm": 1, "pk_add_rms_norm": 6, "pk_linear": 13, "pk_rope_and_cache": 3,
        "pk_attention": 3, "pk_linear_sample": 1, "pk_keep": 1,
    }  # fmt: skip
    # These requests want log-probabilities: their tokens are chosen outside.
    assert {name for name, (_, seconds) in spent.items() if seconds == 0} == {"pk_linear_sample", "pk_keep"}
    assert all(seconds == 0 for _, seconds in recorded.seconds().values())


@pytest.mark.slow
def test_recording_does_not_load_torchs_compiler(tmp_path: Path) -> None:
    """It would: more than a second and 70 MiB at every start, for nothing."""
    folder = write_checkpoint("llama-gqa", tmp_path)
    program = f"""
import sys
from penstock.engine.config import EngineConfig
from penstock.engine.core import Engine
engine = Engine.load(EngineConfig(model={str(folder)!r}, device="cpu", weights="int8", num_blocks=20, threads=1))
assert engine.runner.executor.recorded is not None
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_a_pass_with_anything_else_is_not_recorded(tmp_path: Path) -> None:
    folder = write_checkpoint("llama-gqa", tmp_path)
    assert executor_of(make_engine(folder, weights="dense").runner).plain is None
    runner = make_engine(folder, weights="int8").runner

    def doubled(ids: Tensor, batch: AttentionBatch, kv: object) -> Tensor:
        return runner.decoder.forward(ids, batch, runner.kv) * 2

    def record_with(forward: Forward, head: Head) -> RecordedStep | None:
        ops, sizes = runner.decoder.ops, {"tokens": 8, "sequences": 8, "samples": 8}
        assert isinstance(ops, cpu.CpuOps)
        return record(ops, forward, head, runner.kv, row_arrays(runner.rows), block_size=16, **sizes)

    assert record_with(doubled, runner.decoder.head) is None
    without_head = record_with(runner.decoder.forward, lambda x: runner.decoder.head(x) * 2)
    assert without_head is not None and not without_head.has_head
    assert "pk_gumbel_argmax" not in without_head.names


@torch.inference_mode()
def test_what_lies_outside_the_tables_is_refused(tmp_path: Path) -> None:
    runner = make_engine(write_checkpoint("llama-gqa", tmp_path), weights="int8").runner
    step = HostBatch(
        token_ids=np.array([198]),
        positions=np.zeros(1, np.int64),
        slots=np.zeros(1, np.int64),
        query_starts=np.array([0, 1]),
        context_lens=np.ones(1, np.int64),
        rows=np.zeros(1, np.int64),
        tables=runner.rows.host_tables,
        block_size=16,
    )
    recorded, none = recorded_in(runner), np.zeros(0, np.int64)

    def forward() -> Tensor:
        recorded.load(step, none, none)
        return recorded.forward()

    assert forward().shape == (1, 64)
    step.token_ids[0] = 199
    with pytest.raises(LayoutError, match="token id"):
        forward()
    step.token_ids[0], step.slots[0] = 5, 10**9
    with pytest.raises(LayoutError, match="slot"):
        forward()
    step.slots[0], step.positions[0] = 0, 10**9
    with pytest.raises(LayoutError, match="position"):
        forward()
    with pytest.raises(LayoutError, match="block table"):
        recorded.load_decodes([5, 10**9, 0])


@torch.inference_mode()
def test_a_token_the_host_has_not_seen_is_the_one_its_row_sampled_last(tmp_path: Path) -> None:
    runner = make_engine(write_checkpoint("llama-gqa", tmp_path), weights="int8").runner
    recorded = recorded_in(runner)
    runner.rows.host_tables[:2, 0] = 1, 2
    recorded.load_decodes([5, 0, 0, 9, 0, 1])
    first, second = recorded.draw().tolist()
    recorded.load_decodes([-1, 1, 1, -1, 1, 0])
    unseen = recorded.forward().clone()
    recorded.load_decodes([second, 1, 1, first, 1, 0])
    assert first != second and torch.equal(unseen, recorded.forward())


@pytest.mark.parametrize("family", ["llama-gqa", "gemma2"])
def test_tokens_of_a_recorded_step_are_those_of_the_sampler(family: str, tmp_path: Path) -> None:
    """Greedy and drawn ones, behind a head that is recorded and behind one that is not (gemma's caps its logits)."""
    engine = make_engine(write_checkpoint(family, tmp_path), weights="int8", token_budget=48, prefix_cache=False)
    assert recorded_in(engine.runner).has_head == (family == "llama-gqa")

    def generated() -> dict[str, list[int]]:
        for index, length in enumerate((3, 40, 1, 17, 90)):
            prompt = [(5 * index + 11 * position) % 199 for position in range(length)]
            request = greedy(f"r{index}", prompt, 20 + index)
            params = replace(request.params, temperature=index % 2 * 1.5, seed=index)
            engine.submit(replace(request, params=params))
        tokens: dict[str, list[int]] = {}
        for delta in drain(engine):
            tokens.setdefault(delta.request_id, []).extend(delta.tokens)
        return tokens

    recorded = generated()
    executor_of(engine.runner).plain = None
    assert recorded == generated()
    assert [len(recorded[f"r{index}"]) for index in range(5)] == [20, 21, 22, 23, 24]


def test_a_prompt_of_one_token_with_penalties_is_a_step_like_others(tmp_path: Path) -> None:
    """It decodes from the start, and finds the counts of a request before it."""
    engine = make_engine(write_checkpoint("llama-gqa", tmp_path), weights="int8")
    assert executor_of(engine.runner).plain is not None
    for index, prompt in enumerate(([1, 2, 3], [4], [4])):
        engine.submit(greedy(f"r{index}", prompt, 3, presence_penalty=0.5, logit_bias={47: 4.0}))
        answer = drain(engine)
        assert [delta.error for delta in answer] == [None] * 3 and sum(len(delta.tokens) for delta in answer) == 3
