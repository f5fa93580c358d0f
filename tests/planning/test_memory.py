"""Memory of deployments: textbook figures, the engine's own sizing, and sentences for what does not fit."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine.adapters.model_sites import layout_of
from penstock.engine.adapters.norms import norms_in_layer
from penstock.engine.adapters.rows import RowBank
from penstock.engine.backends.cuda import graph_memory, prompt_graphs
from penstock.engine.backends.cuda.memory import CudaMemory
from penstock.engine.backends.host_memory import HostMemory
from penstock.engine.backends.interface import StepLimits
from penstock.engine.config import EngineConfig
from penstock.engine.core import Engine
from penstock.engine.kv.allocator import SlidingWindow, held_at_once
from penstock.engine.kv.kinds import PagedKV
from penstock.engine.loading.random_checkpoint import RandomCheckpoint
from penstock.engine.models.families import read_config
from penstock.engine.parallel.layout import Place, local_config
from penstock.engine.quantization.grids import SIZES
from penstock.planning import graphs, memory
from penstock.planning.catalogue import device
from penstock.planning.config_shape import shape_of_config, shape_of_model
from penstock.planning.deployment import Deployment, Speculation
from penstock.planning.memory import (
    MemoryPlan,
    adapter_bytes,
    adapter_row_bytes,
    adapter_vector_bytes,
    device_weights,
    kv_block_bytes,
    memory_plan,
    state_bytes,
)
from penstock.planning.model_shape import known_config, model_shape
from penstock.planning.numbers import CPU_FORMATS, WEIGHT_FORMATS
from penstock.planning.remedy import remedy
from tests.engine.harness import make_engine
from tests.engine.tiny import write_checkpoint
from tests.planning.test_model_shape import GLM5_NEXT, INDEX, LAGUNA, LARGE4_SHARED, MINIMAX_M3, MUSE_SPARK, STEP, of
from tests.planning.test_model_shape import LATENT as SPARSE

GIB = 1 << 30
TINY = known_config("smollm2-135m") | {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "max_position_embeddings": 512,
}  # fmt: skip
HYBRID = known_config("qwen3-next-80b-a3b") | {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "max_position_embeddings": 512, "num_experts": 0,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
    "full_attention_interval": 2,
}  # fmt: skip
LATENT = known_config("deepseek-v2-lite") | {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 128, "max_position_embeddings": 512, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20, "n_routed_experts": 8, "moe_intermediate_size": 24,
}  # fmt: skip
NEWER = ("deepseek-v2-lite", "qwen3-next-80b-a3b", "glm-4.5-air", "llama-4-scout")


def deployed(model: str = "llama-8b", on: str = "a100-80", **settings: Any) -> Deployment:
    return Deployment(shape=model_shape(model), device=device(on), **settings)


def planned(model: str = "llama-8b", on: str = "a100-80", **settings: Any) -> MemoryPlan:
    return memory_plan(deployed(model, on, **settings))


def test_llama_8b_on_an_a100_80_at_4k() -> None:
    """By hand: 79.1 GiB - 0.6 GiB of runtime - 16.06 GB of weights (8.03 billion in bf16) - 0.97 GB of activations, of
    which the cache takes 92%: 61.9 GB at 128 KiB a token are 472,000 tokens, 115 sequences of 4,096."""
    plan = planned()
    assert plan.kv_bytes_per_token == 128 * 1024
    assert plan.weights == 2 * 8_030_261_248
    activations = 8192 * (2 * 4096 + 3 * 14336) * 2 + 256 * 128256 * 4
    free = 79.1 * GIB - 0.6 * GIB - 16.06e9 - activations
    assert plan.kv_tokens == pytest.approx(free * 0.92 / 131072, rel=1e-3)
    assert plan.concurrency(4096) == int(free * 0.92 / 131072 / 4096) == 115
    assert plan.fits and plan.problem is None


def test_llama_70b_over_eight_h100() -> None:
    plan = planned("llama-3-70b", "h100", tensor_parallel=8)
    assert plan.kv_bytes_per_token == 40 * 1024, "one of eight KV heads on each"
    # A shard has an eighth of the layers and of the head, and the whole embedding.
    layers, ends = 70.55e9 - 2 * 128256 * 8192, 128256 * 8192
    assert plan.weights == pytest.approx(2 * (layers / 8 + ends / 8 + ends), rel=1e-3)
    assert plan.concurrency(4096) == 348 and plan.concurrency(131072) == 10
    assert plan.concurrency(131073) == 0


def test_the_concurrency_table_ends_with_the_longest_sequence() -> None:
    table = planned("llama-8b", "l4").concurrency_table()
    assert list(table)[:3] == [1024, 2048, 4096] and list(table.values())[-1] == 1
    assert list(table)[-1] == planned("llama-8b", "l4").longest < 131072


def test_latent_cache_is_whole_on_every_shard() -> None:
    one = planned("deepseek-v3", "b200", tensor_parallel=8)
    assert one.kv_bytes_per_token == 576 * 61 * 2
    assert planned("deepseek-v3", "b200", tensor_parallel=8, kv_dtype="fp8").kv_bytes_per_token == 576 * 61


def test_more_shards_than_kv_heads_hold_copies_of_them() -> None:
    four, eight = (deployed("qwen3-30b-a3b", "h100", tensor_parallel=size) for size in (4, 8))
    assert kv_block_bytes(four) == kv_block_bytes(eight)
    assert planned("llama-8b", "h100", tensor_parallel=8, kv_dtype="int8").kv_bytes_per_token == 32 * 2 * (128 + 2)


@pytest.mark.parametrize("name", ["llama-8b", "qwen3-30b-a3b", "gemma2-2b", "qwen2.5-7b", *NEWER])
@pytest.mark.parametrize("grid", [(1, 1), (2, 1), (4, 2)])
def test_a_device_holds_what_the_engine_would_give_its_rank(name: str, grid: tuple[int, int]) -> None:
    """The engine cuts the configuration; counted whole, its parts have the same bytes."""
    tensor, pipeline = grid
    deployment = deployed(name, "h100", tensor_parallel=tensor, pipeline_parallel=pipeline)
    for stage in range(pipeline):
        local = local_config(read_config(known_config(name)), Place(stage * tensor, tensor, pipeline))
        part = shape_of_model(local, name)
        layers = part.parameters - part.embedding_parameters - part.head_parameters
        # Biases of what is cut are counted whole here: a few kilobytes.
        biases = 2 * deployment.shape.layers * deployment.shape.heads * 3 * deployment.shape.head_dim
        ends = 0
        if stage == 0:
            rows = -(-part.vocab // tensor)
            ends = (part.vocab + rows) * part.hidden
        assert device_weights(deployment, stage) == pytest.approx(2 * (layers + ends), abs=2 * biases)


@pytest.mark.parametrize("name", ["llama-8b", "deepseek-v2-lite", "deepseek-v3", "qwen3-next-80b-a3b", "kimi-linear"])
@pytest.mark.parametrize("tensor", [1, 2, 8])
def test_adapters_have_the_bytes_of_the_engines_sites(name: str, tensor: int) -> None:
    local = local_config(read_config(known_config(name)), Place(0, tensor, 1))
    deployment = deployed(name, "h100", tensor_parallel=tensor, adapter_slots=3, adapter_rank=8)
    rows = -(-local.vocab_size // tensor)
    assert adapter_bytes(deployment) == 3 * 8 * layout_of(local, experts=False, head_rows=rows).unit * 2


@pytest.mark.parametrize("name", ["llama-8b", "deepseek-v2-lite", "deepseek-v3", "qwen3-next-80b-a3b", "kimi-linear"])
@pytest.mark.parametrize("tensor", [1, 2, 8])
def test_vectors_of_adapters_have_the_bytes_of_the_engines_tables(name: str, tensor: int) -> None:
    local = local_config(read_config(known_config(name)), Place(0, tensor, 1))
    deployment = deployed(name, "h100", tensor_parallel=tensor, adapter_slots=3, adapter_vectors=True)
    layout = layout_of(local, experts=False, head_rows=-(-local.vocab_size // tensor))
    gains = (2 * local.num_layers + 1) * local.hidden_size
    assert adapter_vector_bytes(deployment) == 3 * 4 * (2 * layout.columns + gains)


NEWEST = [
    of("deepseek_v32", **SPARSE, **INDEX, n_group=4, topk_group=2),
    of("axk2", **SPARSE, **INDEX, mlp_layer_types=["sparse", "dense", "sparse"], gated_norm_rank=6),
    of("hy_v4", **SPARSE, **INDEX, indexer_types=["full", "full", "shared"], hc_mult=3),
    {**of("mistral_large4_text", **SPARSE), **LARGE4_SHARED},
    {**of("glm5_next_text"), **GLM5_NEXT},
    of("hrm_text", num_hidden_layers=2, H_cycles=2, L_cycles=3, num_key_value_heads=4),
    of("laguna", **LAGUNA, num_attention_heads_per_layer=[4, 2, 6]),
    of("muse_glimmer_text"),
    of("muse_spark_text", **MUSE_SPARK),
    {**of("minimax_m3_vl_text"), **MINIMAX_M3},
    of("step3p5", **STEP),
    of("laguna", **LAGUNA, gating="per-element", num_attention_heads_per_layer=[4, 2, 6]),
]


@pytest.mark.parametrize("config", NEWEST, ids=lambda config: config["model_type"])
@pytest.mark.parametrize("tensor", [1, 2])
def test_adapters_of_newer_families_have_the_bytes_of_the_engines(config: dict[str, Any], tensor: int) -> None:
    deployment = replace(
        deployed("llama-8b", "h100", tensor_parallel=tensor, adapter_slots=3, adapter_rank=8, adapter_vectors=True),
        shape=shape_of_config(config, "tiny"),
    )
    local = local_config(read_config(config), Place(0, tensor, 1))
    layout = layout_of(local, experts=False, head_rows=-(-local.vocab_size // tensor))
    assert adapter_bytes(deployment) == 3 * 8 * layout.unit * 2
    norms = len({*norms_in_layer(local).values()}) * local.num_layers + 1
    gains = 0 if local.cycles is not None else norms * local.hidden_size
    assert adapter_vector_bytes(deployment) == 3 * 4 * (2 * layout.columns + gains)


def test_rows_of_adapters_have_the_bytes_of_the_engines_bank() -> None:
    deployment = deployed("llama-3-8b", "h100", adapter_slots=3, adapter_rows=7)
    shape = deployment.shape
    bank = RowBank(3, shape.vocab, shape.hidden, torch.bfloat16, torch.device("meta"), most=7)
    assert bank._rows is not None and bank._head_rows is not None and bank._tables is not None and bank._ids is not None
    tensors = (bank._rows, bank._head_rows, bank._tables, *bank._ids)
    assert adapter_row_bytes(deployment) == sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize(
    ("kv_dtype", "torch_dtype"), [("bf16", torch.bfloat16), ("int8", torch.int8), ("fp32", torch.float32)]
)
def test_a_block_has_the_bytes_that_the_engine_allocates(kv_dtype: Any, torch_dtype: torch.dtype) -> None:
    shape = model_shape("llama-8b")
    kind = PagedKV(shape.kv_heads, shape.head_dim, 16, torch_dtype)
    assert kv_block_bytes(deployed(kv_dtype=kv_dtype)) == shape.layers * kind.block_bytes


def test_shares_are_the_engines() -> None:
    for kind, engine in (("gpu", CudaMemory), ("cpu", HostMemory)):
        assert memory.SHARE_OF_FREE[kind] == engine.share_of_free
        assert memory.SHARE_OF_REST[kind] == engine.share_of_rest


@pytest.mark.parametrize(
    "family",
    [
        "llama-gqa",
        "deepseek-v32",
        "hrm-text",
        "axk2",
        "qwen4-exp",
        "minimax-m3",
        "hy-v4",
        "deepseek-v4",
        "laguna",
        "mistral-large4",
        "muse-spark",
        "glm5-next",
    ],
)
def test_rows_of_the_largest_captured_step_are_those_of_the_engine(family: str, tmp_path: Path) -> None:
    folder = write_checkpoint(family, tmp_path)
    decoder = make_engine(folder).runner.decoder
    shape = shape_of_config(json.loads((folder / "config.json").read_text()), "tiny")
    for rows, budget in ((1, 8192), (1, 16), (3, 40), (5, 100), (37, 700), (256, 8192), (300, 8192)):
        plan = Deployment(shape=shape, device=device("h100"), max_running=rows, token_budget=budget)
        context = plan.context_len
        found = graph_memory.graph_bytes(decoder, StepLimits(rows, budget, context, 16))
        size = decoder.embedding.element_size() * shape.vocab
        expected = graphs.graph_bytes(plan)
        assert graphs.REST == graph_memory._REST
        assert (found - graphs.REST) // size == (expected - graphs.REST) // round(shape.vocab * 2)


def test_sizes_of_captured_steps_are_the_engines() -> None:
    engine = prompt_graphs
    least = min(engine.TOKENS), min(engine.TOKENS_BESIDE_DECODES)
    assert least == (graphs._LEAST_TOKENS, graphs._LEAST_TOKENS_BESIDE)
    assert max(*engine.DECODES, *engine.DECODES_LATER) == graphs._MOST_BESIDE
    assert (graphs._PROMPTS, graphs.REST) == (engine.PROMPTS, graph_memory._REST)


@pytest.mark.parametrize("settings", [{"kv_memory": 300_000}, {}, {"memory_share": 0.95}, {"max_running": 1}])
def test_predicted_blocks_are_those_of_the_engine(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine whose free memory is what the plan thinks is left."""
    small = replace(device("cpu-2"), memory_bytes=memory.RUNTIME_BYTES["cpu"] + (64 << 20))
    plan = memory_plan(Deployment(shape=shape_of_config(TINY, "tiny"), device=small, **settings))
    total, taken = small.memory_bytes, plan.runtime + plan.weights
    monkeypatch.setattr(HostMemory, "available", lambda self: total - taken)
    monkeypatch.setattr(HostMemory, "total", lambda self: total)
    monkeypatch.setattr(HostMemory, "used", lambda self: taken)
    fixed: dict[str, Any] = {"device": "cpu", "dtype": "float32", "weights": "dense", "kv_dtype": "full", "threads": 1}
    engine = Engine.load(
        EngineConfig(model="tiny", **fixed, **settings), checkpoint=RandomCheckpoint(TINY, dtype=torch.float32)
    )
    assert engine.runner.kv.num_blocks - 1 == plan.blocks <= 2000
    assert engine.runner.kv.shape.block_bytes == kv_block_bytes(plan.deployment)


