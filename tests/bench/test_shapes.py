"""Named shapes and the bytes and operations counted from them."""

import io

import pytest
import torch
from rich.console import Console

from penstock.bench import shapes
from penstock.bench.choices import show_choices
from penstock.bench.offline import check_room
from penstock.engine.backends.host_memory import HostMemory
from penstock.engine.config import EngineConfig
from penstock.engine.core import Engine
from penstock.engine.loading.random_checkpoint import RandomCheckpoint
from penstock.errors import ConfigError
from tests.engine.harness import generate, greedy


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama-8b", 7.505), ("qwen3-0.6b", 0.596), ("smollm2-135m", 0.1345), ("llama-70b", 69.50), ("gemma2-2b", 2.614)],
)
def test_parameters_read_per_step(name: str, billions: float) -> None:
    cost = shapes.cost(shapes.named(name), weight_bytes=2, kv_bytes=2)
    assert (cost.linear_params + cost.head_params) / 1e9 == pytest.approx(billions, rel=1e-3)
    assert cost.weights(1) == cost.weights(64) == 2 * (cost.linear_params + cost.head_params)


@pytest.mark.parametrize(("name", "total", "active"), [("mixtral-8x7b", 46.57, 12.75), ("qwen3-30b-a3b", 30.22, 3.04)])
def test_a_token_passes_few_experts_and_a_large_batch_reads_all(name: str, total: float, active: float) -> None:
    config = shapes.named(name)
    cost = shapes.cost(config, weight_bytes=2, kv_bytes=2)
    assert sum(shapes.parameters(config)) / 1e9 == pytest.approx(total, rel=1e-3)
    assert cost.flops(1, 1) / 2e9 == pytest.approx(active, rel=1e-2)
    assert cost.weights(1) == cost.flops(1, 1), "two bytes and two operations for each weight of one token"
    assert cost.weights(10_000) == 2 * sum(shapes.parameters(config))


def test_a_shape_with_fewer_layers() -> None:
    config = shapes.named("granite4-h-tiny:8")
    assert config["num_hidden_layers"] == 8
    assert len(config["layer_types"]) == 8
    assert shapes.parameters(shapes.named("nemotron3-nano-30b:8")) < shapes.parameters(
        shapes.named("nemotron3-nano-30b")
    )
    assert shapes.named("llama-8b:16")["num_hidden_layers"] == 16
    for wrong in ("llama-8b:", "llama-8b:0", "llama-8b:33", "llama-8b:x"):
        with pytest.raises(ConfigError, match="1 to 32"):
            shapes.named(wrong)


def test_the_list_has_every_shape(caplog: pytest.LogCaptureFixture) -> None:
    page = Console(record=True, width=120, file=io.StringIO())
    show_choices(page)
    text = page.export_text()
    assert all(name in text for name in shapes.SHAPES)
    assert "mix" in text
    assert "8.03 B" in text, "with the embedding"
    assert not caplog.records, "shapes have only keys that their families know"


def test_kv_bytes_per_token_of_llama_8b() -> None:
    cost = shapes.cost(shapes.named("llama-8b"), weight_bytes=2, kv_bytes=2)
    assert cost.context(1) == 2 * 32 * 8 * 128 * 2


def test_head_dim_and_kv_heads_default_as_in_checkpoints() -> None:
    config = {key: value for key, value in shapes.named("smollm2-135m").items() if key != "head_dim"}
    assert shapes.cost(config, weight_bytes=2, kv_bytes=2) == shapes.cost(
        shapes.named("smollm2-135m"), weight_bytes=2, kv_bytes=2
    )
    config["num_key_value_heads"] = None
    assert shapes.cost(config, weight_bytes=2, kv_bytes=2).kv_elements == 2 * 30 * 9 * 64


def test_the_head_is_computed_only_for_sampled_tokens() -> None:
    cost = shapes.cost(shapes.named("smollm2-135m"), weight_bytes=2, kv_bytes=2)
    assert cost.flops(100, 1) - cost.flops(100, 0) == 2 * 49152 * 576


def test_an_unknown_shape_lists_the_others() -> None:
    with pytest.raises(ConfigError, match=r"unknown shape 'gpt'.*llama-8b"):
        shapes.named("gpt")


REDUCED = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "max_position_embeddings": 256,
}  # fmt: skip


@pytest.mark.parametrize("name", shapes.SHAPES)
def test_every_shape_runs_with_random_weights(name: str) -> None:
    """Reduced in size, not in kind."""
    config = shapes.named(name) | REDUCED
    config |= {key: 8 for key in ("num_experts", "num_local_experts", "n_routed_experts") if config.get(key)}
    if "mamba_n_heads" in config:
        config |= {"mamba_n_heads": 8, "mamba_d_head": 16, "layer_types": ["mamba", "attention"]}
    if config["model_type"] == "nemotron_h":
        config |= {"mamba_num_heads": 8, "mamba_head_dim": 16, "layers_block_type": ["mamba", "attention", "mlp"]}
    if config["model_type"].startswith("lfm2"):
        config["layer_types"] = ["conv", "full_attention"]
        config |= {"num_dense_layers": 1} if "num_dense_layers" in config else {}
    if config["model_type"] == "kimi_linear":
        config |= {"layer_types": ["linear_attention", "full_attention"], "linear_num_heads": 4, "linear_head_dim": 16}
        config |= {"num_experts_per_token": 4, "model_max_length": 256}
    if config["model_type"] == "mamba2":
        config["num_heads"] = 8
    if "kv_lora_rank" in config:  # all heads share one latent
        config |= {"num_key_value_heads": config["num_attention_heads"], "head_dim": None}
    config |= {key: min(config[key], 4) for key in ("num_experts_per_tok",) if key in config}
    config |= {key: 32 for key in ("moe_intermediate_size",) if key in config}
    checkpoint = RandomCheckpoint(config, dtype=torch.float32)
    settings = EngineConfig(model=name, device="cpu", dtype="float32", threads=1, num_blocks=16, weights="dense")
    engine = Engine.load(settings, checkpoint=checkpoint)
    # The weights of index heads are read in float32, and counted with norms and biases.
    apart = config["num_hidden_layers"] * config.get("index_n_heads", 0) * config["hidden_size"]
    assert engine.runner.decoder.weight_bytes == 4 * (sum(shapes.parameters(config)) + apart)
    assert len(generate(engine, greedy("a", list(range(40)), 5))["a"]) == 5


def test_a_shape_that_memory_cannot_hold_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostMemory, "available", lambda self: 20 << 30)
    shape = shapes.named("qwen3-30b-a3b:24")
    with pytest.raises(ConfigError, match=r"take at least 58\.0 GiB, and 20\.0 GiB of memory are free; .*:2\)"):
        check_room("qwen3-30b-a3b:24", shape, torch.float32, "auto")
    check_room("qwen3-30b-a3b:24", shape, torch.float32, "int4")
