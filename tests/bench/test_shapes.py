"""Named shapes and the bytes and operations counted from them."""

import pytest

from penstock.bench import shapes
from penstock.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama-8b", 7.505), ("qwen3-0.6b", 0.596), ("smollm2-135m", 0.1345), ("llama-70b", 69.50)],
)
def test_parameters_read_per_step(name: str, billions: float) -> None:
    cost = shapes.cost(shapes.named(name), weight_bytes=2, kv_bytes=2)
    assert (cost.linear_params + cost.head_params) / 1e9 == pytest.approx(billions, rel=1e-3)
    assert cost.weights == 2 * (cost.linear_params + cost.head_params)


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
