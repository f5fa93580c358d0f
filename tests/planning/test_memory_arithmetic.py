"""The memory of small deployments by hand: every part of a device, and how many blocks and sequences are left."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.planning import memory
from penstock.planning.catalogue import device
from penstock.planning.deployment import Deployment, Speculation
from penstock.planning.graphs import REST, graph_bytes, most_sampled
from penstock.planning.memory import (
    COLLECTIVE_BYTES,
    CONTEXTS,
    GIB,
    RUNTIME_BYTES,
    MemoryPlan,
    activation_bytes,
    adapter_block_bytes,
    adapter_bytes,
    adapter_row_bytes,
    adapter_token_bytes,
    adapter_vector_bytes,
    device_weights,
    kv_block_bytes,
    memory_plan,
)
from penstock.planning.shape import ModelShape, Moe
from penstock.planning.token_mixers import Mla

SMALL = ModelShape(
    name="small", family="llama", layers=5, hidden=24, ffn=60, heads=6, kv_heads=3, head_dim=8, vocab=101,
    max_positions=640, windows=(None,) * 5, qk_norm=True,
)  # fmt: skip
LAYER_SPLIT, LAYER_SMALL = 2 * 24 * 48 + 2 * 24 * 24 + 3 * 24 * 60, 2 * 24 + 16
MOE = Moe(experts=5, top_k=2, ffn=14, layers=(False, True, True, True, True), bias=False, shared_ffn=6)
MLA = Mla(kv_rank=20, rope_dim=4, nope_dim=10, value_dim=7)
ACTIVATIONS = 100 * (2 * 24 + 3 * 60) * 2 + 256 * 101 * 4
"""For steps of 100 tokens: the residual stream twice, gate, up and their product; logits of 256 rows."""
BLOCK = 5 * 2 * 3 * 8 * 16 * 2
WEIGHTS = 2 * (5 * (LAYER_SPLIT + LAYER_SMALL) + 2 * 101 * 24 + 24)


def deployed(shape: ModelShape = SMALL, memory: int | None = None, on: str = "h100", **settings: Any) -> Deployment:
    machine = device(on)
    if memory is not None:
        machine = replace(machine, memory_bytes=memory)
    return Deployment(shape=shape, device=machine, **({"token_budget": 100} | settings))


def with_room(room: int, shape: ModelShape = SMALL, **settings: Any) -> MemoryPlan:
    """A device that has `room` bytes beside runtime, weights and activations."""
    return memory_plan(deployed(shape, RUNTIME_BYTES["gpu"] + WEIGHTS + ACTIVATIONS + room, **settings))


@pytest.fixture(autouse=True)
def without_graphs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices of these tests are smaller than what captured steps take."""
    if "graphs" not in request.node.name:
        monkeypatch.setattr(memory, "graph_bytes", lambda deployment: 0)


def test_graphs_share_the_logits_of_the_largest_of_them() -> None:
    """Eight prompts beside as many decodes as there may be, at most 256."""
    few = deployed(max_running=4)
    assert most_sampled(few) == 4 + 8
    assert graph_bytes(few) == REST + 12 * 101 * 2
    assert graph_bytes(deployed(max_running=4, adapter_slots=1)) == graph_bytes(few)
    assert most_sampled(deployed(max_running=300)) == 300, "decodes alone"
    assert most_sampled(deployed(max_running=4, token_budget=63)) == 8, "no decodes beside so few tokens of prompts"
    assert most_sampled(deployed(max_running=4, token_budget=31)) == 4, "no captured prompts"
    drafts = Speculation("ngram", 0.7, depth=3)
    assert most_sampled(deployed(max_running=4, speculation=drafts)) == 16 + 8
    assert most_sampled(deployed(max_running=40, speculation=drafts)) == 64 + 8, "drafts are verified in up to 64 rows"
    assert graph_bytes(deployed(max_running=4, pipeline_parallel=2)) == 0, "stages take turns"
    assert graph_bytes(deployed(replace(SMALL, apart_streams=2), max_running=4)) == REST, "launched one by one"
    assert graph_bytes(deployed(on="cpu-2", max_running=4)) == 0


