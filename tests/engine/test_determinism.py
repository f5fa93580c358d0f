"""Deterministic mode: a request gets the same bits alone, in any batch, in any chunks, from the cache or not."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from penstock.engine.adapters.spec import AdapterSpec
from penstock.engine.backends import cpu
from penstock.engine.backends.cpu.backend import CpuBackend
from penstock.engine.backends.cpu.dense_linear import DenseLinear
from penstock.engine.core import Engine
from penstock.engine.request import Delta, Request, SamplingParams, TokenLogprob
from penstock.errors import ConfigError
from tests.engine.adapters.files import write_adapter
from tests.engine.harness import assert_idle, drain, make_engine
from tests.engine.speculative.forced import Oracle, eager_engine
from tests.engine.tiny import write_checkpoint

VOCAB = 199
ops = cpu.load(2)
native = pytest.mark.skipif(ops is None, reason="no native kernels here")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama-mha-bias", tmp_path_factory.mktemp("fixed"), spread=0.6)


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


WATCHED = [
    Request("greedy", prompt(1, 150), SamplingParams(max_tokens=24, temperature=0.0, logprobs=3)),
    Request("sampled", prompt(2, 37), SamplingParams(max_tokens=24, temperature=0.9, top_p=0.9, seed=5, logprobs=0)),
    Request("scored", prompt(3, 60), SamplingParams(max_tokens=4, temperature=0.0, logprobs=1, prompt_logprobs=2)),
]


def bits(deltas: list[Delta], name: str) -> tuple[list[int], list[TokenLogprob | None]]:
    """The tokens of a request and all its log-probabilities, floats as they are."""
    mine = [delta for delta in deltas if delta.request_id == name]
    prompt_scores = [score for delta in mine for score in delta.prompt_logprobs or ()]
    scores = [score for delta in mine for score in delta.logprobs or ()]
    return [token for delta in mine for token in delta.tokens], prompt_scores + scores


def run(engine: Engine, requests: list[Request]) -> list[Delta]:
    for request in requests:
        engine.submit(request)
    return drain(engine)


def others_in_batch(count: int) -> list[Request]:
    rng = random.Random(count)
    return [
        Request(f"c{i}", prompt(100 + i, rng.randrange(1, 90)), SamplingParams(max_tokens=rng.randrange(1, 40), seed=i))
        for i in range(count)
    ]


@native
@pytest.mark.parametrize("settings", [{}, {"weights": "int8"}, {"weights": "int4", "activations": "int16"}])
def test_the_same_bits_alone_in_any_batch_and_in_any_chunks(checkpoint: Path, settings: dict[str, Any]) -> None:
    fixed = {"deterministic": True, "num_blocks": 400, **settings}
    alone = make_engine(checkpoint, **fixed)
    expected = {request.request_id: bits(run(alone, [request]), request.request_id) for request in WATCHED}
    again = {request.request_id: bits(run(alone, [request]), request.request_id) for request in WATCHED}
    assert again == expected, "with the prompt found in the cache"
    assert alone.load_snapshot().prefix_hit_tokens > 100
    for budget, others in ((512, 3), (64, 11), (7, 2)):
        engine = make_engine(checkpoint, **fixed, token_budget=budget)
        deltas = run(engine, others_in_batch(others) + WATCHED)
        for name, wanted in expected.items():
            assert bits(deltas, name) == wanted, (name, budget, others)
        assert_idle(engine)


@native
def test_the_same_bits_after_preemption_and_with_speculation(checkpoint: Path) -> None:
    requests = WATCHED[:2] + others_in_batch(6)
    roomy = make_engine(checkpoint, deterministic=True, num_blocks=400)
    expected = {request.request_id: bits(run(roomy, [request]), request.request_id) for request in requests}
    texts = {name: tokens for name, (tokens, _) in expected.items()}
    tight = make_engine(checkpoint, deterministic=True, num_blocks=12, token_budget=48)
    deltas = run(tight, requests)
    assert tight.load_snapshot().preemptions > 0
    speculating = eager_engine(
        checkpoint, lambda _: Oracle(texts, wrong=0.3, vocab_size=VOCAB), deterministic=True, num_blocks=400
    )
    speculated = run(speculating, requests)
    assert speculating.load_snapshot().accepted_tokens > 20
    for name, wanted in expected.items():
        assert bits(deltas, name) == wanted, name
        assert bits(speculated, name) == wanted, name


@native
def test_it_is_close_to_the_usual_engine(checkpoint: Path) -> None:
    for request in WATCHED[:2]:
        usual = run(make_engine(checkpoint), [request])
        fixed = run(make_engine(checkpoint, deterministic=True), [request])
        assert [token for delta in fixed for token in delta.tokens] == [t for delta in usual for t in delta.tokens]


@native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(40, 64), (33, 100), (7, 19)])
def test_dense_linears_ignore_how_many_rows_there_are(shape: tuple[int, int], dtype: torch.dtype) -> None:
    assert ops is not None
    torch.manual_seed(3)
    weight, bias = torch.randn(shape), torch.randn(shape[0])
    linear = DenseLinear(ops.handle, weight, bias)
    x = torch.randn(23, shape[1]).to(dtype)
    whole = linear(x)
    for rows in (1, 2, 3, 4, 5, 9):
        for begin in (0, 7, 23 - rows):
            assert torch.equal(linear(x[begin : begin + rows].contiguous()), whole[begin : begin + rows])
    exact = x.double() @ weight.double().T + bias.double()
    assert torch.allclose(whole.double(), exact, rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-4)


@native
def test_the_same_bits_with_experts_and_with_adapters(tmp_path: Path) -> None:
    """Any number of tokens for an expert, or of an adapter, at a time."""
    for family in ("qwen3-moe", "llama-gqa"):
        folder = write_checkpoint(family, tmp_path / family, spread=0.6)
        targets = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")  # of experts too
        files = [
            write_adapter(tmp_path / f"{family}{i}", folder, rank=5 + i, seed=i, targets=targets) for i in range(2)
        ]
        specs = tuple(AdapterSpec(str(i), str(file)) for i, file in enumerate(files))
        requests = [replace(request, adapter=str(i)) for i, request in enumerate([*WATCHED[:2]])] + [WATCHED[2]]
        engine = make_engine(folder, deterministic=True, num_blocks=400, adapters=specs, token_budget=64)
        expected = {request.request_id: bits(run(engine, [request]), request.request_id) for request in requests}
        others = [replace(other, adapter=str(i % 2)) for i, other in enumerate(others_in_batch(4))]
        deltas = run(engine, others + requests)
        for name, wanted in expected.items():
            assert bits(deltas, name) == wanted, (family, name)


OTHERS = (
    "bamba", "deepseek-v3", "falcon-h1", "gemma2", "glm4-moe", "gpt-oss", "granite4-hybrid", "llama4-plain", "lfm2-moe",
    "glm5-next", "kimi-linear", "mamba2",
    "nemotron-h", "nemotron-h-narrow-experts", "qwen2-moe", "qwen3.5",
)  # fmt: skip


@native
@pytest.mark.parametrize(
    "family", ["nemotron-h-experts", "qwen3-next", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_the_same_bits_in_any_family(tmp_path: Path, family: str) -> None:
    """Recurrent layers, and the sigmoids of routers and gates, are computed by PyTorch, whose sums and functions depend
    on how many tokens there are."""
    folder = write_checkpoint(family, tmp_path, spread=0.6)
    requests = [replace(request, params=replace(request.params, max_tokens=4)) for request in WATCHED[1:]]
    fixed = {"deterministic": True, "num_blocks": 200, "state_interval": 32, "max_model_len": 256}
    alone = make_engine(folder, **fixed)
    expected = {request.request_id: bits(run(alone, [request]), request.request_id) for request in requests}
    again = {request.request_id: bits(run(alone, [request]), request.request_id) for request in requests}
    assert again == expected, "with the prompt found in the cache"
    deltas = run(make_engine(folder, **fixed, token_budget=13), others_in_batch(1) + requests)
    for name, wanted in expected.items():
        assert bits(deltas, name) == wanted, name


def test_what_has_no_deterministic_form_is_refused(tmp_path: Path) -> None:
    dense = write_checkpoint("llama-gqa", tmp_path)
    with patch.object(CpuBackend, "invariant_adapters", False), pytest.raises(ConfigError, match="adapters on this"):
        make_engine(dense, deterministic=True, adapter_slots=2)
