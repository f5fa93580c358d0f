"""Tensor-parallel decode computed from one shard."""

from __future__ import annotations

import pytest

from penstock.bench import shapes
from penstock.bench.shard import Link, measure, shard_shape, sums_s
from penstock.engine.config import EngineConfig
from penstock.errors import ConfigError


def test_a_shard_has_its_part_of_heads_width_and_vocabulary() -> None:
    shard = shard_shape(shapes.named("llama-70b"), 8)
    assert (shard["num_attention_heads"], shard["num_key_value_heads"], shard["head_dim"]) == (8, 1, 128)
    assert shard["intermediate_size"] * 8 == shapes.named("llama-70b")["intermediate_size"]
    with pytest.raises(ConfigError, match="do not divide"):
        shard_shape(shapes.named("llama-70b"), 7)


def test_sums_take_the_shorter_form() -> None:
    link = Link(100e9, 10e-6)
    assert link.all_reduce_s(1000, 8) == pytest.approx(10e-6 + 7 * 1000 / 100e9)
    assert link.all_reduce_s(1 << 20, 8) == pytest.approx(15e-6 + 1.75 * (1 << 20) / 100e9)
    config = shapes.named("llama-70b")
    assert sums_s(config, 8, 1, link) == pytest.approx(161 * 10e-6, rel=0.2)


def test_a_shard_is_measured() -> None:
    tiny = shapes.named("smollm2-135m") | {"num_hidden_layers": 2, "vocab_size": 300, "num_attention_heads": 9}
    settings = EngineConfig("tiny", device="cpu", dtype="float32", threads=1, max_running=2, max_model_len=128)
    (step,) = measure(tiny, 3, [2], Link(), settings, context=8)
    assert 0 < step.sums_s < step.step_s and step.shard_s > 0