@pytest.mark.parametrize("share", [None, 0.9], ids=["graphs of what is free", "graphs of a share"])
def test_the_cache_leaves_what_graphs_take_up_to_a_quarter(share: float | None) -> None:
    taken = RUNTIME_BYTES["gpu"] + WEIGHTS + ACTIVATIONS
    for whole in (2 * GIB, 6 * GIB, 40 * GIB):
        total = taken + whole if share is None else int((taken + whole) / share)
        plan = memory_plan(deployed(memory=total, memory_share=share, max_running=4))
        room = min(int(0.92 * whole), whole - min(REST + 12 * 101 * 2, whole // 4))
        assert plan.kv_room == pytest.approx(room, abs=4)
    assert plan.kv_room == pytest.approx(0.92 * 40 * GIB, abs=4), "8% are enough"


def test_constants() -> None:
    assert GIB == 2**30 and CONTEXTS == (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
    assert (RUNTIME_BYTES["gpu"], RUNTIME_BYTES["cpu"]) == (int(0.6 * 2**30), 2**30)
    assert int(0.4 * 2**30) == COLLECTIVE_BYTES


def test_weights_of_one_device() -> None:
    assert device_weights(deployed()) == WEIGHTS
    split, small = LAYER_SPLIT, LAYER_SMALL
    int8 = 1 + 2 / 128
    assert device_weights(deployed(weight_dtype="int8")) == round(
        5 * (split * int8 + small * 2) + 101 * 24 * (2 + int8) + 24 * 2
    )


def test_weights_of_shards_and_stages() -> None:
    two = deployed(replace(SMALL, kv_heads=2), tensor_parallel=2, pipeline_parallel=2)
    split = 2 * 24 * 48 + 2 * 24 * 16 + 3 * 24 * 60
    layer = split / 2 + LAYER_SMALL
    # Stages of three and two layers; the first also has the embedding and 51 of 101 rows of the head.
    sizes = sorted(round(2 * (layers * layer + 24)) for layers in (2, 3))
    ends = 2 * (101 + 51) * 24
    first, second = device_weights(two, 0), device_weights(two, 1)
    assert {first - ends, second} == set(sizes)
    assert {kv_block_bytes(two, 0), kv_block_bytes(two, 1)} == {2 * 512, 3 * 512}
    # Six shards and two heads of keys: three have the same one.
    six = deployed(replace(SMALL, kv_heads=2, ffn=42), tensor_parallel=6)
    split = 2 * 24 * 48 + 2 * 24 * 16 * 3 + 3 * 24 * 42
    assert device_weights(six) == round(2 * (5 * (split / 6 + LAYER_SMALL) + (101 + 17) * 24 + 24))
    assert kv_block_bytes(six) == 5 * 2 * 8 * 16 * 2


def test_weights_of_experts_and_latents() -> None:
    routed = replace(SMALL, moe=MOE, served=False)
    attention = 2 * 24 * 48 + 2 * 24 * 24
    layer = attention + 3 * 24 * 6 + 5 * 3 * 24 * 14 + 24 * 5 + LAYER_SMALL
    dense = LAYER_SPLIT + LAYER_SMALL
    ends = 2 * 101 * 24 + 24
    assert device_weights(deployed(routed)) == 2 * (dense + 4 * layer + ends)
    int4, head = 0.5 + 4 / 128, 1 + 2 / 128
    small = deployed(routed, weight_dtype="int4")
    few = attention + 3 * 24 * 6 + 5 * 3 * 24 * 14
    expected = (LAYER_SPLIT + 4 * few) * int4 + (5 * LAYER_SMALL + 4 * 24 * 5) * 2 + 101 * 24 * (2 + head) + 48
    assert device_weights(small) == round(expected)
    halves = deployed(replace(routed, kv_heads=2, served=False), tensor_parallel=2)
    split = 2 * 24 * 48 + 2 * 24 * 16
    shard = (split + 3 * 24 * 6 + 5 * 3 * 24 * 14) / 2 + 24 * 5 + LAYER_SMALL
    assert device_weights(halves) == round(
        2 * ((split + 3 * 24 * 60) / 2 + LAYER_SMALL + 4 * shard + (101 + 51) * 24 + 24)
    )
    latent = deployed(replace(SMALL, mla=MLA, qk_norm=False, served=False), tensor_parallel=2)
    split = 24 * 6 * 14 + 20 * 6 * 17 + 6 * 7 * 24 + 3 * 24 * 60
    assert device_weights(latent) == round(2 * (5 * (split / 2 + 24 * 24 + 48 + 20) + (101 + 51) * 24 + 24))
    assert kv_block_bytes(latent) == 5 * 24 * 16 * 2, "the latent is whole on both"


def test_activations_are_those_of_the_widest_part() -> None:
    logits = 256 * 101 * 4
    assert activation_bytes(deployed()) == ACTIVATIONS
    assert activation_bytes(deployed(tensor_parallel=2, shape=replace(SMALL, kv_heads=2))) == (
        100 * (48 + 3 * 30) * 2 + logits
    )
    assert activation_bytes(deployed(replace(SMALL, kv_heads=2, ffn=2), tensor_parallel=2)) == (
        100 * (48 + (2 * 3 + 2) * 8) * 2 + logits
    ), "three heads of queries and one of keys"
    narrow = replace(SMALL, ffn=1)
    assert activation_bytes(deployed(narrow)) == 100 * (48 + (12 + 6) * 8) * 2 + logits
    latent = replace(narrow, mla=MLA)
    assert activation_bytes(deployed(latent)) == 100 * (48 + 6 * (2 * 14 + 2 * 7)) * 2 + logits
    routed = replace(SMALL, ffn=2, moe=replace(MOE, ffn=14, shared_ffn=80), kv_heads=2)
    assert activation_bytes(deployed(routed)) == 100 * (48 + 3 * 80) * 2 + logits
    assert activation_bytes(deployed(routed, tensor_parallel=2)) == 100 * (48 + 2 * (21 + 48)) * 2 + logits
    few = replace(routed, moe=replace(MOE, ffn=14, shared_ffn=6))
    assert activation_bytes(deployed(few)) == 100 * (48 + 2 * (42 + 48)) * 2 + logits
    shared = replace(routed, moe=replace(MOE, ffn=14, shared_ffn=100))
    assert activation_bytes(deployed(shared, tensor_parallel=2)) == 100 * (48 + 150) * 2 + logits


@pytest.mark.parametrize(
    ("room", "blocks", "kv_room"),
    [
        (0, 0, 0), (-1, 0, -1), (-1000, 0, -1000), (100, 0, 92), (BLOCK * 10, 9, int(BLOCK * 9.2)),
        (BLOCK * 100, 92, BLOCK * 92), (BLOCK * 100_000, 256 * 40, BLOCK * 92_000),
    ],
)  # fmt: skip
def test_the_cache_takes_92_percent_of_what_is_free(room: int, blocks: int, kv_room: int) -> None:
    plan = with_room(room)
    assert (plan.blocks, plan.kv_room) == (blocks, kv_room) and plan.kv_tokens == 16 * blocks
    assert (plan.weights, plan.runtime, plan.activations) == (WEIGHTS, RUNTIME_BYTES["gpu"], ACTIVATIONS)
    assert plan.reserve == max(room - kv_room, 0) and plan.kv_bytes_per_token == BLOCK / 16


def test_a_cache_of_a_given_size_or_share() -> None:
    assert with_room(BLOCK * 100, kv_memory=BLOCK * 7).blocks == 7
    assert with_room(BLOCK * 100, kv_memory=BLOCK * 700).blocks == 100
    total = RUNTIME_BYTES["gpu"] + WEIGHTS + ACTIVATIONS + BLOCK * 10_000
    share = 1 - BLOCK * 5000 / total
    assert with_room(BLOCK * 10_000, memory_share=share).kv_room == pytest.approx(BLOCK * 4600, abs=2)
    assert with_room(BLOCK * 10_000, memory_share=1.0).kv_room == BLOCK * 9200
    below = with_room(BLOCK * 10_000, memory_share=0.01)
    assert below.kv_room == int((int(total * 0.01) - total + BLOCK * 10_000) * 0.92) < 0 and below.blocks == 0
    assert with_room(-1000, memory_share=1.0).kv_room == -1000, "no more than there is"


def test_no_more_blocks_than_running_sequences_use() -> None:
    assert with_room(BLOCK * 1000, max_running=3, max_model_len=100).blocks == 3 * 7


def test_a_cpu_has_no_activations_and_a_gpu_of_several_has_buffers() -> None:
    weights = 2 * WEIGHTS  # fp32
    block = 2 * BLOCK
    cpu = memory_plan(deployed(memory=2**30 + weights + block * 1000, on="cpu-2"))
    assert (cpu.runtime, cpu.weights, cpu.activations) == (2**30, weights, 0)
    assert cpu.kv_room == int(block * 1000 * 0.15) and cpu.blocks == 150
    shared = replace(cpu.deployment, memory_share=1.0)
    assert memory_plan(shared).kv_room == block * 1000, "all of a share"
    pair = memory_plan(deployed(replace(SMALL, kv_heads=2), tensor_parallel=2))
    assert pair.runtime == int(0.6 * 2**30) + int(0.4 * 2**30)
    assert memory_plan(deployed()).runtime == int(0.6 * 2**30)


def test_the_fullest_stage_decides() -> None:
    plan = memory_plan(deployed(pipeline_parallel=2, kv_memory=BLOCK * 10))
    layers = max(kv_block_bytes(plan.deployment, stage) for stage in (0, 1)) // (BLOCK // 5)
    assert layers == 3 and plan.blocks == BLOCK * 10 // (3 * BLOCK // 5)
    ends = replace(SMALL, layers=4, windows=(None,) * 4, vocab=100_000)
    first = memory_plan(deployed(ends, pipeline_parallel=2))
    assert first.weights == device_weights(first.deployment, 0) > device_weights(first.deployment, 1)


def test_how_many_sequences_fit() -> None:
    plan = with_room(BLOCK * 100)  # 92 blocks
    assert [plan.concurrency(context) for context in (1, 16, 17, 640, 641)] == [92, 92, 46, 2, 0]
    assert [plan.without_sharing(context) for context in (16, 17, 640, 641)] == [92, 46, 2, 0]
    assert plan.longest == 640 and plan.fits and plan.problem is None
    assert plan.concurrency_table() == {640: 2}
    longer = with_room(BLOCK * 400, replace(SMALL, max_positions=4096), max_model_len=2048)
    assert longer.concurrency_table() == {1024: 368 // 64, 2048: 368 // 128}


@pytest.mark.parametrize(
    ("blocks", "asked", "longest", "fits"),
    [(40, 640, 640, True), (39, 640, 624, False), (39, 624, 624, True), (39, None, 624, True), (1, 16, 16, True),
     (1, 17, 16, False), (1, None, 16, True)],
)  # fmt: skip
def test_the_longest_sequence(blocks: int, asked: int | None, longest: int, fits: bool) -> None:
    plan = with_room(BLOCK * 100, kv_memory=BLOCK * blocks, max_model_len=asked)
    assert (plan.blocks, plan.longest, plan.fits) == (blocks, longest, fits)
    assert (plan.problem is None) == fits
    if plan.problem is not None:
        assert f"holds {16 * blocks:,} tokens of small" in plan.problem


def test_what_does_not_fit_says_what_it_takes() -> None:
    plan = with_room(-1)
    needed = (WEIGHTS + RUNTIME_BYTES["gpu"] + ACTIVATIONS) / 1e9
    assert not plan.fits and plan.problem is not None
    assert f"with runtime and activations {needed:,.1f} GB" in plan.problem
    assert plan.longest == 0 and plan.concurrency_table() == {} and plan.reserve == 0
    wide = memory_plan(deployed(replace(SMALL, ffn=4_000_000), memory=2**30, token_budget=200))
    assert wide.problem is not None
    parts = (wide.weights + wide.runtime + wide.activations) / 1e9
    assert f"take {wide.weights / 1e9:,.1f} GB" in wide.problem and f"activations {parts:,.1f} GB" in wide.problem


@pytest.mark.parametrize(
    ("prefix", "context", "shared"), [(0, 64, 0), (15, 64, 0), (16, 64, 1), (47, 64, 2), (200, 64, 3), (200, 65, 4)]
)
def test_full_blocks_of_a_prefix_are_shared(prefix: int, context: int, shared: int) -> None:
    """Of 92 blocks; a sequence of 64 tokens needs four, one of 65 five."""
    plan = with_room(BLOCK * 100, shared_prefix=prefix)
    each = -(-context // 16) - shared
    assert plan.concurrency(context) == (92 - shared) // each
    assert plan.without_sharing(context) == 92 // (each + shared)


def test_windows_release_blocks() -> None:
    """A window of 40 and steps of 100 tokens: nine blocks, and two for the ends."""
    windowed = replace(SMALL, windows=(40, 30, 40, 40, 40))
    plan = with_room(BLOCK * 100, windowed, shared_prefix=64)
    assert [plan.concurrency(context) for context in (160, 176, 192, 640)] == [9, 8, 8, 8]
    assert plan.longest == 640
    assert with_room(BLOCK * 100, windowed, kv_memory=BLOCK * 11).longest == 640
    assert with_room(BLOCK * 100, windowed, kv_memory=BLOCK * 10).longest == 160


def test_the_host_tier() -> None:
    plan = with_room(BLOCK * 100, host_memory=BLOCK * 21 - 1)
    assert plan.host_tokens == 20 * 16
    assert [plan.host_sequences(context) for context in (16, 17, 32, 33, 320, 321)] == [20, 10, 10, 6, 1, 0]


def test_a_draft_model() -> None:
    draft = replace(SMALL, name="draft", layers=2, windows=(None, None), kv_heads=1, max_positions=64)
    speculation = Speculation("draft", 0.5, draft=draft)
    plan = with_room(BLOCK * 100, speculation=speculation, kv_memory=BLOCK * 10, max_model_len=640, shared_prefix=100)
    weights = 2 * (2 * (2 * 24 * 48 + 2 * 24 * 8 + 3 * 24 * 60 + LAYER_SMALL) + 2 * 101 * 24 + 24)
    assert plan.weights == WEIGHTS + weights
    assert plan.blocks == BLOCK * 10 // (BLOCK + 2 * 2 * 8 * 16 * 2) and plan.kv_bytes_per_token == BLOCK / 16


def test_a_draft_model_on_two_stages() -> None:
    """The first stage has it; which then decides."""
    draft = replace(SMALL, name="draft", layers=1, windows=(None,), heads=2, kv_heads=1)
    plan = with_room(BLOCK * 100, speculation=Speculation("draft", 0.5, draft=draft), pipeline_parallel=2)
    assert plan.weights == device_weights(deployed(pipeline_parallel=2)) + device_weights(deployed(draft))
    assert plan.kv_bytes_per_token == 2 * 2 * 3 * 8 * 2


def test_rows_that_adapters_replace() -> None:
    row, table = 2 * SMALL.hidden + 8, 4 * SMALL.vocab
    assert adapter_row_bytes(deployed(adapter_slots=3, adapter_rows=10)) == 3 * (2 * 10 * row + table)
    assert adapter_row_bytes(deployed(adapter_slots=3)) == 3 * (2 * 64 * row + table)
    assert adapter_row_bytes(deployed(adapter_slots=3, on="cpu-16")) == 0
    stages = deployed(adapter_slots=1, adapter_rows=1, tensor_parallel=3, pipeline_parallel=2)
    assert [adapter_row_bytes(stages, stage) for stage in (0, 1)] == [2 * row + table, 0]


def test_vectors_of_adapters() -> None:
    """A scale and a shift for every output, and gains of two norms of a layer and of the last one, in float32."""
    layer, ends, norms = 48 + 2 * 24 + 24 + 2 * 60 + 24, 24 + 101, 11 * 24
    assert adapter_vector_bytes(deployed(adapter_slots=3)) == 0, "plain LoRA has none"
    assert adapter_vector_bytes(deployed(adapter_slots=3, adapter_vectors=True)) == 3 * 4 * (
        2 * (5 * layer + ends) + norms
    )
    assert adapter_vector_bytes(deployed(adapter_slots=3, adapter_vectors=True, on="cpu-16")) == 0
    split, split_ends = 16 + 2 * 8 + 24 + 2 * 20 + 24, 24 + 34
    stages = deployed(adapter_slots=1, tensor_parallel=3, pipeline_parallel=2, adapter_vectors=True)
    sizes = [(2 * split + split_ends, 5 * 24), (3 * split, 7 * 24)]
    assert [adapter_vector_bytes(stages, stage) for stage in (0, 1)] == [4 * (2 * a + b) for a, b in sizes]
    routed = adapter_vector_bytes(deployed(replace(SMALL, moe=MOE), adapter_slots=1, adapter_vectors=True))
    experts = 48 + 2 * 24 + 24 + 5 + 2 * 6 + 24
    assert routed == 4 * (2 * (layer + 4 * experts + ends) + norms)


def test_blocks_of_adapters_that_turn_inputs() -> None:
    """A row of a block in float32 for every input: of q, k, v, gate and up the hidden size, of o and down their own."""
    layer = 3 * 24 + 48 + 2 * 24 + 60
    assert adapter_block_bytes(deployed(adapter_slots=3)) == 0
    assert adapter_block_bytes(deployed(adapter_slots=3, adapter_blocks=4)) == 3 * 4 * 4 * 5 * layer
    stages = deployed(adapter_slots=1, adapter_blocks=2, tensor_parallel=3, pipeline_parallel=2)
    split = 3 * 24 + 16 + 2 * 24 + 20
    assert [adapter_block_bytes(stages, stage) for stage in (0, 1)] == [4 * 2 * 2 * split, 4 * 2 * 3 * split]
    routed = adapter_block_bytes(deployed(replace(SMALL, moe=MOE), adapter_slots=1, adapter_blocks=1))
    assert routed == 4 * (5 * (3 * 24 + 48) + 2 * 24 + 60)


def test_virtual_tokens_of_adapters() -> None:
    """Blocks in the cache that the requests of an adapter share; rows of the embedding, or keys and values in two
    bytes beside the slot."""
    assert adapter_token_bytes(deployed(adapter_slots=3)) == 0
    block = kv_block_bytes(deployed())
    for tokens, blocks in ((1, 1), (16, 1), (17, 2)):
        assert adapter_token_bytes(deployed(adapter_slots=3, adapter_tokens=tokens)) == 3 * blocks * block
    one = deployed(adapter_slots=1, adapter_tokens=100)
    row, table = 2 * SMALL.hidden + 8, 4 * SMALL.vocab
    assert adapter_row_bytes(one) == 2 * 100 * row + table, "more than the 64 rows that there are anyway"
    prefixes = deployed(adapter_slots=1, adapter_tokens=100, adapter_prefixes=True)
    assert adapter_row_bytes(prefixes) == 2 * 64 * row + table
    assert adapter_token_bytes(prefixes) == 7 * block + 100 * 5 * 2 * 24 * 2
    stages = deployed(adapter_slots=1, adapter_tokens=10, adapter_prefixes=True, tensor_parallel=3, pipeline_parallel=2)
    assert [adapter_token_bytes(stages, stage) for stage in (0, 1)] == [
        kv_block_bytes(stages, stage) + 10 * layers * 2 * 8 * 2 for stage, layers in ((0, 2), (1, 3))
    ]
    on_cpu = deployed(adapter_slots=1, adapter_tokens=100, adapter_prefixes=True, on="cpu-16")
    assert adapter_token_bytes(on_cpu) == 7 * kv_block_bytes(on_cpu), "what is beside a slot is in host memory"
    together = adapter_bytes(one) + adapter_row_bytes(one) + adapter_token_bytes(one)
    plan = with_room(BLOCK * 100 + together, adapter_slots=1, adapter_tokens=100)
    assert plan.blocks == 92 and plan.adapters == together


def test_adapters() -> None:
    """Per rank and layer: A of q, k, v, gate and up whole, those of o and down split; B the other way round. Embedding
    and head, whose B is split, are on the first stage."""
    alone = 3 * 24 + 48 + 2 * 24 + 48 + 24 + 2 * 24 + 2 * 60 + 60 + 24
    assert adapter_bytes(deployed()) == 0
    ends = 101 + 24 + 24 + 101
    assert adapter_bytes(deployed(adapter_slots=3, adapter_rank=4)) == 3 * 4 * (5 * alone + ends) * 2
    assert adapter_bytes(deployed(adapter_slots=3, adapter_rank=4, on="cpu-16")) == 3 * 4 * (5 * alone + ends) * 4
    split_ends = 101 + 24 + 24 + 34
    split = 3 * 24 + 16 + 2 * 8 + 16 + 24 + 2 * 24 + 2 * 20 + 20 + 24
    assert adapter_bytes(deployed(adapter_slots=1, adapter_rank=1, tensor_parallel=3)) == (5 * split + split_ends) * 2
    stages = deployed(adapter_slots=1, adapter_rank=1, tensor_parallel=3, pipeline_parallel=2)
    assert [adapter_bytes(stages, stage) for stage in (0, 1)] == [(2 * split + split_ends) * 2, 3 * split * 2]
    experts = adapter_bytes(deployed(replace(SMALL, moe=MOE), adapter_slots=1, adapter_rank=1))
    attention, dense = 3 * 24 + 48 + 2 * 24 + 48 + 24, 2 * 24 + 2 * 60 + 60 + 24
    routed = 24 + 5 + (2 * 24 + 2 * 6 + 6 + 24)
    assert experts == (5 * attention + dense + 4 * routed + ends) * 2
    two = deployed(adapter_slots=2, adapter_vectors=True, adapter_blocks=8)
    together = adapter_bytes(two) + adapter_row_bytes(two) + adapter_vector_bytes(two) + adapter_block_bytes(two)
    plan = with_room(BLOCK * 100 + together, adapter_slots=2, adapter_vectors=True, adapter_blocks=8)
    assert plan.blocks == 92 and plan.adapters == together
    assert plan.capacity == plan.weights + plan.adapters + plan.runtime + plan.activations + plan.kv_room + plan.reserve


def said(shape: ModelShape = SMALL, **settings: Any) -> dict[str, tuple[str, str]]:
    found = memory_plan(deployed(shape, **settings)).assumptions
    return {one.what: (one.value, one.source) for one in found}


def test_assumptions() -> None:
    plain = said()
    assert plain["weights"] == ("bf16, 16 bits each", "dense, as the device computes")
    assert plain["runtime"][0] == "0.6 GiB" and plain["KV element"][0] == "16 bits (bf16)"
    assert plain["activations"][0] == "0.0 GiB for steps of 100 tokens"
    assert plain["KV cache"][0] == "92% of what is free"
    assert "sliding windows" not in plain and "tied embeddings" not in plain
    assert said(on="cpu-2", memory_share=0.5)["KV cache"][0] == "100% of the model's share"
    assert "activations" not in said(on="cpu-2") and said(on="cpu-2")["KV cache"][0] == "15% of what is free"
    assert "KV cache" not in said(kv_memory=1000)
    assert said(weight_dtype="int8")["weights"][1] == "engine.quantization: scales included"
    stored = replace(SMALL, stored=deployed(weight_dtype="int8").weights, tied_embeddings=True)
    assert said(stored)["weights"][1] == "as the checkpoint stores them" and "tied embeddings" in said(stored)
    mixed = said(replace(SMALL, windows=(64, None, 64, 64, 64)))
    assert "28% at 640 tokens" in mixed["sliding windows"][0]
    assert "sliding windows" not in said(replace(SMALL, windows=(64,) * 5))