@pytest.mark.parametrize("settings", [{"kv_memory": 4 << 20}, {}, {"max_running": 1}])
@pytest.mark.parametrize("kind", ["hybrid", "latent"])
def test_states_and_latents_take_what_the_engine_gives_them(
    kind: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = HYBRID if kind == "hybrid" else LATENT
    small = replace(device("cpu-2"), memory_bytes=memory.RUNTIME_BYTES["cpu"] + (64 << 20))
    plan = memory_plan(Deployment(shape=shape_of_config(config, kind), device=small, **settings))
    monkeypatch.setattr(HostMemory, "available", lambda self: small.memory_bytes - plan.runtime - plan.weights)
    fixed: dict[str, Any] = {"device": "cpu", "dtype": "float32", "weights": "dense", "kv_dtype": "full", "threads": 1}
    engine = Engine.load(
        EngineConfig(model="tiny", **fixed, **settings), checkpoint=RandomCheckpoint(config, dtype=torch.float32)
    )
    kv = engine.runner.kv
    assert (kv.num_blocks - 1, kv.shape.block_bytes) == (plan.blocks, kv_block_bytes(plan.deployment))
    assert kv.shape.state_bytes == state_bytes(plan.deployment)
    assert (plan.states > 0) == (kind == "hybrid") and plan.states == sum(tensor.nbytes for tensor in kv.states)


def test_states_of_recurrent_layers_are_split_and_may_not_fit() -> None:
    whole, halves = (deployed("qwen3-next-80b-a3b", "b200", tensor_parallel=size) for size in (1, 2))
    shape = whole.shape
    assert state_bytes(whole) == shape.state_bytes == 2 * state_bytes(halves)
    assert kv_block_bytes(whole) == (shape.layers - shape.recurrent_layers) * 2 * 2 * 256 * 16 * 2
    plan = planned("qwen3-next-80b-a3b", "b200", tensor_parallel=2, kv_memory=2 * GIB)
    assert plan.blocks == 0 and "states of 256 sequences take" in str(plan.problem)
    tiers = planned("qwen3-next-80b-a3b", "b200", tensor_parallel=2, host_memory=64 * GIB)
    assert tiers.host_tokens == 32 * GIB // kv_block_bytes(tiers.deployment) * 16, "half of it is for states"


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_bytes_per_weight_are_those_of_the_cpu_kernels(form: Any) -> None:
    checkpoint = RandomCheckpoint(TINY | {"intermediate_size": 128}, dtype=torch.float32)
    config = EngineConfig(model="tiny", device="cpu", dtype="float32", weights=form, threads=1, num_blocks=4)
    decoder = Engine.load(config, checkpoint=checkpoint).runner.decoder
    shape, held = shape_of_config(checkpoint.config, "tiny"), CPU_FORMATS[form]
    assert decoder.head.weight_bytes == shape.head_parameters * held.head_bytes
    assert decoder.weight_bytes - decoder.head.weight_bytes == shape.matrix_parameters * held.matrix_bytes
    assert WEIGHT_FORMATS["int8"].matrix_bytes == 1 + 2 / SIZES[0], "the group that GPUs prefer"


def test_a_sequence_of_windowed_layers_holds_no_more_than_the_engine_says() -> None:
    plan = planned("mistral-7b-v0.1", "l4")
    window = SlidingWindow(4096, 8192)
    for context in (1000, 8192, 32768):
        assert plan.without_sharing(context) == plan.blocks // held_at_once(context, 16, window)
    assert plan.concurrency(32768) == plan.concurrency(16384) > planned("mistral-7b", "l4").concurrency(32768)


def test_windowed_sequences_release_a_shared_prefix() -> None:
    alone, shared = planned("mistral-7b-v0.1", "l4"), planned("mistral-7b-v0.1", "l4", shared_prefix=2000)
    assert shared.concurrency(8192) == alone.concurrency(8192)


def test_activations_of_the_widest_part_of_a_layer() -> None:
    dense = 8448 * (2 * 4096 + 3 * 14336) * 2 + 256 * 128256 * 4
    assert planned().activations == dense
    split = 8448 * (2 * 4096 + 3 * 14336 // 8) * 2 + 256 * 128256 * 4
    assert memory.activation_bytes(deployed("llama-8b", "h100", tensor_parallel=8)) == split
    routed = 8448 * (2 * 2048 + 8 * (3 * 768 + 2 * 2048)) * 2 + 256 * 151936 * 4
    assert memory.activation_bytes(deployed("qwen3-30b-a3b", "h100")) == routed
    narrow = replace(model_shape("llama-8b"), ffn=64)
    attention = 8448 * (2 * 4096 + (2 * 32 + 2 * 8) * 128) * 2 + 256 * 128256 * 4
    assert memory.activation_bytes(Deployment(shape=narrow, device=device("h100"))) == attention
    shared = replace(model_shape("llama-4-scout"), ffn=0, heads=8, kv_heads=1)
    assert shared.moe is not None
    moe = replace(shared.moe, shared_ffn=60_000)
    plan = memory_plan(Deployment(shape=replace(shared, moe=moe), device=device("b200")))
    assert plan.activations == 8448 * (2 * 5120 + 3 * 60_000) * 2 + 256 * 202048 * 4


def test_long_prompts_take_memory_on_hopper() -> None:
    """As much as the engine leaves free (`kernels/gathered_prefix.py`, which needs Triton to be imported)."""
    source = Path(memory.__file__).parents[1] / "engine/backends/cuda/kernels/gathered_prefix.py"
    (most,) = re.findall(r"^MOST_BYTES = (\d+) << 20$", source.read_text(), re.MULTILINE)
    assert int(most) << 20 == memory.GATHERED_BYTES
    for settings, taken in (
        ({"kv_dtype": "fp8"}, 2), ({"kv_dtype": "int8"}, 2), ({}, 1), ({"kv_dtype": "fp32"}, 0),
        ({"kv_dtype": "fp8", "on": "b200"}, 0), ({"on": "b200"}, 0), ({"kv_dtype": "int8", "on": "a100-80"}, 0),
        ({"kv_dtype": "fp8", "model": "gpt-oss-20b"}, 0), ({"kv_dtype": "int8", "model": "deepseek-v2-lite"}, 0),
        ({"kv_dtype": "fp8", "model": "llama-1b"}, 0),
    ):  # fmt: skip
        deployment = deployed(**{"on": "h200", **settings})
        more = memory_plan(deployment).activations - memory.activation_bytes(deployment)
        assert more == taken * memory.GATHERED_BYTES, settings
    plan = planned(on="h200", kv_dtype="fp8")
    assert plan.weights + plan.runtime + plan.activations + plan.kv_room + plan.reserve == plan.capacity
    said = {assumption.what: assumption.value for assumption in plan.assumptions}
    assert "0.5 GiB" in said["keys of long prompts, gathered"]


def test_mixed_windows_are_held_whole_and_the_plan_says_so() -> None:
    plan = planned("gemma3-27b", "h100")
    assert plan.kv_bytes_per_token == 62 * 2 * 16 * 128 * 2
    said = {assumption.what: assumption.value for assumption in plan.assumptions}
    assert "none is released" in said["sliding windows"] and "17%" in said["sliding windows"]


def test_a_shared_prefix_is_held_once() -> None:
    plan = planned(shared_prefix=3000)
    shared, each = 3000 // 16, 4096 // 16 - 3000 // 16
    assert plan.concurrency(4096) == (plan.blocks - shared) // each
    assert plan.without_sharing(4096) == 115 < plan.concurrency(4096)
    assert planned(shared_prefix=16).concurrency(1) == planned().blocks, "nothing of a prefix is cached for one token"


def test_what_the_host_tier_adds() -> None:
    plan = planned(host_memory=64 * GIB)
    assert plan.host_tokens == 64 * GIB // (128 * 1024)
    assert plan.host_sequences(4096) == 128
    assert planned().host_tokens == 0


def test_a_draft_model_takes_weights_and_cache() -> None:
    draft = Speculation("draft", acceptance=0.7, draft=model_shape("llama-1b"))
    alone, both = planned(), planned(speculation=draft)
    assert both.weights - alone.weights == pytest.approx(2 * (1.236e9 + 128256 * 2048), rel=1e-3)
    assert both.blocks < alone.blocks * 128 / (128 + 32)
    assert both.kv_bytes_per_token == alone.kv_bytes_per_token


def test_the_parts_add_up_to_the_device() -> None:
    for plan in (planned(), planned("qwen3-30b-a3b", "h200"), planned("smollm2-135m", "cpu-16")):
        parts = plan.weights + plan.runtime + plan.activations + plan.kv_room + plan.reserve
        assert parts == plan.capacity


@pytest.mark.parametrize(
    ("model", "on", "settings", "problem", "does"),
    [
        (
            "llama-3-70b", "a100-80", {}, "bf16 weights take 141.1 GB of each a100-80",
            "2 x a100-80 (tensor_parallel 2) or int8 weights on one a100-80 or one h200 would do",
        ),
        (
            "llama-405b", "h100", {"tensor_parallel": 8}, "105.1 GB of each h100",
            "fp8 weights on 8 x h100 or 8 x h200 would do",
        ),
        (
            "llama-8b", "l4", {"max_model_len": 131072}, "one sequence of 131,072 tokens does not fit",
            "max_model_len 35,104 or 2 x l4 (tensor_parallel 2) or",
        ),
        ("llama-405b", "rtx-4090", {}, "which has 25.3 GB", "8 x h200 (tensor_parallel 8) would do"),
        ("llama-70b", "rtx-4090", {}, "which has 25.3 GB", "8 x rtx-4090 (tensor_parallel 8) or one h200 would do"),
        ("llama-8b", "cpu-2", {}, "fp32 weights take 32.1 GB", "int4 weights on one cpu-2"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_answered_with_what_would(
    model: str, on: str, settings: dict[str, Any], problem: str, does: str
) -> None:
    plan = planned(model, on, **settings)
    assert not plan.fits and plan.problem is not None
    assert plan.blocks > 0 or (plan.reserve, plan.concurrency_table(), plan.longest) == (0, {}, 0)
    assert problem in plan.problem and does in remedy(plan)


def test_nothing_would_do() -> None:
    huge = replace(model_shape("llama-405b"), layers=2000, windows=(None,) * 2000, name="huge")
    plan = memory_plan(Deployment(shape=huge, device=device("h100")))
    assert remedy(plan) == "no machine of the catalogue holds huge, not even with int4 weights"
