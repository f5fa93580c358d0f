"""Step 3.5 and 3.7: configurations and files as they are published, query heads by layer, gates of heads, bounds behind
the SiLU, FP8 tiles of stacks, prompts that cross between engines, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.engine.backends.interface import BoundedSilu
from penstock.engine.backends.reference.ops import ReferenceOps
from penstock.engine.models.families import read_config
from penstock.engine.models.layers.gated_attention import OutputGatedAttention
from penstock.engine.parallel.layout import check_layout
from penstock.errors import CheckpointError, ConfigError
from penstock.planning.config_shape import shape_of_config
from tests.engine.harness import generate, greedy, make_engine
from tests.engine.models.test_transformers_handover import check
from tests.engine.parallel.threads import threaded_engine
from tests.engine.speculative.forced import eager_engine
from tests.engine.speculative.heads import noted_drafts
from tests.engine.speculative.mtp_layers import PlainMtp, write_mtp
from tests.engine.tiny import Reference, write_checkpoint

PROMPT = [29 * i % 199 for i in range(70)]
TILE = 16
NAMES = (
    (".mlp.gate.e_score_correction_bias", ".moe.router_bias"),
    (".mlp.gate.", ".moe.gate."),
    (".mlp.experts.down_proj", ".moe.down_proj.weight"),
    (".mlp.shared_experts.", ".share_expert."),
    (".shared_head.", ".transformer.shared_head."),
)
"""Of tensors: those in memory, and those that are published."""


def published(**changes: Any) -> dict[str, Any]:
    """`config.json` of Step 3.5 Flash; lists have entries for three layers for multi-token prediction too."""
    four = 12
    return {
        "model_type": "step3p5", "architectures": ["Step3p5ForCausalLM"], "att_impl_type": "GQA",
        "attention_other_setting": {"attention_type": "sliding_attention", "head_dim": 128, "num_attention_groups": 8,
                                    "num_attention_heads": 96, "true_head_dim": 128},
        "head_dim": 128, "hidden_size": 4096, "intermediate_size": 11264,
        "layer_types": ["full_attention", *["sliding_attention"] * 3] * four, "max_position_embeddings": 262144,
        "max_seq_len": 262144, "moe_every_n_layer": 1, "moe_intermediate_size": 1280, "moe_layer_offset": 0,
        "moe_layers_enum": ",".join(map(str, range(3, 45))), "moe_num_experts": 288,
        "moe_router_activation": "sigmoid", "moe_router_scaling_factor": 3.0, "moe_top_k": 8, "need_fp32_gate": True,
        "norm_expert_weight": True, "num_attention_groups": 8, "num_attention_heads": 64, "num_hidden_layers": 45,
        "num_nextn_predict_layers": 3, "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0] * four,
        "rope_scaling": {"factor": 2.0, "high_freq_factor": 32.0, "low_freq_factor": 1.0,
                         "original_max_position_embeddings": 131072, "rope_type": "llama3"},
        "rope_theta": [5000000.0, 10000.0, 10000.0, 10000.0] * four, "share_expert_dim": 1280, "sink": False,
        "sliding_window": 512, "swiglu_limits": [0.0] * 43 + [7.0, 7.0] + [0.0] * 3,
        "swiglu_limits_shared": [0.0] * 44 + [16.0] + [0.0] * 3, "tie_word_embeddings": False,
        "use_head_wise_attn_gate": True, "use_moe": True, "use_moe_router_bias": True, "use_qk_norm": True,
        "use_rope_layers": [], "vocab_size": 128896, "yarn_only_types": ["full_attention"], "zero_centered": True,
        **changes,
    }  # fmt: skip


def test_the_published_configuration() -> None:
    config = read_config(published())
    assert config.windows[:5] == (None, 512, 512, 512, None) and len(config.windows) == 45
    assert config.query_heads[:5] == (64, 96, 96, 96, 64) and config.heads_in(1) == (8, 128)
    assert (config.attended_in(0), config.attended_in(1), config.gates_in(1)) == (64 * 128, 96 * 128, 96)
    ropes = config.ropes
    assert [(rope.kind, rope.theta, rope.rotated, rope.factor) for rope in ropes[:2]] == [
        ("llama3", 5e6, 0.5, 2.0), ("default", 1e4, 1.0, 1.0)
    ]  # fmt: skip
    moe = config.moe
    assert moe is not None and moe.layers == (False,) * 3 + (True,) * 42
    assert (moe.experts, moe.top_k, moe.scale, moe.shared_ffn_size, moe.scoring) == (288, 8, 3.0, 1280, "sigmoid")
    assert (moe.bounds[42:], config.bounds[42:]) == ((0.0, 7.0, 7.0), (0.0, 0.0, 16.0))
    check_layout(config, 32, 4)  # 2 and 3 query heads, and every KV head on several shards
    with pytest.raises(ConfigError, match="cannot split 96 and 64 heads over 8 KV heads"):
        check_layout(config, 64, 1)  # which do not divide 96
    inside = read_config(
        {"model_type": "step3p7", "text_config": published(model_type="anything"), "vision_config": {}}
    )
    assert inside == config


def test_a_plan_counts_what_is_published() -> None:
    shape = shape_of_config(published(), "step-3.5-flash")
    assert shape.parameters / 1e9 == pytest.approx(196, rel=0.01)
    assert shape.active_parameters / 1e9 == pytest.approx(11, rel=0.1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_expert_weight": False}, "norm_expert_weight"),
        ({"moe_router_activation": "softmax"}, "moe_router_activation"),
        ({"zero_centered": False}, "zero_centered"),
        ({"use_head_wise_attn_gate": False}, "use_head_wise_attn_gate"),
        ({"sink": True}, "sink is True"),
        ({"use_rope_layers": [1]}, "use_rope_layers"),
        ({"yarn_only_types": ["sliding_attention"]}, "yarn_only_types"),
        ({"gating": "elementwise"}, "gating"),
        ({"attention_other_setting": {"num_attention_heads": 96, "num_attention_groups": 4}}, "num_attention_groups"),
        ({"attention_other_setting": {"num_attention_heads": 90}}, "90 heads over 8 KV heads"),
        ({"rope_theta": [5e6, 1e4, 1e4, 1e4, 4e6, 1e4, 1e4, 1e4] * 6}, "rope_theta must be the same in all layers"),
        ({"swiglu_limits": [7.0] * 44}, "swiglu_limits must have an entry for each of 45 layers"),
        ({"swiglu_limits_shared": [-7.0] * 48}, "swiglu_limits_shared must have numbers from 0 on"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ({"num_nextn_predict_layers": 0}, "layer_types must name"),
        ({"per_layer_config": {"1": {"head_dim": 64}}}, "per_layer_config must have num_attention_heads"),
    ],
    ids=str,
)
def test_what_the_reference_does_not_compute_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_config(published(**changes))


def as_published(folder: Path) -> dict[str, Tensor]:
    """A tiny checkpoint under the published names."""
    found: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for own, theirs in NAMES:
            if own in name:
                name = name.replace(own, theirs)
                break
        if name.endswith("experts.gate_up_proj"):
            at = name.replace("mlp.experts.gate_up_proj", "moe.{}_proj.weight")
            gate, up = tensor.chunk(2, dim=1)
            found |= {at.format("gate"): gate.contiguous(), at.format("up"): up.contiguous()}
        else:
            found[name] = tensor
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    drop = ("n_routed_experts", "num_experts_per_tok", "num_key_value_heads", "share_expert_dim", "mlp_layer_types",
            "num_sliding_attention_heads", "per_layer_config", "rope_parameters")  # fmt: skip
    for key in (*drop, "mtp_layer_types"):
        del config[key]
    config |= {
        "moe_num_experts": 8, "moe_top_k": 3, "num_attention_groups": 2, "share_expert_dims": 64,
        "moe_layers_enum": "1,2,3", "attention_other_setting": {"num_attention_heads": 6, "num_attention_groups": 2},
        "num_nextn_predict_layers": 1, "layer_types": [*config["layer_types"], "sliding_attention"],
        "swiglu_limits": [*config["swiglu_limits"], 0.0], "rope_theta": [10000.0, 1000.0, 1000.0, 9.0],
        "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0],
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 128},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return found


def test_keys_and_names_as_they_are_published(tmp_path: Path) -> None:
    """With the layer for multi-token prediction, which drafts."""
    folder = write_mtp("step3.5", tmp_path)
    wanted = generate(make_engine(folder), greedy("a", PROMPT, 12))["a"]
    assert Reference(folder).agrees(PROMPT, wanted)
    layer = PlainMtp(folder)
    assert any(".moe.up_proj." in name for name in as_published(folder))
    assert generate(make_engine(folder), greedy("a", PROMPT, 12))["a"] == wanted
    engine = eager_engine(folder, speculation="mtp", speculation_depth=3, num_blocks=100)
    drafts = noted_drafts(engine)
    assert generate(engine, greedy("a", PROMPT, 12))["a"] == wanted
    right = [draft == layer.draft(tokens, len(draft)) for tokens, draft in drafts]
    assert len(right) > 3 and all(right), right
    config = json.loads((folder / "config.json").read_text())
    other = {"layer_types": [*config["layer_types"][:3], "full_attention"]}
    assert (read_config(config).mtp_like, read_config({**config, **other}).mtp_like) == (1, 0)


def test_what_layers_are_made_of(tmp_path: Path) -> None:
    engine: Any = make_engine(write_checkpoint("step3.5", tmp_path))
    layers = engine.runner.decoder.layers
    assert all(isinstance(layer.mixer, OutputGatedAttention) for layer in layers)
    assert [(layer.mixer.heads.heads, layer.mixer.output_gate.weight.shape[0]) for layer in layers] == [
        (4, 4), (6, 6), (6, 6)
    ]  # fmt: skip
    dense, *routed = (layer.feed_forward for layer in layers)
    assert dense.activation == BoundedSilu(0.4)
    assert [each.shared.activation for each in routed] == ["silu", BoundedSilu(0.7)]
    assert [each.feed_forward.experts[0].activation for each in routed] == ["silu", BoundedSilu(0.6)]


def test_the_bound_stands_behind_the_silu() -> None:
    row = torch.tensor([[-9.0, 0.5, 3.0, 9.0, -1.0, 1.0, -5.0, 5.0]])
    gate, up = row.chunk(2, dim=1)
    silu = gate * gate.sigmoid()
    expected = torch.stack([silu[0, 0] * -1.0, silu[0, 1] * 1.0, torch.tensor(2.0 * -2.0), torch.tensor(2.0 * 2.0)])
    torch.testing.assert_close(ReferenceOps().bounded_silu(row, 2.0)[0], expected)
    assert up[0].tolist() == [-1.0, 1.0, -5.0, 5.0], "the input is as it was"


def test_a_gate_has_one_number_for_each_head() -> None:
    x, gate = torch.randn(3, 2 * 4), torch.randn(3, 2)
    expected = (x.view(3, 2, 4) * gate.sigmoid()[..., None]).view(3, 8)
    torch.testing.assert_close(ReferenceOps().sigmoid_mul(x, gate), expected)


def in_fp8(folder: Path) -> dict[str, Tensor]:
    """The published names with tiles of matrices and of stacks, which the edges of these may cut; the gates too. What
    these are as numbers."""
    tensors, plain = as_published(folder), {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight = tensors[name]
        rows, columns = (torch.arange(size) // TILE for size in weight.shape[-2:])
        scale = torch.rand(*weight.shape[:-2], int(rows[-1]) + 1, int(columns[-1]) + 1) * 0.002 + 0.001
        wide = scale[..., rows, :][..., columns]
        tensors[name] = (weight / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale
        plain[name] = tensors[name].float() * wide
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [TILE, TILE],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return plain


def test_fp8_tiles(tmp_path: Path) -> None:
    folder = write_checkpoint("step3.5", tmp_path / "fp8")
    plain = in_fp8(folder)
    got = generate(make_engine(folder), greedy("a", PROMPT, 8))["a"]
    dense = write_checkpoint("step3.5", tmp_path / "dense")
    tensors = load_file(dense / "model.safetensors")
    for name in tensors:
        found = name
        for own, theirs in NAMES:
            found = found.replace(own, theirs) if own in name else found
        at = name.replace("mlp.experts.gate_up_proj", "moe.{}_proj.weight")
        if at != name:
            tensors[name] = torch.cat([plain[at.format(part)] for part in ("gate", "up")], dim=1)
        elif found in plain:
            tensors[name] = plain[found]
    save_file(tensors, dense / "model.safetensors", metadata={"format": "pt"})
    reference = Reference(dense)
    assert reference.agrees(PROMPT, got, tie=2e-2)
    with threaded_engine(folder, 2, 1) as ranks:
        assert reference.agrees(PROMPT, generate(ranks, greedy("a", PROMPT, 8))["a"], tie=2e-2)


@pytest.mark.parametrize(
    ("giving", "taking", "settings"),
    [
        ((2, 2), (1, 1), {}),
        pytest.param((1, 2), (2, 1), {}, marks=pytest.mark.slow),
        pytest.param((2, 1), (1, 2), {"kv_dtype": "int8"}, marks=pytest.mark.slow),
        pytest.param((2, 1), (1, 2), {"kv_dtype": "fp8"}, marks=pytest.mark.slow),
    ],
)
def test_blocks_cross_between_grids(giving: Any, taking: Any, settings: dict[str, Any], tmp_path: Path) -> None:
    check(write_checkpoint("step3.5", tmp_path), giving, taking, **settings)
