"""Engines that compute the products between two attentions of one token in one launch: the tokens of the reference,
and the probabilities of an engine that launches them one by one."""

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
from penstock.engine.backends.cuda.graphs import GraphExecutor  # noqa: E402
from penstock.engine.backends.cuda.trials import ONE_TOKEN  # noqa: E402
from penstock.engine.core import Engine  # noqa: E402
from penstock.engine.request import Delta, Request, SamplingParams  # noqa: E402
from penstock.engine.sleep.offload import offload  # noqa: E402
from tests.engine.adapters.files import write_adapter  # noqa: E402
from tests.engine.harness import assert_idle, collect, drain, generate, greedy, make_engine  # noqa: E402
from tests.engine.tiny import Reference, write_checkpoint  # noqa: E402

ON_DEVICE = torch.cuda.is_available() and os.environ.get("PENSTOCK_GPU_TESTS") != "compile"
FAMILIES = ("qwen2-bias", "qwen3-qknorm", "mistral-window")
LENGTHS = (1, 17, 130)
TIE = 0.1
"""Logits of small weights in 16 bits; they spread over several."""
SPREAD = 0.3


def _engine(folder: Path, chains: bool = True, **settings: object) -> Engine:
    with patch.dict(os.environ, {ONE_TOKEN: "chain" if chains else "launches"}):
        engine = make_engine(folder, **{"device": "cuda", "max_running": 4, "num_blocks": 60, **settings})
    executor = engine.runner.executor
    assert isinstance(executor, GraphExecutor)
    assert executor.graphs.decoder.chained == chains
    return engine


def _prompts(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(199) for _ in range(length)] for length in LENGTHS]


def _scored(engine: Engine, prompt: list[int], count: int = 40) -> tuple[list[int], list[float]]:
    """Greedy tokens of a sequence that is alone, and their log-probabilities."""
    engine.submit(Request("a", prompt, SamplingParams(max_tokens=count, temperature=0.0, logprobs=1)))
    deltas: list[Delta] = drain(engine)
    return collect(deltas)["a"], [found.logprob for delta in deltas for found in delta.logprobs or []]


def _compare(one: tuple[list[int], list[float]], other: tuple[list[int], list[float]], most: float) -> int:
    """Log-probabilities up to the first token in which two texts differ. Returns how many there are."""
    same = 0
    while same < len(one[0]) and one[0][same] == other[0][same]:
        assert abs(one[1][same] - other[1][same]) < most, (same, one[1][same], other[1][same])
        same += 1
    return same


def test_greedy_equals_the_reference() -> None:
    if not ON_DEVICE or not offered():
        return
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            path = write_checkpoint(family, Path(folder), spread=SPREAD)
            reference = Reference(path)
            engine = _engine(path, dtype="bfloat16")
            for prompt in _prompts(7):
                tokens = generate(engine, greedy("a", prompt, 40))["a"]
                margins = reference.margins(prompt, tokens)
                assert len(tokens) == 40 and float(margins.max()) < TIE, (family, len(prompt), margins)
            both = [greedy(str(n), prompt, 12) for n, prompt in enumerate(_prompts(8))]
            for name, tokens in generate(engine, *both).items():
                assert float(reference.margins(_prompts(8)[int(name)], tokens).max()) < TIE, (family, name)
            assert_idle(engine)


def test_probabilities_with_chains_and_without() -> None:
    """Also with FP8 weights, biases and an FP8 cache; in sizes whose rows do not divide among the programs."""
    if not ON_DEVICE or not offered():
        return
    sizes = {"hidden_size": 320, "intermediate_size": 1200, "num_attention_heads": 10, "num_key_value_heads": 2}
    with tempfile.TemporaryDirectory() as folder:
        small = write_checkpoint("qwen2-bias", Path(folder) / "small", spread=SPREAD)
        wide = write_checkpoint("llama-mha-bias", Path(folder) / "wide", spread=SPREAD / 2, **sizes)
        for path, settings, most in (
            (small, {"weights": "fp8"}, 0.15),
            (wide, {"weights": "fp8", "kv_dtype": "fp8"}, 0.15),
        ):
            chained, usual = (_engine(path, chains, dtype="bfloat16", **settings) for chains in (True, False))
            alike = [_compare(_scored(chained, prompt), _scored(usual, prompt), most) for prompt in _prompts(9)]
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
        chained, usual = (_engine(path, chains, dtype="bfloat16", adapters=adapters) for chains in (True, False))

        def texts(engine: Engine) -> list[list[int]]:
            sampling = SamplingParams(max_tokens=16, temperature=0.0)
            return [
                generate(engine, Request("a", prompt, sampling, adapter=name))["a"]
                for name in ("narrow", "wide", "")
                for prompt in _prompts(10)
            ]

        first, expected = texts(chained), texts(usual)
        same = sum(one == other for one, other in zip(first, expected, strict=True))
        print(f"    {same} of {len(first)} texts with adapters are the same")
        assert same >= len(first) - 3  # the others have a tie somewhere
        del usual
        asleep = offload(chained)
        assert texts(asleep.restore()) == first
        drafting = _engine(path, dtype="bfloat16", speculation="draft", draft_model=str(path))
        reference = Reference(path)
        for prompt in _prompts(11):
            tokens = generate(drafting, greedy("a", prompt, 24))["a"]
            assert float(reference.margins(prompt, tokens).max()) < TIE
        assert drafting.load_snapshot().accepted_tokens > 0
