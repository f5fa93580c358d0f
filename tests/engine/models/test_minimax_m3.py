"""MiniMax M3: the published configuration, what is refused, which blocks are chosen, and blocks between grids."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLIndexer

from penstock.engine.adapters.layout import uncut
from penstock.engine.adapters.model_sites import layout_of
from penstock.engine.adapters.prefixes import read_prefix
from penstock.engine.adapters.spec import AdapterSpec
from penstock.engine.backends.activation import ClampedSwiglu
from penstock.engine.backends.interface import SparseBlockLayout
from penstock.engine.backends.reference.sparse_blocks import _chosen, _members
from penstock.engine.kv.kinds import BothKinds, PagedKV
from penstock.engine.models.families import read_config
from penstock.engine.models.layers.sparse_block_attention import SparseBlockAttention
from penstock.engine.parallel.adapters import adapter_cut
from penstock.engine.parallel.layout import Place, check_layout, local_config
from penstock.errors import CheckpointError, ConfigError
from tests.engine.adapters.files import write_adapter
from tests.engine.harness import assert_idle, drain, generate, greedy, make_engine
from tests.engine.models.test_transformers_handover import check
from tests.engine.tiny import COMMON, FAMILIES, Reference, write_checkpoint

PROMPT = [29 * i % 199 for i in range(70)]
FULL, SPARSE = "full_attention", "minimax_m3_sparse"


def published(**changes: Any) -> dict[str, Any]:
    """The decoder's keys as published, and 8 layers."""
    return {
        "model_type": "minimax_m3_vl_text", "dense_intermediate_size": 12288, "head_dim": 128,
        "hidden_act": "swigluoai", "hidden_size": 6144, "intermediate_size": 3072, "max_position_embeddings": 524288,
        "moe_layer_freq": [0] * 3 + [1] * 5, "num_attention_heads": 64, "num_experts_per_tok": 4,
        "num_hidden_layers": 8, "num_key_value_heads": 4, "num_local_experts": 128, "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-6, "rope_theta": 5000000, "rotary_dim": 64, "routed_scaling_factor": 2.0,
        "shared_intermediate_size": 3072, "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "vocab_size": 200064,
        "sparse_attention_config": {
            "sparse_num_index_heads": 4, "sparse_index_dim": 128, "sparse_block_size": 128, "sparse_topk_blocks": 16,
            "sparse_local_block": 1, "sparse_attention_freq": [0] * 3 + [1] * 5,
        },
        **changes,
    }  # fmt: skip


def test_a_configuration_as_published() -> None:
    config = read_config(published())
    blocks = config.sparse_blocks
    assert blocks is not None and blocks.layers == (False,) * 3 + (True,) * 5
    assert (blocks.heads, blocks.dim, blocks.rate, blocks.most, blocks.local) == (4, 128, 128, 16, 1)
    assert config.moe is not None and config.moe.layers == blocks.layers
    assert (config.ffn_size, config.moe.ffn_size, config.moe.shared_ffn_size) == (12288, 3072, 3072)
    assert (config.moe.scale, config.moe.scoring, config.rope.rotated) == (2.0, "sigmoid", 0.5)
    assert config.activation == ClampedSwiglu(1.702, 7.0)
    check_layout(config, 8, 2)
    assert local_config(config, Place(0, 2, 1)).sparse_blocks.heads == 2  # type: ignore[union-attr]


def test_keys_of_both_ages_say_the_same() -> None:
    newer = published(
        layer_types=[FULL] * 3 + [SPARSE] * 5, mlp_layer_types=["dense"] * 3 + ["sparse"] * 5, index_n_heads=2
    )
    newer["sparse_attention_config"] = {"sparse_topk_blocks": 16}
    both = read_config(newer)
    assert both.sparse_blocks is not None and both.sparse_blocks.heads == 2
    assert both.moe == read_config(published()).moe


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["sliding_attention"] * 8}, "layer_types must name full_attention or minimax_m3_sparse"),
        ({"moe_layer_freq": [1] * 3}, "'moe_layer_freq' must be 0 or 1 for each of 8 layers"),
        ({"sparse_attention_config": {"sparse_attention_freq": 1}}, "'sparse_attention_freq' must be 0 or 1"),
        ({"layer_types": [SPARSE] * 8, "sparse_attention_config": {"sparse_num_index_heads": 3}}, "4 KV heads evenly"),
        ({"layer_types": [SPARSE] * 8, "sparse_attention_config": {"sparse_local_block": 17}}, "index_local_blocks"),
        ({"layer_types": [SPARSE] * 8, "sparse_attention_config": {"sparse_index_dim": 32}}, "64 dimensions of heads"),
        ({"swiglu_limit": 0.0}, "'swiglu_limit' must be positive"),
    ],
    ids=str,
)
def test_configurations_that_cannot_be_run(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_config(published(**changes))


def test_shards_that_cannot_share_the_heads_that_choose() -> None:
    shape = {"num_key_value_heads": 6, "num_attention_heads": 48, "layer_types": [SPARSE] * 8}
    config = read_config(published(**shape, sparse_attention_config={"sparse_num_index_heads": 2}))
    check_layout(config, 2, 1)
    with pytest.raises(ConfigError, match="3 cannot split 48 heads over 6 KV heads with 2 index heads"):
        check_layout(config, 3, 1)


@pytest.mark.parametrize("local", [0, 1, 2, 3])
def test_chosen_blocks_are_those_of_the_reference(local: int) -> None:
    name, changes = FAMILIES["minimax-m3"]
    config = getattr(transformers, name)(**{**COMMON, **changes, "index_local_blocks": local})
    torch.manual_seed(local)
    indexer = MiniMaxM3VLIndexer(config, 1)
    hidden, count, first = torch.randn(1, 61, 64), 61, 24
    cos, sin = torch.ones(1, count, 16), torch.zeros(1, count, 16)
    wanted = indexer(hidden, (cos, sin), None, torch.arange(count).unsqueeze(0))[0].transpose(0, 1)

    def made(linear: Any, heads: int) -> torch.Tensor:
        x = linear(hidden[0]).view(count, heads, 16)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config.rms_norm_eps)

    layout = SparseBlockLayout(2, 16, 8, 3, local, config.rms_norm_eps)
    positions = torch.arange(first, count)
    queries, keys = made(indexer.q_proj, 2)[first:], made(indexer.k_proj, 1).squeeze(1)
    found = _chosen(queries, keys, layout, positions)
    assert found.equal(wanted[first:].sort(-1).values)
    at, there = _members(found[:, 0], layout, positions)
    assert there.sum(1).max() == 24 and bool((at <= positions.unsqueeze(1)).all())


