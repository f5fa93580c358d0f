"""A recorded forward pass gives the very bits of the pass it was recorded from, and refuses what it cannot repeat."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.engine.core import Engine
from penstock.engine.kernels import cpu
from penstock.engine.kernels.cpu.ops import LayoutError
from penstock.engine.kernels.cpu.tape import record
from penstock.engine.kernels.interface import AttentionBatch
from tests.engine.harness import drain, greedy, make_engine
from tests.engine.tiny import write_checkpoint

pytestmark = pytest.mark.skipif(not cpu.status().available, reason="no native kernels here")


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
def test_a_tape_gives_the_bits_of_the_pass(family: str, tmp_path: Path) -> None:
    engine = make_engine(write_checkpoint(family, tmp_path), weights="int8", token_budget=48, prefix_cache=False)
    assert engine.runner.tape is not None
    taped = scored(engine)
    engine.runner.tape = None
    assert taped == scored(engine)
    assert sum(map(len, taped.values())) > 150


def test_times_are_kept_by_function(tmp_path: Path) -> None:
    engine = make_engine(write_checkpoint("llama-gqa", tmp_path), weights="int8")
    tape = engine.runner.tape
    assert tape is not None
    tape.timed = True
    scored(engine)
    spent = tape.seconds()
    assert {name: calls for name, (calls, _) in spent.items()} == {
        "pk_embed": 1, "pk_rms_norm": 1, "pk_add_rms_norm": 6, "pk_linear": 12, "pk_rope_and_cache": 3,
        "pk_attention": 3, "pk_silu_mul": 3,
    }  # fmt: skip
    assert all(seconds > 0 for _, seconds in spent.values())
    assert all(seconds == 0 for _, seconds in tape.seconds().values())


def test_recording_does_not_load_torchs_compiler(tmp_path: Path) -> None:
    """It would: more than a second and 70 MiB at every start, for nothing."""
    folder = write_checkpoint("llama-gqa", tmp_path)
    program = f"""
import sys
from penstock.engine.config import EngineConfig
from penstock.engine.core import Engine
engine = Engine.load(EngineConfig(model={str(folder)!r}, device="cpu", weights="int8", num_blocks=20, threads=1))
assert engine.runner.tape is not None
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_a_pass_with_anything_else_is_not_recorded(tmp_path: Path) -> None:
    folder = write_checkpoint("llama-gqa", tmp_path)
    assert make_engine(folder, weights="dense").runner.tape is None
    runner = make_engine(folder, weights="int8").runner

    def doubled(ids: Tensor, batch: AttentionBatch, kv: object) -> Tensor:
        return runner.decoder.forward(ids, batch, runner.kv) * 2

    tables = runner.rows.block_tables
    assert isinstance(runner.decoder.ops, cpu.CpuOps)
    assert record(runner.decoder.ops, doubled, runner.kv, tables, tokens=8, sequences=8) is None


@torch.inference_mode()
def test_what_lies_outside_the_tables_is_refused(tmp_path: Path) -> None:
    runner = make_engine(write_checkpoint("llama-gqa", tmp_path), weights="int8").runner
    assert runner.tape is not None
    ints = {"dtype": torch.int32}
    batch = AttentionBatch(
        positions=torch.zeros(1, dtype=torch.int64),
        slots=torch.zeros(1, dtype=torch.int64),
        query_starts=torch.tensor([0, 1], **ints),
        context_lens=torch.tensor([1], **ints),
        rows=torch.tensor([0], **ints),
        block_tables=runner.rows.block_tables,
        num_decodes=1,
        max_query=1,
        max_context=1,
    )
    assert runner.tape(torch.tensor([198]), batch).shape == (1, 64)
    with pytest.raises(LayoutError, match="token id"):
        runner.tape(torch.tensor([199]), batch)
    batch.slots[0] = 10**9
    with pytest.raises(LayoutError, match="slot"):
        runner.tape(torch.tensor([5]), batch)
    batch.slots[0], batch.positions[0] = 0, 10**9
    with pytest.raises(LayoutError, match="position"):
        runner.tape(torch.tensor([5]), batch)
