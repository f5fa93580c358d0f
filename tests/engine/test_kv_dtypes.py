"""An engine with one byte per cached number: room for more, log-probabilities close to those of the full cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.engine.backends import cpu
from penstock.engine.backends.cpu.backend import CpuBackend
from penstock.engine.config import EngineConfig
from penstock.engine.kv.cache import CacheShape
from penstock.engine.models.families import read_config
from penstock.errors import ConfigError
from tests.engine.harness import assert_idle, drain, generate, greedy, make_engine
from tests.engine.tiny import write_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama-gqa", tmp_path_factory.mktemp("llama"), spread=0.3)


PROMPT = [(7 * i * i + 3 * i) % 199 for i in range(900)]


def prompt_logprobs(folder: Path, **settings: object) -> torch.Tensor:
    engine = make_engine(folder, token_budget=256, **settings)
    engine.submit(greedy("a", PROMPT, 1, prompt_logprobs=0))
    scored = next(delta.prompt_logprobs for delta in drain(engine) if delta.prompt_logprobs is not None)
    assert_idle(engine)
    return torch.tensor([entry.logprob for entry in scored if entry is not None])


@pytest.mark.parametrize(("kv_dtype", "limit"), [("int8", 0.01), ("fp8", 0.05)])
def test_logprobs_stay_close_at_long_context(folder: Path, kv_dtype: str, limit: float) -> None:
    exact = prompt_logprobs(folder)
    close = prompt_logprobs(folder, kv_dtype=kv_dtype)
    assert not torch.equal(exact, close), "the cache was not kept in few bits"
    assert float((exact - close).abs().mean()) < limit
    assert float((exact[-100:] - close[-100:]).abs().mean()) < limit, "the error grows with the context"


def test_an_fp8_cache_beside_weights_that_are_calibrated(folder: Path) -> None:
    close = prompt_logprobs(folder, kv_dtype="fp8", weights="int8", activations="int8")
    assert (close - prompt_logprobs(folder)).abs().mean() < 0.1


def test_one_byte_per_number_doubles_the_blocks(folder: Path) -> None:
    blocks = {
        kv_dtype: make_engine(folder, kv_dtype=kv_dtype, kv_memory=1 << 20).info.num_blocks
        for kv_dtype in ("auto", "int8", "fp8")
    }
    assert blocks["fp8"] == pytest.approx(4 * blocks["auto"], abs=4)  # a quarter of float32
    # Heads of 16 numbers: a scale of two bytes costs an eighth.
    assert blocks["int8"] == pytest.approx(4 * 16 / 18 * blocks["auto"], abs=4)
    wide = CacheShape.of_paged_kv(32, 8, 128, 16, torch.bfloat16).block_bytes
    assert wide / CacheShape.of_paged_kv(32, 8, 128, 16, torch.float8_e4m3fn).block_bytes == 2
    assert wide / CacheShape.of_paged_kv(32, 8, 128, 16, torch.int8).block_bytes > 1.96


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_batching_prefix_reuse_and_preemption_change_nothing(folder: Path, kv_dtype: str) -> None:
    prompts = {f"r{i}": PROMPT[: 40 + 9 * i] for i in range(5)}
    alone = {
        name: generate(make_engine(folder, kv_dtype=kv_dtype), greedy(name, prompt, 24))[name]
        for name, prompt in prompts.items()
    }
    crowded = make_engine(folder, kv_dtype=kv_dtype, num_blocks=14, token_budget=32)
    together = generate(crowded, *(greedy(name, prompt, 24) for name, prompt in prompts.items()))
    assert together == alone
    assert crowded.load_snapshot().preemptions > 0 and crowded.load_snapshot().prefix_hit_tokens > 0
    assert_idle(crowded)


def test_int8_is_the_default_where_tiles_multiply_it_as_it_is_and_on_x86_without_bfloat16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ops = cpu.load(1)
    if ops is None:
        pytest.skip(cpu.status().detail)
    model = read_config({
        "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 1, "num_attention_heads": 9,
        "num_key_value_heads": 3, "intermediate_size": 64, "vocab_size": 64, "max_position_embeddings": 64,
    })  # fmt: skip
    config = EngineConfig("none")

    def picked(config: EngineConfig = config, dtype: torch.dtype = torch.bfloat16, **other: int) -> torch.dtype:
        return CpuBackend(ops).kv_dtype(config, replace(model, **other), dtype)

    monkeypatch.setattr(ops.handle, "has_matrix", False)
    monkeypatch.setattr(ops.handle, "has_byte_attention", False)
    monkeypatch.setattr(ops.handle, "has_per_channel", False)
    assert picked() == torch.bfloat16
    assert picked(dtype=torch.float32) == torch.float32
    monkeypatch.setattr(ops.handle, "has_per_channel", True)
    assert picked() == torch.bfloat16
    assert picked(dtype=torch.float32) == picked(dtype=torch.float32, head_dim=80) == torch.int8
    assert picked(replace(config, dtype="float32"), torch.float32) == torch.float32
    assert picked(replace(config, kv_dtype="full"), torch.float32) == torch.float32
    monkeypatch.setattr(ops.handle, "has_matrix", True)
    monkeypatch.setattr(ops.handle, "has_byte_attention", True)
    assert picked() == torch.int8
    assert picked(dtype=torch.float32) == torch.float32
    assert picked(head_dim=80) == torch.bfloat16
    assert picked(num_heads=27) == torch.bfloat16
    assert picked(replace(config, block_size=8)) == torch.bfloat16
    assert picked(replace(config, kv_dtype="full")) == torch.bfloat16
    assert picked(replace(config, kv_dtype="fp8")) == torch.float8_e4m3fn


def test_attention_in_fp8_is_refused_where_there_is_no_kernel_for_it(folder: Path) -> None:
    with pytest.raises(ConfigError, match="fp8_attention: true needs a GPU of compute capability 9"):
        make_engine(folder, kv_dtype="fp8", fp8_attention=True)
    with pytest.raises(ConfigError, match="deterministic: true attends token by token"):
        make_engine(folder, kv_dtype="fp8", fp8_attention=True, deterministic=True)
