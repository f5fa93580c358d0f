"""Attention to the tokens that an indexer chooses (DeepSeek V3.2, GLM-5), in everything an engine can do. All contexts
here outgrow what may be chosen; `test_greedy_equals_reference` compares both families with the reference."""

from __future__ import annotations

import dataclasses
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.engine.adapters.spec import AdapterSpec
from penstock.engine.backends.interface import AttentionBatch, IndexLayout
from penstock.engine.backends.reference.ops import ReferenceOps
from penstock.engine.kv.kinds import BothKinds, PagedLatent, PagedRows
from penstock.engine.models.families import read_config
from penstock.engine.parallel.layout import check_layout
from penstock.engine.request import Request
from penstock.errors import CheckpointError, ConfigError
from tests.engine.adapters.files import merge, write_adapter
from tests.engine.harness import assert_idle, carry, collect, drain, generate, greedy, make_engine
from tests.engine.parallel.threads import threaded_engine
from tests.engine.test_determinism import WATCHED, bits, others_in_batch, run
from tests.engine.tiny import Reference, write_checkpoint
from tests.engine.tiny.latent import DSA

slow = pytest.mark.slow
FAMILIES = ("deepseek-v32", "glm-dsa")
WITH_SOURCES = (*FAMILIES, "mistral-large4")
"""With one whose layers attend to latents of others."""
TIE = 1e-3


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("chosen")
    return {name: write_checkpoint(name, folder / name) for name in WITH_SOURCES}


def requests(count: int = 5, longest: int = 90) -> list[Request]:
    chance = random.Random(11)
    prompts = [[chance.randrange(199) for _ in range(chance.randrange(20, longest))] for _ in range(count)]
    return [greedy(f"r{i}", prompt, 16) for i, prompt in enumerate(prompts)]