def test_layers_that_choose_keep_a_key_of_every_token(tmp_path: Path) -> None:
    engine: Any = make_engine(write_checkpoint("minimax-m3", tmp_path))
    mixers = [layer.mixer for layer in engine.runner.decoder.layers]
    assert [isinstance(mixer, SparseBlockAttention) for mixer in mixers] == [False, True, True, False]
    kinds = engine.runner.kv.shape.kinds
    assert [type(kind) for kind in kinds] == [PagedKV, BothKinds, BothKinds, PagedKV]


@pytest.mark.parametrize("family", ["minimax-m3", "minimax-m3-shared-choice"])
def test_chunks_and_preemption_beyond_what_is_chosen(family: str, tmp_path: Path) -> None:
    """The cache has room for some sequences at a time, and prompts are cut anywhere within blocks."""
    folder = write_checkpoint(family, tmp_path)
    reference = Reference(folder)
    prompts = {f"r{n}": [(n * 13 + j * 7) % 199 for j in range(n)] for n in (20, 61, 90, 133)}
    engine = make_engine(folder, token_budget=23, num_blocks=14, max_running=4)
    got = generate(engine, *(greedy(name, prompt, 16) for name, prompt in prompts.items()))
    for name, prompt in prompts.items():
        assert reference.agrees(prompt, got[name]), name
    assert engine.load_snapshot().preemptions > 0
    assert_idle(engine)


def test_adapters_are_cut_like_the_heads_that_choose() -> None:
    model = read_config(published())
    whole = layout_of(model, experts=False)
    (index,) = (at for at, site in enumerate(whole.sites) if site.attribute == "indexer.linear")
    cuts = [adapter_cut(model, Place(rank, 8, 1), experts=False).outputs[index] for rank in range(8)]
    assert [cut[0] for cut in cuts] == [(128 * (rank // 2), 128 * (rank // 2 + 1)) for rank in range(8)]
    assert {cut[1] for cut in cuts} == {(0, 128)}


def test_a_prefix_has_no_index_keys() -> None:
    cut = uncut(layout_of(read_config(published()), experts=False))
    with pytest.raises(CheckpointError, match="choose blocks by keys of their tokens"):
        read_prefix(torch.zeros(4, 8 * 2 * 4 * 128), cut, torch.float32)


def test_norms_of_the_indexer_are_not_replaced(tmp_path: Path) -> None:
    base = write_checkpoint("minimax-m3", tmp_path / "base")
    folder = write_adapter(tmp_path / "adapter", base, targets=("q_proj",), modules_to_save=["q_norm"])
    tensors = load_file(folder / "adapter_model.safetensors")
    norm = "base_model.model.model.layers.1.self_attn.indexer.q_norm.weight"
    save_file({**tensors, norm: torch.ones(16)}, folder / "adapter_model.safetensors")
    engine = make_engine(base, adapters=(AdapterSpec("one", str(folder)),))
    engine.submit(replace(greedy("r", [1, 2, 3], 4), adapter="one"))
    (delta,) = drain(engine)
    assert f"cannot apply '{norm}'" in str(delta.error)


@pytest.mark.parametrize(
    ("giving", "taking", "settings"),
    [
        ((2, 2), (1, 1), {}),
        pytest.param((1, 1), (4, 1), {}, marks=pytest.mark.slow),
        pytest.param((2, 1), (1, 2), {"kv_dtype": "int8"}, marks=pytest.mark.slow),
    ],
)
def test_blocks_cross_between_grids(giving: Any, taking: Any, settings: dict[str, Any], tmp_path: Path) -> None:
    check(write_checkpoint("minimax-m3", tmp_path), giving, taking, **settings)


def test_a_layer_for_multi_token_prediction_is_not_run(tmp_path: Path) -> None:
    """Those who run it do not agree on what it reads."""
    folder = write_checkpoint("minimax-m3", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    at = "model.mtp.layers.0."
    tensors |= {
        f"{at}eh_proj.weight": torch.zeros(64, 128),
        f"{at}transformer_layer.input_layernorm.weight": torch.zeros(64),
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="not established whether the MTP layer of minimax_m3_vl_text models reads"):
        make_engine(folder, speculation="mtp")
    assert make_engine(folder, speculation="auto").config.speculation == "ngram"
