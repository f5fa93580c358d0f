"""Engines that compute the products between two attentions of one token in one launch: the probabilities and tokens of
an engine that launches them one by one."""

from __future__ import annotations

import os
import random
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from test_triton_chained_step import offered  # noqa: E402

from penstock.engine.adapters.spec import AdapterSpec  # noqa: E402
from penstock.engine.backends.cuda import exclusive  # noqa: E402
from penstock.engine.backends.cuda.chains import ONE_TOKEN  # noqa: E402
from penstock.engine.backends.cuda.graphs import GraphExecutor  # noqa: E402
from penstock.engine.core import Engine  # noqa: E402
from penstock.engine.request import Delta, Request, SamplingParams  # noqa: E402
from penstock.engine.sleep.offload import offload  # noqa: E402
from tests.engine.adapters.files import write_adapter  # noqa: E402
from tests.engine.harness import assert_idle, collect, drain, make_engine  # noqa: E402
from tests.engine.tiny import write_checkpoint  # noqa: E402

ON_DEVICE = torch.cuda.is_available() and os.environ.get("PENSTOCK_GPU_TESTS") != "compile"
LENGTHS = (1, 17, 130)
SPREAD = 0.3


def _engine(folder: Path, chains: bool = True, **settings: object) -> Engine:
    if chains:
        exclusive._owners.clear()  # engines of earlier tests, which are idle
    fixed = {"device": "cuda", "dtype": "bfloat16", "weights": "fp8", "max_running": 4, "num_blocks": 60}
    with patch.dict(os.environ, {ONE_TOKEN: "chain" if chains else "launches"}):
        engine = make_engine(folder, **{**fixed, **settings})
    executor = engine.runner.executor
    assert isinstance(executor, GraphExecutor)
    assert executor.graphs.decoder.chained == chains
    return engine


def _prompts(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(199) for _ in range(length)] for length in LENGTHS]


def _scored(engine: Engine, prompt: list[int], count: int = 40, adapter: str = "") -> tuple[list[int], list[float]]:
    """Greedy tokens of a sequence that is alone, and their log-probabilities."""
    sampling = SamplingParams(max_tokens=count, temperature=0.0, logprobs=1)
    engine.submit(Request("a", prompt, sampling, adapter=adapter))
    deltas: list[Delta] = drain(engine)
    return collect(deltas)["a"], [found.logprob for delta in deltas for found in delta.logprobs or []]


def _compare(one: tuple[list[int], list[float]], other: tuple[list[int], list[float]], most: float = 0.15) -> int:
    """Log-probabilities up to the first token in which two texts differ. Returns how many there are."""
    same = 0
    while same < len(one[0]) and one[0][same] == other[0][same]:
        assert abs(one[1][same] - other[1][same]) < most, (same, one[1][same], other[1][same])
        same += 1
    return same


def test_probabilities_with_chains_and_without() -> None:
    """Also with biases and an FP8 cache; in sizes whose rows do not divide among the blocks."""
    if not ON_DEVICE or not offered():
        return
    sizes = {"hidden_size": 320, "intermediate_size": 1200, "num_attention_heads": 10, "num_key_value_heads": 2}
    with tempfile.TemporaryDirectory() as folder:
        small = write_checkpoint("qwen2-bias", Path(folder) / "small", spread=SPREAD)
        wide = write_checkpoint("llama-mha-bias", Path(folder) / "wide", spread=SPREAD / 2, **sizes)
        for path, settings in ((small, {}), (wide, {"kv_dtype": "fp8"})):
            chained, usual = (_engine(path, chains, **settings) for chains in (True, False))
            alike = [_compare(_scored(chained, prompt), _scored(usual, prompt)) for prompt in _prompts(9)]
            print(f"    {path.name} {settings}: of 40 tokens the first {alike} are the same")
            assert sum(alike) > 20, (settings, alike)
            assert_idle(chained)


def test_adapters_speculation_and_sleep() -> None:
    """Adapters of query, key and value cut chains before these; other adapters leave none."""
    if not ON_DEVICE or not offered():
        return
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint("llama-gqa", Path(folder) / "base", spread=SPREAD)
        adapters = (
            AdapterSpec("narrow", str(write_adapter(Path(folder) / "n", path, targets=("q_proj", "v_proj")))),
            AdapterSpec("wide", str(write_adapter(Path(folder) / "w", path, size=0.1))),
        )
        chained, usual = (_engine(path, chains, adapters=adapters) for chains in (True, False))

        def texts(engine: Engine) -> list[tuple[list[int], list[float]]]:
            return [_scored(engine, prompt, 16, name) for name in ("narrow", "wide", "") for prompt in _prompts(10)]

        first, expected = texts(chained), texts(usual)
        alike = [_compare(one, other) for one, other in zip(first, expected, strict=True)]
        print(f"    with adapters: of 16 tokens the first {alike} are the same")
        assert sum(alike) > 40, alike  # most of them, up to a tie
        asleep = offload(chained)
        assert [tokens for tokens, _ in texts(asleep.restore())] == [tokens for tokens, _ in first]
        drafting = _engine(path, speculation="draft", draft_model=str(path))
        alike = [_compare(_scored(drafting, prompt, 24), _scored(usual, prompt, 24)) for prompt in _prompts(11)]
        print(f"    with drafts: of 24 tokens the first {alike} are the same")
        assert sum(alike) > 15, alike
        assert drafting.load_snapshot().accepted_tokens > 0
