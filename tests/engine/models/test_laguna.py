"""Laguna: the published configuration, what is refused, gates and numbers of heads by layer, blocks between grids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from penstock.engine.adapters.model_sites import layout_of
from penstock.engine.adapters.spec import AdapterSpec
from penstock.engine.backends.reference.ops import ReferenceOps
from penstock.engine.loading.gguf import GGUFFile
from penstock.engine.loading.gguf_config import config_from_gguf
from penstock.engine.models.families import read_config
from penstock.engine.models.layers.gated_attention import OutputGatedAttention
from penstock.engine.parallel.layout import Place, check_layout, local_config
from penstock.errors import CheckpointError, ConfigError
from tests.engine.adapters.files import write_adapter
from tests.engine.adapters.test_equals_merging import ask
from tests.engine.harness import generate, greedy, make_engine
from tests.engine.loading.test_gguf_families import convert
from tests.engine.models.test_transformers_handover import check
from tests.engine.tiny import Reference, write_checkpoint

PROMPT = [29 * i % 199 for i in range(70)]
FULL, SLIDING = "full_attention", "sliding_attention"


def published(**changes: Any) -> dict[str, Any]:
    """`config.json` as of Laguna XS.2, with 8 layers."""
    return {
        "model_type": "laguna", "architectures": ["LagunaForCausalLM"], "attention_bias": False, "gating": "per-head",
        "head_dim": 128, "hidden_size": 2048, "intermediate_size": 8192, "layer_types": [FULL, *[SLIDING] * 3] * 2,
        "max_position_embeddings": 131072, "mlp_layer_types": ["dense"] + ["sparse"] * 7, "moe_intermediate_size": 512,
        "moe_routed_scaling_factor": 2.5, "moe_router_logit_softcapping": 0.0, "num_attention_heads": 48,
        "num_attention_heads_per_layer": [48, 64, 64, 64] * 2, "num_experts": 256, "num_experts_per_tok": 8,
        "num_hidden_layers": 8, "num_key_value_heads": 8, "rms_norm_eps": 1e-6,
        "rope_parameters": {
            FULL: {"rope_type": "yarn", "rope_theta": 500000.0, "factor": 32.0, "beta_fast": 64.0, "beta_slow": 1.0,
                   "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.5},
            SLIDING: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        },
        "shared_expert_intermediate_size": 512, "sliding_window": 512, "tie_word_embeddings": False,
        "vocab_size": 100352, **changes,
    }  # fmt: skip


def test_a_configuration_as_published() -> None:
    config = read_config(published())
    assert config.query_heads[:2] == (48, 64) and config.windows[:2] == (None, 512)
    assert [config.attended_in(layer) for layer in (0, 1)] == [48 * 128, 64 * 128]
    assert [config.gates_in(layer) for layer in (0, 1)] == [48, 64]
    assert [(rope.theta, rope.rotated, rope.kind) for rope in config.ropes[:2]] == [
        (5e5, 0.5, "yarn"),
        (1e4, 1.0, "default"),
    ]
    assert config.moe is not None and config.moe.layers == (False, *[True] * 7)
    assert (config.moe.scale, config.moe.scoring, config.moe.shared_ffn_size) == (2.5, "sigmoid", 512)
    check_layout(config, 16, 2)
    with pytest.raises(ConfigError, match=r"this model allows 1, 2, 4, 8, 16$"):
        check_layout(config, 32, 1)


def test_layers_that_are_alike_are_ordinary() -> None:
    config = read_config(published(num_attention_heads_per_layer=[32] * 8))
    assert (config.num_heads, config.query_heads, config.heads_differ) == (32, (), False)
    assert read_config(published(num_attention_heads_per_layer=None)).num_heads == 48


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads_per_layer": [48] * 7}, "a number for each of 8 layers"),
        ({"num_attention_heads_per_layer": [48, 60] * 4}, "60 heads over 8 KV heads"),
        ({"gating": False}, "gating is False"),
        ({"gating": "per-row"}, "gating is 'per-row'"),
        ({"moe_apply_router_weight_on_input": True}, "moe_apply_router_weight_on_input"),
        ({"rope_parameters": {FULL: {"rope_type": "default"}}}, "an object for sliding_attention"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "there must be no rope_scaling"),
        ({"sliding_window": None}, "no sliding window"),
        ({"hidden_act": "gelu"}, "hidden_act"),
    ],
    ids=str,
)
def test_configurations_that_cannot_be_run(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_config(published(**changes))


def test_layers_have_heads_and_gates_of_their_own(tmp_path: Path) -> None:
    engine: Any = make_engine(write_checkpoint("laguna", tmp_path))
    mixers = [layer.mixer for layer in engine.runner.decoder.layers]
    assert all(isinstance(mixer, OutputGatedAttention) and mixer.softplus for mixer in mixers)
    assert [mixer.heads.heads for mixer in mixers] == [4, 8, 8, 4]
    (kind,) = set(engine.runner.kv.shape.kinds)
    assert kind.kv_heads == 2, "the cache has the same for all layers"


@pytest.mark.parametrize("gates", [3, 12])
def test_a_gate_is_for_a_head_or_for_a_number(gates: int) -> None:
    x, gate = torch.randn(5, 12), torch.linspace(-30, 30, 5 * gates).view(5, gates)
    wanted = x * F.softplus(gate.double()).repeat_interleave(12 // gates, 1)
    torch.testing.assert_close(ReferenceOps().softplus_mul(x, gate).double(), wanted, rtol=1e-6, atol=0)


def test_the_cap_of_the_router_decides(tmp_path: Path) -> None:
    """Where it flattens scores so far that the corrections choose alone."""
    folder = write_checkpoint("laguna", tmp_path, moe_router_logit_softcapping=0.05)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("e_score_correction_bias"):
            tensors[name] = torch.linspace(0, 1, len(tensor))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    engine: Any = make_engine(folder)
    router = engine.runner.decoder.layers[1].feed_forward.routed.router
    weights, chosen = router(torch.randn(6, 64))
    assert chosen.tolist() == [[11, 10, 9]] * 6
    assert torch.allclose(weights, torch.full((6, 3), 1.7 / 3), atol=0.03), "nearly equal, times the factor"
    assert Reference(folder).agrees(PROMPT, generate(engine, greedy("a", PROMPT, 8))["a"])


def test_stages_and_shards_have_the_sites_of_the_whole_model() -> None:
    """In one order, though a stage may have no layer of a kind."""
    model = read_config(published())
    whole = layout_of(model)
    for rank in range(8):
        part = layout_of(local_config(model, Place(rank, 2, 4)))
        assert [site.attribute for site in part.sites] == [site.attribute for site in whole.sites]
        first = rank // 2 * 2
        for own, site in zip(part.sites, whole.sites, strict=True):
            assert own.layers is None or site.layers is None or own.layers == site.layers[first : first + 2]


def test_norms_of_heads_in_an_adapter_are_applied(tmp_path: Path) -> None:
    """All layers have heads of one size, so that adapters may replace their norms."""
    base = write_checkpoint("laguna", tmp_path / "base")
    adapter = write_adapter(tmp_path / "adapter", base, targets=("q_proj",), size=0.0, modules_to_save=["q_norm"])
    merged = write_checkpoint("laguna", tmp_path / "merged")
    gains = {}
    tensors = load_file(merged / "model.safetensors")
    for layer in range(4):
        name = f"model.layers.{layer}.self_attn.q_norm.weight"
        tensors[name] = gains[f"base_model.model.{name}"] = torch.rand(16) * 3
    save_file(tensors, merged / "model.safetensors", metadata={"format": "pt"})
    file = adapter / "adapter_model.safetensors"
    save_file(load_file(file) | gains, file)
    engine = make_engine(base, adapters=(AdapterSpec("tuned", str(adapter)),))
    got = generate(engine, ask("r", PROMPT, "tuned"))["r"]
    assert Reference(merged).agrees(PROMPT, got) and not Reference(base).agrees(PROMPT, got)


def test_a_gguf_file_that_says_every_how_many_layers_see_everything(tmp_path: Path) -> None:
    kinds = [FULL, SLIDING, SLIDING, SLIDING]
    folder = write_checkpoint("laguna", tmp_path, layer_types=kinds, moe_router_logit_softcapping=0.0)
    expected = generate(make_engine(folder), greedy("a", PROMPT, 8))
    file = convert(folder, "laguna", more={"attention.sliding_window_pattern": 4})
    assert generate(make_engine(file), greedy("a", PROMPT, 8)) == expected
    assert config_from_gguf(GGUFFile(file))["layer_types"] == kinds
    for key, value, message in (
        ("attention.head_count", [4, 8, 8, 6], "attn_gate of laguna files"),
        ("rope.dimension_count_swa", 20, "rope.dimension_count_swa is 20"),
        ("expert_gating_func", 1, "expert_gating_func is 1"),
    ):
        with pytest.raises(CheckpointError, match=message):
            config_from_gguf(GGUFFile(convert(folder, "laguna", more={key: value})))


@pytest.mark.parametrize(
    ("giving", "taking", "settings"),
    [
        ((2, 2), (1, 1), {}),
        pytest.param((1, 1), (4, 1), {}, marks=pytest.mark.slow),
        pytest.param((2, 1), (1, 2), {"kv_dtype": "int8"}, marks=pytest.mark.slow),
    ],
)
def test_blocks_cross_between_grids(giving: Any, taking: Any, settings: dict[str, Any], tmp_path: Path) -> None:
    check(write_checkpoint("laguna", tmp_path), giving, taking, **settings)