def chosen(scores: list[list[float]], most: int, visible: int) -> list[list[int]]:
    """What one-dimensional keys 1 and queries of these scores choose; blocks lie in reverse."""
    new, context, size = len(scores), len(scores[0]), 4
    ops, layout = ReferenceOps(), IndexLayout(1, 2, 2, most, False)
    blocks = -(-context // size)
    tables = torch.arange(blocks, 0, -1, dtype=torch.int32).unsqueeze(0)
    keys = torch.full(((blocks + 1) * size, 2), float("nan"))
    found = []
    for row, one in enumerate(scores):
        end = visible - new + row + 1
        slots = [int(tables[0, i // size]) * size + i % size for i in range(context)]
        for slot, score in zip(slots, one, strict=True):
            keys[slot] = torch.tensor([score, 0.0])
        batch = AttentionBatch(
            positions=torch.tensor([0]), slots=torch.tensor([0]), query_starts=torch.tensor([0, 1], dtype=torch.int32),
            context_lens=torch.tensor([end], dtype=torch.int32), rows=torch.tensor([0], dtype=torch.int32),
            block_tables=tables, num_decodes=1, max_query=1, max_context=end,
        )  # fmt: skip
        table = torch.tensor([[1.0, 0.0]])
        made = ops.choose_tokens(
            torch.tensor([[1.0, 0.0]]), torch.ones(1, 1), layout, table, batch, keys, size, every=True
        )
        (only,) = made
        found.append([slots.index(int(slot)) for slot in only.slots[only.valid]])
    return found


def test_the_best_are_chosen_in_order_and_of_equals_the_earlier() -> None:
    assert chosen([[5.0, 1.0, 7.0, 3.0, 6.0, 9.0]], 3, 5) == [[0, 2, 4]], "what comes later is not seen"
    assert chosen([[5.0, -1.0, -7.0, 3.0, -2.0, -1.0]], 4, 6) == [[0, 1, 2, 3]], "below zero all are equal"
    assert chosen([[2.0, 2.0, 2.0, 2.0, 9.0]], 3, 5) == [[0, 1, 4]]
    assert chosen([[2.0, 1.0, 4.0]], 8, 3) == [[0, 1, 2]], "all of them where there are no more"


def test_the_cache_has_index_keys_beside_latents(folders: dict[str, Path]) -> None:
    both = BothKinds(PagedLatent(40, 16, torch.int8), PagedRows(12, 16, torch.float32))
    kinds = make_engine(folders["deepseek-v32"], num_blocks=10, kv_dtype="int8").runner.kv.shape.kinds
    assert Counter(kinds) == {both: 3} and both.block_bytes == 16 * (40 + 2) + 16 * 12 * 4
    shared = make_engine(folders["glm-dsa"], num_blocks=10, kv_dtype="int8").runner.kv.shape.kinds
    assert shared == (both, both, PagedLatent(40, 16, torch.int8)), "a layer without indexer has no keys"


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("glm-dsa", {"host_memory": 1 << 20, "num_blocks": 12}),
        pytest.param("deepseek-v32", {"speculation": "ngram"}),
        pytest.param("deepseek-v32", {"host_memory": 64 << 10, "disk_memory": 8 << 20, "num_blocks": 12}, marks=slow),
        pytest.param("deepseek-v32", {"host_memory": 1 << 20, "num_blocks": 12}, marks=slow),
        pytest.param("mistral-large4", {"host_memory": 1 << 20, "num_blocks": 12}, marks=slow),
        pytest.param("mistral-large4", {"host_memory": 64 << 10, "disk_memory": 8 << 20, "num_blocks": 12}, marks=slow),
        pytest.param("mistral-large4", {"speculation": "ngram"}, marks=slow),
        pytest.param("glm-dsa", {"speculation": "ngram"}, marks=slow),
    ],
    ids=str,
)
def test_tiers_and_speculation_change_nothing(
    folders: dict[str, Path], tmp_path: Path, family: str, settings: dict[str, Any]
) -> None:
    if "disk_memory" in settings:
        settings = {**settings, "disk_path": str(tmp_path)}
    expected = generate(make_engine(folders[family]), *requests())
    engine = make_engine(folders[family], token_budget=48, **settings)
    for _ in range(2):
        assert generate(engine, *requests()) == expected
    assert_idle(engine)


@slow
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("family", WITH_SOURCES)
def test_few_bits_are_the_same_in_any_batch(folders: dict[str, Path], family: str, kv_dtype: str) -> None:
    alone = {}
    for request in requests():
        alone |= generate(make_engine(folders[family], kv_dtype=kv_dtype, token_budget=48), request)
    crowded = make_engine(folders[family], kv_dtype=kv_dtype, num_blocks=16, token_budget=48)
    assert generate(crowded, *requests()) == alone
    assert_idle(crowded)


@slow
@pytest.mark.parametrize(
    ("family", "tensor", "pipeline", "settings"),
    [
        ("deepseek-v32", 2, 1, {}),
        ("deepseek-v32", 4, 1, {}),
        ("deepseek-v32", 1, 3, {}),
        ("deepseek-v32", 2, 2, {}),
        ("deepseek-v32", 2, 1, {"host_memory": 1 << 20, "num_blocks": 12}),
        ("deepseek-v32", 1, 2, {"host_memory": 1 << 20, "num_blocks": 12, "kv_dtype": "int8"}),
        ("deepseek-v32", 2, 1, {"expert_parallel": True}),
        ("deepseek-v32", 2, 1, {"expert_parallel": True, "attention_parallel": "data"}),
        ("glm-dsa", 2, 1, {}),
        ("glm-dsa", 1, 2, {"host_memory": 1 << 20, "num_blocks": 12}),
        ("mistral-large4", 2, 1, {"host_memory": 1 << 20, "num_blocks": 12}),
        ("mistral-large4", 1, 2, {"host_memory": 1 << 20, "num_blocks": 12, "kv_dtype": "int8"}),
        ("mistral-large4", 4, 2, {"kv_dtype": "fp8"}),
        ("mistral-large4", 2, 2, {"expert_parallel": True}),
        ("mistral-large4", 2, 1, {"expert_parallel": True, "attention_parallel": "data"}),
    ],
    ids=str,
)
def test_ranks_give_the_output_of_one_device(
    folders: dict[str, Path], family: str, tensor: int, pipeline: int, settings: dict[str, Any]
) -> None:
    same = {key: value for key, value in settings.items() if key == "kv_dtype"}
    expected = generate(make_engine(folders[family], token_budget=32, **same), *requests())
    with threaded_engine(folders[family], tensor, pipeline, token_budget=32, **settings) as engine:
        for _ in range(2):
            assert generate(engine, *requests()) == expected


def test_a_stage_begins_with_an_indexer(folders: dict[str, Path]) -> None:
    model = read_config({**CONFIG, "model_type": "glm_moe_dsa", "indexer_types": ["full", "full", "shared"]})
    check_layout(model, 1, 2)
    with pytest.raises(ConfigError, match="3 stages are more than the 2 layers with an indexer"):
        check_layout(model, 1, 3)


@pytest.mark.parametrize("role", ["both", pytest.param("prefill", marks=pytest.mark.slow)])
def test_layers_stay_with_the_one_whose_choice_they_follow(tmp_path: Path, role: str) -> None:
    """An even division would begin the second stage with a layer that has no indexer."""
    folder = write_checkpoint("glm-dsa", tmp_path, num_hidden_layers=4, indexer_types=["full"] * 2 + ["shared"] * 2)
    alone = make_engine(folder, token_budget=32, role=role)
    expected = generate(alone, *requests())
    with threaded_engine(folder, 1, 2, token_budget=32, role=role) as engine:
        assert generate(engine, *requests()) == expected
        assert engine.info.kv_format == alone.info.kv_format


@slow
@pytest.mark.parametrize(
    "targets",
    [
        ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"),
        ("kv_b_proj", "q_b_proj"),
        ("kv_b_proj",),
        ("wq_b", "wk", "weights_proj"),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_equals_merging_it(
    folders: dict[str, Path], tmp_path: Path, family: str, targets: tuple[str, ...]
) -> None:
    adapter = write_adapter(tmp_path / "adapter", folders[family], targets=targets)
    merged = Reference(merge(folders[family], adapter, tmp_path / "merged"))
    engine = make_engine(folders[family], adapters=(AdapterSpec("tuned", str(adapter)),), token_budget=40)
    asked = requests(3)
    tuned = [dataclasses.replace(one, request_id=f"{one.request_id}-tuned", adapter="tuned") for one in asked]
    got = generate(engine, *asked, *tuned)
    assert {one.request_id: got[one.request_id] for one in asked} == generate(make_engine(folders[family]), *asked)
    for one in tuned:
        assert merged.agrees(list(one.prompt), got[one.request_id], TIE), one.request_id


@slow
@pytest.mark.parametrize("weights", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("family", ["deepseek-v32", "mistral-large4"])
def test_quantized_weights_run(folders: dict[str, Path], family: str, weights: str) -> None:
    engine = make_engine(folders[family], weights=weights)
    assert all(len(tokens) == 16 for tokens in generate(engine, *requests()).values())


CONFIG: dict[str, Any] = {
    **DSA, "model_type": "deepseek_v32", "vocab_size": 199, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 3, "num_attention_heads": 4, "n_group": 4, "topk_group": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q_lora_rank": None}, "q_lora_rank"),
        ({"index_topk": 0}, "index_topk"),
        ({"index_head_dim": 4}, "of which qk_rope_head_dim, 8, are rotated"),
        ({"layer_types": ["full_attention"] * 3}, "indexed_attention"),
        ({"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types"),
        ({"indexer_rope_interleave": True}, "indexer_rope_interleave"),
        ({"rope_interleave": False}, "rope_interleave"),
        ({"model_type": "glm_moe_dsa", "indexer_rope_interleave": False}, "indexer_rope_interleave"),
        ({"model_type": "glm_moe_dsa", "indexer_types": ["shared", "full", "full"]}, "none before it"),
        ({"model_type": "glm_moe_dsa", "index_topk_pattern": "FSX"}, "full or shared"),
    ],
)
def test_what_cannot_be_run_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_config({**CONFIG, **changes})


def test_layers_may_have_the_name_that_older_checkpoints_give_them() -> None:
    kinds = ["deepseek_sparse_attention"] * 3
    assert read_config({**CONFIG, "layer_types": kinds}) == read_config(CONFIG)
    with pytest.raises(CheckpointError, match="layer_types"):
        read_config({**CONFIG, "layer_types": ["indexed_attention", *kinds[1:]]})


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, (True, True, True)),
        ({"index_topk_freq": 2}, (True, True, False)),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, (True, False, True)),
        ({"index_topk_pattern": "FSS"}, (True, False, False)),
        ({"index_topk_pattern": "FSS", "indexer_types": ["full"] * 3}, (True, True, True)),
    ],
)
def test_layers_of_glm_that_share(changes: dict[str, Any], layers: tuple[bool, ...]) -> None:
    model = read_config({**CONFIG, "model_type": "glm_moe_dsa", **changes})
    assert model.latent is not None and model.latent.index is not None
    assert model.latent.index.layers == layers and model.latent.index.interleaved


@slow
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("deepseek-v32", {}),
        ("glm-dsa", {}),
        ("glm-dsa", {"kv_dtype": "int8"}),
        ("deepseek-v32", {"weights": "int8"}),
        ("mistral-large4", {}),
        ("mistral-large4", {"kv_dtype": "fp8"}),
    ],
)
def test_the_same_bits_in_any_batch_in_deterministic_mode(
    folders: dict[str, Path], family: str, settings: dict[str, Any]
) -> None:
    fixed = {"deterministic": True, "num_blocks": 400, **settings}
    alone = make_engine(folders[family], **fixed)
    expected = {request.request_id: bits(run(alone, [request]), request.request_id) for request in WATCHED}
    again = {request.request_id: bits(run(alone, [request]), request.request_id) for request in WATCHED}
    assert again == expected, "with the prompt found in the cache"
    for budget, others in ((64, 5), (7, 2)):
        engine = make_engine(folders[family], **fixed, token_budget=budget)
        deltas = run(engine, others_in_batch(others) + WATCHED)
        for name, wanted in expected.items():
            assert bits(deltas, name) == wanted, (name, budget, others)


