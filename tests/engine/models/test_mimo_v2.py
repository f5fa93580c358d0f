"""MiMo-V2-Flash: configurations and files as they are published, narrow values in a cache of wide heads, FP8 tiles,
prompts that cross between engines, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.engine.backends.interface import HeadLayout
from penstock.engine.backends.reference.ops import ReferenceOps
from penstock.engine.kv.kinds import PagedKV
from penstock.engine.models.families import read_config
from penstock.engine.models.layers.narrow_values import NarrowValueAttention
from penstock.engine.parallel.layout import check_layout
from penstock.errors import CheckpointError
from tests.engine.harness import generate, greedy, make_engine
from tests.engine.models.test_transformers_handover import check
from tests.engine.parallel.threads import threaded_engine
from tests.engine.speculative.forced import eager_engine
from tests.engine.speculative.heads import noted_drafts
from tests.engine.speculative.plain_mtp import PlainMimo
from tests.engine.tiny import Reference, write_checkpoint

PROMPT = [29 * i % 199 for i in range(70)]
TILE = 32


def published(**changes: Any) -> dict[str, Any]:
    """`config.json` with the keys of the published model, and 12 layers."""
    pattern = [0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0]
    return {
        "model_type": "mimo_v2_flash", "architectures": ["MiMoV2FlashForCausalLM"], "attention_bias": False,
        "attention_chunk_size": 128, "attention_value_scale": 0.707, "add_full_attention_sink_bias": False,
        "add_swa_attention_sink_bias": True, "head_dim": 192, "hidden_act": "silu", "hidden_size": 4096,
        "hybrid_layer_pattern": pattern, "intermediate_size": 16384, "layernorm_epsilon": 1e-5,
        "max_position_embeddings": 262144, "moe_intermediate_size": 2048, "moe_layer_freq": [0] + [1] * 11,
        "n_group": 1, "n_routed_experts": 256, "n_shared_experts": None, "norm_topk_prob": True,
        "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 12, "num_key_value_heads": 4,
        "partial_rotary_factor": 0.334, "rope_theta": 5000000, "routed_scaling_factor": None,
        "scoring_func": "sigmoid", "sliding_window": 128, "sliding_window_size": 128, "swa_head_dim": 192,
        "swa_num_attention_heads": 64, "swa_num_key_value_heads": 8, "swa_rope_theta": 10000, "swa_v_head_dim": 128,
        "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": 128,
        "vocab_size": 152576, **changes,
    }  # fmt: skip


def test_the_published_configuration() -> None:
    config = read_config(published())
    assert config.windows == (None, *[129] * 4, None, *[129] * 5, None), "128 tokens before each"
    assert config.layer_heads[:2] == ((4, 192), (8, 192))
    assert [config.values_in(layer) for layer in (0, 1)] == [4 * 128, 8 * 128]
    assert (config.attended_in(0), config.value_scale) == (64 * 128, 0.707)
    assert [config.has_sinks(layer) for layer in (0, 1)] == [False, True]
    assert [(rope.theta, int(192 * rope.rotated)) for rope in config.ropes[:2]] == [(5e6, 64), (1e4, 64)]
    assert config.moe is not None and config.moe.layers == (False, *[True] * 11)
    assert (config.moe.scale, config.moe.scoring, config.moe.shared_ffn_size) == (1.0, "sigmoid", 0)
    check_layout(config, 4, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hybrid_layer_pattern": [1, 0] * 6}, "hybrid_layer_pattern"),
        ({"moe_layer_freq": [1] * 12}, "moe_layer_freq"),
        ({"layernorm_epsilon": 1e-6}, "layernorm_epsilon"),
        ({"rope_theta": 640000}, "rope_theta"),
        ({"swa_rope_theta": 5e5}, "swa_rope_theta"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"swa_num_key_value_heads": 4}, "swa_num_key_value_heads"),
        ({"swa_v_head_dim": 192}, "swa_v_head_dim"),
        ({"add_full_attention_sink_bias": True}, "add_full_attention_sink_bias"),
        ({"n_shared_experts": 1}, "n_shared_experts"),
        ({"v_head_dim": 256}, "v_head_dim is 256, above head_dim"),
        ({"num_key_value_heads": 64, "swa_num_key_value_heads": 128}, "64 heads over 128 KV heads"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "there must be no rope_scaling"),
    ],
    ids=str,
)
def test_what_the_reference_does_not_compute_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_config(published(**changes))


def test_keys_as_they_are_published_are_those_of_the_reference(tmp_path: Path) -> None:
    """A tiny checkpoint with the published names of its sizes instead of the reference's."""
    folder = write_checkpoint("mimo-v2-flash", tmp_path, num_hidden_layers=7, rope_parameters=None)
    wanted = generate(make_engine(folder), greedy("a", PROMPT, 8))["a"]
    assert Reference(folder).agrees(PROMPT, wanted)
    config = json.loads((folder / "config.json").read_text())
    window = config.pop("sliding_window")
    for key in ("layer_types", "mlp_layer_types", "rope_parameters", "rms_norm_eps"):
        del config[key]
    config |= {
        "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0, 1], "moe_layer_freq": [0, 1, 1, 1, 1, 1, 1],
        "layernorm_epsilon": 1e-5, "partial_rotary_factor": 0.334, "rope_theta": 5000000, "swa_rope_theta": 10000,
        "sliding_window": window - 1, "sliding_window_size": window - 1, "swa_num_key_value_heads": 4,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    assert generate(make_engine(folder), greedy("a", PROMPT, 8))["a"] == wanted
    assert Reference(folder).agrees(PROMPT, wanted), "the reference takes its defaults for the keys it does not read"


def test_values_are_kept_with_zeros_behind_them(tmp_path: Path) -> None:
    engine: Any = make_engine(write_checkpoint("mimo-v2-flash", tmp_path))
    mixers = [layer.mixer for layer in engine.runner.decoder.layers]
    assert all(isinstance(mixer, NarrowValueAttention) for mixer in mixers)
    assert [(mixer.heads.kv_heads, mixer.sinks is None) for mixer in mixers] == [(2, True), (4, False), (4, False)]
    kinds = engine.runner.kv.shape.kinds
    assert all(isinstance(kind, PagedKV) for kind in kinds)
    assert [(kind.kv_heads, kind.head_dim) for kind in kinds] == [(2, 24), (4, 24), (4, 24)]
    generate(engine, greedy("a", PROMPT, 4))
    for cache in engine.runner.kv.layers:
        assert bool(cache.v[..., :16].any()) and not bool(cache.v[..., 16:].any())


def test_padding_of_values() -> None:
    layout = HeadLayout(heads=3, kv_heads=2, head_dim=4, scale=1.0)
    row = torch.arange(1.0, 3 * 4 + 2 * 4 + 2 * 3 + 1).expand(2, -1)
    got = ReferenceOps().pad_values(row, layout, 3, 0.5)
    assert got[:, :20].equal(row[:, :20])
    assert got[1, 20:].tolist() == [10.5, 11.0, 11.5, 0.0, 12.0, 12.5, 13.0, 0.0]
    assert got.is_contiguous()


def in_fp8(folder: Path) -> None:
    """As published: tiles of matrices, which the edges of these may cut, without the output matrices of attention; and
    layers for multi-token prediction."""
    tensors = load_file(folder / "model.safetensors")
    dense = ("o_proj.weight", "eh_proj.weight")
    for name in [name for name in tensors if name.endswith("_proj.weight") and not name.endswith(dense)]:
        weight = tensors[name]
        rows, columns = (torch.arange(size) // TILE for size in weight.shape)
        scale = torch.rand(int(rows[-1]) + 1, int(columns[-1]) + 1) * 0.002 + 0.001
        tensors[name] = (weight / scale[rows][:, columns]).clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [TILE, TILE],
        "ignored_layers": [f"model.layers.{layer}.self_attn.o_proj" for layer in range(3)],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def test_fp8_tiles_as_published(tmp_path: Path) -> None:
    folder = PlainMimo.write("mimo-v2-flash", tmp_path / "fp8")
    in_fp8(folder)
    engine = eager_engine(folder, speculation="mtp")
    drafts = noted_drafts(engine)
    got = generate(engine, greedy("a", PROMPT, 8))["a"]
    dense = PlainMimo.write("mimo-v2-flash", tmp_path / "dense")
    names = load_file(dense / "model.safetensors").keys()
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in names if tensors[name].dtype == torch.float8_e4m3fn]:
        scale = tensors[f"{name}_scale_inv"].repeat_interleave(TILE, 0).repeat_interleave(TILE, 1)
        rows, columns = tensors[name].shape
        tensors[name] = tensors[name].float() * scale[:rows, :columns]
    save_file({name: tensors[name] for name in names}, dense / "model.safetensors", metadata={"format": "pt"})
    assert Reference(dense).agrees(PROMPT, got, tie=2e-2)
    layer = PlainMimo(dense)
    for tokens, draft in drafts:
        scores = layer.scores(tokens, draft)
        assert bool((scores.amax(-1) - scores[range(len(draft)), draft] < 2e-2).all())
    assert len(drafts) > 2
    with threaded_engine(folder, 2, 1) as ranks:  # the parts of keys begin inside of a tile
        assert Reference(dense).agrees(PROMPT, generate(ranks, greedy("a", PROMPT, 8))["a"], tie=2e-2)


@pytest.mark.parametrize(
    ("giving", "taking", "settings"),
    [
        ((2, 2), (1, 1), {}),
        pytest.param((1, 1), (4, 1), {}, marks=pytest.mark.slow),  # two KV heads of some layers for four shards
        pytest.param((1, 2), (2, 1), {}, marks=pytest.mark.slow),
        pytest.param((2, 1), (1, 2), {"kv_dtype": "int8"}, marks=pytest.mark.slow),
        pytest.param((2, 1), (1, 2), {"kv_dtype": "fp8"}, marks=pytest.mark.slow),
    ],
)
def test_blocks_cross_between_grids(giving: Any, taking: Any, settings: dict[str, Any], tmp_path: Path) -> None:
    check(write_checkpoint("mimo-v2-flash", tmp_path), giving, taking, **settings)
