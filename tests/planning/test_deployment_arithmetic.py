"""The edges of a deployment: the least and the most of every setting, and formats for every kind of device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.planning.catalogue import Prices, device
from penstock.planning.deployment import Deployment, Speculation, possible_tensor_parallel, splits
from penstock.planning.numbers import WEIGHT_FORMATS, WeightFormat
from penstock.planning.shape import ModelShape, Moe
from penstock.planning.token_mixers import Mla

SMALL = ModelShape(
    name="small", family="llama", layers=5, hidden=512, ffn=48, heads=8, kv_heads=4, head_dim=64, vocab=101,
    max_positions=640, windows=(None,) * 5,
)  # fmt: skip
MOE = Moe(experts=4, top_k=2, ffn=12, layers=(True,) * 5, bias=False)
MLA = Mla(kv_rank=20, rope_dim=4, nope_dim=10, value_dim=7)


def deployed(shape: ModelShape = SMALL, on: str = "h100", **settings: Any) -> Deployment:
    return Deployment(shape=shape, device=device(on), **settings)


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("tensor_parallel", 1), ("pipeline_parallel", 1), ("max_model_len", 1), ("max_running", 1),
        ("token_budget", 1), ("block_size", 1), ("kv_memory", 1), ("host_memory", 0), ("shared_prefix", 0),
        ("adapter_slots", 0), ("adapter_rank", 1), ("adapter_rows", 0), ("adapter_blocks", 0),
        ("adapter_tokens", 0),
    ],
)  # fmt: skip
def test_the_least_of_a_setting(name: str, least: int) -> None:
    assert getattr(deployed(**{name: least}), name) == least
    with pytest.raises(ConfigError, match=f"{name}: {least - 1} must be {least} or more"):
        deployed(**{name: least - 1})


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        ({"max_model_len": 640}, {"max_model_len": 641}),
        ({"shared_prefix": 639}, {"shared_prefix": 640}),
        ({"adapter_tokens": 639}, {"adapter_tokens": 640}),
        ({"adapter_prefixes": True}, {"shape": replace(SMALL, mla=MLA), "adapter_prefixes": True}),
        ({"max_model_len": 64, "shared_prefix": 63}, {"max_model_len": 64, "shared_prefix": 64}),
        ({"memory_share": 1.0}, {"memory_share": 1.01}),
        ({"memory_share": 0.01}, {"memory_share": 0.0}),
        ({"pipeline_parallel": 5}, {"pipeline_parallel": 6}),
        ({"tensor_parallel": 8, "pipeline_parallel": 2}, {"on": "a10", "tensor_parallel": 8}),
        ({"on": "cpu-16"}, {"on": "cpu-16", "pipeline_parallel": 2}),
        ({"on": "a10", "kv_dtype": "int8"}, {"on": "a10", "kv_dtype": "fp8"}),
        ({"on": "a10", "weight_dtype": "int8"}, {"on": "a10", "weight_dtype": "fp8"}),
        ({"on": "h100", "kv_dtype": "fp8"}, {"on": "b200", "weight_dtype": "fp4"}),
        ({"on": "cpu-16", "kv_dtype": "fp8"}, {"on": "a100-80", "kv_dtype": "fp8", "weight_dtype": "fp8"}),
    ],
)
def test_both_sides_of_what_is_allowed(settings: dict[str, Any], wrong: dict[str, Any]) -> None:
    made = deployed(**settings)
    for name, value in settings.items():
        assert name == "on" or getattr(made, name) == value
    with pytest.raises(ConfigError):
        deployed(**wrong)


def test_families_that_are_planned_only_have_fewer_limits() -> None:
    planned = replace(SMALL, served=False)
    assert deployed(planned, on="b200", weight_dtype="fp4").weights.compute == "fp4"
    assert deployed(planned, tensor_parallel=8, pipeline_parallel=2).nodes == 2
    assert deployed(planned, tensor_parallel=4, pipeline_parallel=3).nodes == 2
    assert deployed(planned, on="a10", tensor_parallel=8, pipeline_parallel=2).nodes == 4
    assert deployed(planned, on="a10", tensor_parallel=2, host_memory=5).nodes == 1


def test_a_draft_model_is_spread_over_the_first_stage() -> None:
    """Over as many of its devices as divide the draft model."""
    assert deployed().draft is None
    draft = Speculation("draft", 0.5, draft=replace(SMALL, heads=2, kv_heads=1, ffn=6))
    for tensor, spread in ((1, 1), (2, 2), (4, 2)):
        found = deployed(speculation=draft, tensor_parallel=tensor, pipeline_parallel=2, max_model_len=9).draft
        assert found is not None and found.speculation is None and found.context_len == 640
        assert (found.tensor_parallel, found.pipeline_parallel, found.shape) == (spread, 1, draft.draft)
    ngram = Speculation("ngram", 0.5)
    assert deployed(speculation=ngram, tensor_parallel=2).devices == 2 and ngram.depth == 6


@pytest.mark.parametrize(("acceptance", "depth"), [(-0.01, 1), (1.01, 1), (0.5, 0)])
def test_speculation_that_cannot_be(acceptance: float, depth: int) -> None:
    with pytest.raises(ConfigError):
        Speculation("ngram", acceptance, depth)
    with pytest.raises(ConfigError, match="`ngram` has none"):
        Speculation("ngram", 0.5, draft=SMALL)


@pytest.mark.parametrize(
    ("acceptance", "depth", "tokens"), [(0.0, 1, 1.0), (0.5, 1, 1.5), (0.5, 3, 1.875), (1.0, 1, 2), (0.25, 2, 1.3125)]
)
def test_tokens_of_a_verified_step(acceptance: float, depth: int, tokens: float) -> None:
    assert Speculation("ngram", acceptance, depth).tokens_per_step == pytest.approx(tokens)


def test_defaults() -> None:
    gpu, cpu = deployed(), deployed(on="cpu-16")
    assert (gpu.most_running, gpu.step_tokens, gpu.block_size, gpu.context_len) == (256, 8448, 16, 640)
    assert (cpu.most_running, cpu.step_tokens, cpu.devices, cpu.nodes) == (64, 512, 1, 1)
    own = deployed(max_running=3, token_budget=7, max_model_len=9)
    assert (own.most_running, own.step_tokens, own.context_len) == (3, 7, 9)
    assert (gpu.host_memory, gpu.shared_prefix, gpu.tensor_parallel, gpu.pipeline_parallel) == (0, 0, 1, 1)


def test_labels_and_prices() -> None:
    assert deployed().label == "h100 x1, bf16 weights, bf16 KV"
    assert deployed(tensor_parallel=2, pipeline_parallel=2).label == "h100 x4 (TP 2, PP 2), bf16 weights, bf16 KV"
    assert deployed(pipeline_parallel=2).label == "h100 x2 (PP 2), bf16 weights, bf16 KV"
    priced = replace(device("h100"), prices=Prices(on_demand=3.0, spot=1.5))
    four = Deployment(shape=SMALL, device=priced, tensor_parallel=4)
    assert (four.price_per_hour(), four.price_per_hour("spot"), four.price_per_hour("reserved")) == (12.0, 6.0, None)


def test_weights_are_held_at_least_as_the_device_computes() -> None:
    assert deployed(weight_dtype="bf16").weights == WEIGHT_FORMATS["bf16"]
    assert deployed(on="cpu-2").weights == WEIGHT_FORMATS["fp32"]
    assert deployed(weight_dtype="fp32").weights == WEIGHT_FORMATS["fp32"]
    # A device without bfloat16 widens what is dense, and a head in as many bits.
    halves = deployed(on="cpu-2", weight_dtype="bf16").weights
    assert (halves.matrix_bytes, halves.dense_bytes, halves.head_bytes) == (2, 4, 4)
    few = deployed(on="cpu-2", weight_dtype="int8").weights
    assert (few.matrix_bytes, few.dense_bytes, few.head_bytes) == (1.0625, 4, 1.0625)
    for head, held in ((1.5, 1.5), (2.0, 4), (2.5, 4), (5.0, 5.0)):
        stored = WeightFormat("odd", 1.0, head, "bf16")
        assert deployed(SMALL.with_stored(stored), on="cpu-2").weights.head_bytes == held
        assert deployed(SMALL.with_stored(stored)).weights == stored


def test_experts_are_held_as_other_matrices() -> None:
    routed = replace(SMALL, moe=MOE)
    assert deployed(routed, weight_dtype="int8").weights.further == 1 + 2 / 128
    assert deployed(routed, weight_dtype="fp8").weights.further == 1
    assert deployed(routed, on="cpu-16", weight_dtype="int8").weights.further == 1 + 2 / 32
    assert deployed(SMALL, weight_dtype="int8").weights.expert_bytes is None


@pytest.mark.parametrize(
    ("on", "shape", "settings", "form"),
    [
        ("cpu-16", {}, {}, "int8"),
        ("cpu-16", {}, {"kv_dtype": "bf16"}, "bf16"),
        ("cpu-16", {"head_dim": 128}, {}, "int8"),
        ("cpu-16", {"head_dim": 96}, {}, "bf16"),
        ("cpu-16", {"head_dim": 63}, {}, "bf16"),
        ("cpu-16", {"head_dim": 65}, {}, "bf16"),
        ("cpu-16", {"heads": 32}, {}, "int8"),  # eight for each of keys
        ("cpu-16", {"heads": 36}, {}, "bf16"),
        ("cpu-16", {"mla": MLA}, {}, "bf16"),
        ("cpu-16", {}, {"block_size": 32}, "int8"),
        ("cpu-16", {}, {"block_size": 8}, "bf16"),
        ("cpu-16", {}, {"block_size": 15}, "bf16"),
        ("cpu-16", {}, {"block_size": 17}, "bf16"),
        ("cpu-16", {}, {"block_size": 30}, "bf16"),
        ("cpu-64", {}, {}, "bf16"),
        ("cpu-2", {}, {}, "fp32"),
        ("cpu-2-avx512", {"head_dim": 65, "heads": 36}, {"block_size": 15}, "int8"),
        ("cpu-2-avx512", {"mla": MLA}, {}, "fp32"),
        ("h100", {}, {}, "bf16"),
    ],
)
def test_the_format_of_the_cache(on: str, shape: dict[str, Any], settings: dict[str, Any], form: str) -> None:
    assert deployed(replace(SMALL, **shape), on=on, **settings).kv_format == form


def test_bytes_of_the_cache() -> None:
    assert deployed(kv_dtype="int8").kv_bytes == 1 + 2 / 64
    assert deployed(replace(SMALL, mla=MLA), kv_dtype="int8").kv_bytes == 1 + 2 / 24
    assert deployed().kv_bytes == 2


@pytest.mark.parametrize(("shards", "heads"), [(1, 4), (2, 2), (4, 1), (8, 1)])
def test_heads_of_keys_on_each_device(shards: int, heads: int) -> None:
    assert deployed(tensor_parallel=shards).kv_heads_per_device == heads


def test_what_shards_can_split() -> None:
    assert possible_tensor_parallel(SMALL) == [1, 2, 4, 8]
    twelve = replace(SMALL, heads=12, kv_heads=4, ffn=24)
    assert possible_tensor_parallel(twelve) == [1, 2, 4, 12], "3 and 6 do not divide four, nor does four divide them"
    assert possible_tensor_parallel(replace(twelve, mla=MLA)) == [1, 2, 3, 4, 6, 12]
    assert possible_tensor_parallel(replace(twelve, mla=MLA, ffn=9)) == [1, 3]
    routed = replace(twelve, mla=MLA, moe=replace(MOE, ffn=9))
    assert possible_tensor_parallel(routed) == possible_tensor_parallel(replace(routed, ffn=0)) == [1, 3]
    assert possible_tensor_parallel(replace(routed, ffn=8)) == [1, 3], "no layer has the dense width"
    mixed = replace(routed, ffn=8, moe=replace(MOE, ffn=9, layers=(False,) + (True,) * 4))
    assert possible_tensor_parallel(mixed) == [1]
    assert possible_tensor_parallel(replace(routed, moe=replace(MOE, ffn=9, shared_ffn=4))) == [1]
    assert splits(twelve, 4) and not splits(twelve, 3) and not splits(twelve, 8)