@pytest.mark.parametrize(
    "family", [FAMILIES[1], *(pytest.param(one, marks=slow) for one in ("mistral-large4", FAMILIES[0]))]
)
def test_a_prefill_engine_hands_latents_and_keys_over(folders: dict[str, Path], family: str) -> None:
    giver, taker = (make_engine(folders[family], role=role) for role in ("prefill", "decode"))
    request = greedy("r", [7 * i % 199 for i in range(140)], 12)
    expected = generate(giver, request)
    assert taker.exchange is not None
    taker.exchange.release(carry(giver, taker, taker.exchange.names(request)))
    taker.submit(request)
    deltas = drain(taker)
    assert collect(deltas) == expected and deltas[0].cached_tokens == 128


@slow
def test_indexers_of_fp8_checkpoints_in_tiles(tmp_path: Path) -> None:
    """They give the tokens of the numbers that the tiles stand for; the weights of index heads stay as they are."""
    sizes = {"index_head_dim": 32, "q_lora_rank": 32}
    tiled, plain = (write_checkpoint("deepseek-v32", tmp_path / name, **sizes) for name in ("tiled", "plain"))
    stored, meant = load_file(tiled / "model.safetensors"), load_file(plain / "model.safetensors")
    for name in [name for name in stored if name.endswith(("wk.weight", "wq_b.weight", "q_a_proj.weight"))]:
        tiles = stored[name].unflatten(0, (-1, 32)).unflatten(2, (-1, 32))
        scale = tiles.abs().amax((1, 3)) / 448
        wide = scale.repeat_interleave(32, 0).repeat_interleave(32, 1)
        stored[name] = (stored[name] / wide).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scale.clone()
        meant[name] = stored[name].float() * wide
    save_file(stored, tiled / "model.safetensors", metadata={"format": "pt"})
    save_file(meant, plain / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tiled / "config.json").read_text())
    form = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    (tiled / "config.json").write_text(json.dumps({**config, "quantization_config": form}))
    reference = Reference(plain)
    got = generate(make_engine(tiled, weights="dense"), *requests(3))
    for one in requests(3):
        assert reference.agrees(list(one.prompt), got[one.request_id], 1e-2), one.request_id
