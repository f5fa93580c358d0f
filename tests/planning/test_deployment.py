"""A deployment is checked when it is made, and splits as the engine splits."""

from typing import Any

import pytest

from penstock.engine.models.families import read_config
from penstock.engine.parallel.layout import check_layout
from penstock.errors import ConfigError
from penstock.planning.catalogue import device
from penstock.planning.config_shape import shape_of_config
from penstock.planning.deployment import Deployment, Speculation, possible_tensor_parallel, splits
from penstock.planning.model_shape import known_config, known_models, model_shape


def deployed(model: str = "llama-8b", on: str = "h100", **settings: Any) -> Deployment:
    return Deployment(shape=model_shape(model), device=device(on), **settings)


@pytest.mark.parametrize("name", [name for name in known_models() if model_shape(name).served])
def test_shapes_split_where_the_engine_splits_them(name: str) -> None:
    check_splits(known_config(name))


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("qwen3-30b-a3b", {"intermediate_size": 1001}),
        ("deepseek-v3", {"moe_intermediate_size": 36}),
        ("deepseek-v2-lite", {"moe_intermediate_size": 4, "intermediate_size": 12}),
        ("qwen3-next-80b-a3b", {"linear_num_key_heads": 2}),
        ("qwen3-next-80b-a3b", {"shared_expert_intermediate_size": 6}),
    ],
)
def test_every_width_that_the_engine_cuts_is_looked_at(name: str, keys: dict[str, Any]) -> None:
    check_splits(known_config(name) | keys)


def check_splits(config: dict[str, Any]) -> None:
    shape, model = shape_of_config(config, "any"), read_config(config)
    for tensor in range(1, 17):
        try:
            check_layout(model, tensor, 1)
        except ConfigError:
            assert not splits(shape, tensor)
        else:
            assert splits(shape, tensor)


def test_more_shards_than_kv_heads_have_copies() -> None:
    assert possible_tensor_parallel(model_shape("llama-70b")) == [1, 2, 4, 8, 16, 32, 64]
    assert deployed("qwen3-30b-a3b", tensor_parallel=8).kv_heads_per_device == 1
    assert deployed("llama-8b", tensor_parallel=4).kv_heads_per_device == 2


def test_defaults_are_the_engines() -> None:
    from penstock.engine.backends.cuda.device import TorchCudaBackend
    from penstock.engine.backends.reference.backend import ReferenceBackend
    from penstock.engine.config import EngineConfig

    for name, backend in (("h100", TorchCudaBackend), ("cpu-2", ReferenceBackend)):
        made = deployed("smollm2-135m", name)
        assert (made.most_running, made.step_tokens) == (backend.defaults.max_running, backend.defaults.token_budget)
        gap = backend.defaults.gap_s, backend.defaults.gap_yields_s, backend.defaults.prompt_tile
        assert (made.gap_s, made.gap_yields_s, made.prompt_tile) == gap
        assert made.block_size == EngineConfig(model="").block_size


def test_formats_follow_checkpoint_and_device() -> None:
    assert deployed().weights.name == "bf16" and deployed().kv_format == "bf16"
    assert deployed("llama-8b", "cpu-2").weights.name == "fp32", "no bfloat16 instructions"
    assert deployed("llama-8b", "cpu-64").kv_format == "bf16"
    assert deployed("llama-8b", "cpu-16").kv_format == "int8", "tiles multiply it as it is"
    assert deployed("llama-8b", "cpu-2", weight_dtype="int4").weights.matrix_bytes == 0.625
    int4 = deployed(weight_dtype="int4").weights
    assert int4.matrix_bytes == 0.5 + 4 / 128 and int4.head_bytes == 1 + 2 / 128
    assert deployed("qwen3-30b-a3b", weight_dtype="int4").weights.further == 0.5 + 4 / 128
    assert deployed("qwen3-30b-a3b", "cpu-16", weight_dtype="int4").weights.further == 0.625
    assert deployed("qwen3-30b-a3b", weight_dtype="fp8").weights.further == 1
    assert deployed(kv_dtype="int8").kv_bytes == 1 + 2 / 128


def test_prices_and_machines() -> None:
    eight = deployed("llama-70b", tensor_parallel=8)
    assert eight.price_per_hour() == pytest.approx(8 * 2.69) and eight.nodes == 1
    assert eight.label == "h100 x8 (TP 8), bf16 weights, bf16 KV"


def test_expected_tokens_of_a_verified_step() -> None:
    assert Speculation("ngram", acceptance=0.0).tokens_per_step == 1
    assert Speculation("ngram", acceptance=1.0, depth=4).tokens_per_step == 5
    assert Speculation("ngram", acceptance=0.5, depth=2).tokens_per_step == pytest.approx(1.75)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel": 3}, r"tensor_parallel: 3 cannot split 32 heads.*llama-3.1-8b allows 1, 2, 4, 8"),
        ({"tensor_parallel": 0}, "tensor_parallel: 0 must be 1 or more"),
        ({"pipeline_parallel": 33}, "pipeline_parallel: 33 is more than the 32 layers"),
        ({"tensor_parallel": 16}, "16 is more than the 8 devices of one machine with h100"),
        ({"weight_dtype": "int3"}, "weight_dtype: 'int3' must be one of auto, fp32, bf16"),
        ({"kv_dtype": "int4"}, "kv_dtype: 'int4' must be one of auto"),
        ({"weight_dtype": "fp4"}, "the engine has no FP4 weights"),
        ({"max_model_len": 200_000}, "max_model_len: 200000 is more than the 131072 positions"),
        ({"max_running": -1}, "max_running: -1 must be 1 or more"),
        ({"memory_share": 1.5}, "memory_share: 1.5 must be above 0 and at most 1"),
        ({"shared_prefix": 4096, "max_model_len": 4096}, "shared_prefix: 4096 tokens do not fit"),
        ({"kv_memory": 0}, "kv_memory: 0 must be 1 or more"),
        ({"host_memory": -1}, "host_memory: -1 must be 0 or more"),
        ({"adapter_slots": -1}, "adapter_slots: -1 must be 0 or more"),
        ({"adapter_rank": 0}, "adapter_rank: 0 must be 1 or more"),
        ({"on": "a100-80", "weight_dtype": "fp8"}, "a100-80 has no FP8 units"),
        ({"on": "a100-80", "kv_dtype": "fp8"}, "a100-80 has no FP8 units"),
        ({"on": "cpu-64", "tensor_parallel": 2}, "cpu-64: tensor_parallel and pipeline_parallel are for GPUs"),
    ],
)
def test_what_the_engine_would_refuse_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        deployed(**settings)


def test_bad_speculation_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"acceptance: 1.5 is not a probability; give a number from 0 to 1"):
        Speculation("ngram", acceptance=1.5)
    with pytest.raises(ConfigError, match="`draft` needs a draft model"):
        Speculation("draft", acceptance=0.5)


def test_families_that_the_engine_does_not_run_may_span_machines() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel: 16 is more than the 8 devices of one machine"):
        deployed("deepseek-v3", tensor_parallel=16)
    other = shape_of_config(known_config("deepseek-v3") | {"model_type": "other"}, "other")
    assert not other.served
    assert Deployment(shape=other, device=device("h100"), tensor_parallel=16).nodes == 2
