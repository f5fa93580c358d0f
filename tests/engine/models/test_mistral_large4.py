"""Mistral Large 4: the default configuration, what is refused, latents of other layers and of two widths, and what is
stored under published names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from penstock.engine.kv.kinds import BothKinds, OfLayer, PagedLatent, PagedRows
from penstock.engine.models.families import is_linear, read_config
from penstock.engine.models.families.mistral_large4 import MISTRAL_LARGE4
from penstock.engine.parallel.layout import Place, check_layout, local_config
from penstock.engine.request import Request, SamplingParams
from penstock.errors import CheckpointError, ConfigError
from tests.engine.harness import assert_idle, drain, generate, greedy, make_engine
from tests.engine.models.test_transformers_handover import Grid, check
from tests.engine.quantization.layouts import write as write_layout
from tests.engine.tiny import COMMON, FAMILIES, Reference, write_checkpoint

FAMILY = "mistral-large4"
PROMPT = [(j * 31 + 7) % 199 for j in range(90)]
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(FAMILY, tmp_path_factory.mktemp("large4"))


def tiny(**changes: Any) -> dict[str, Any]:
    return {**COMMON, **FAMILIES[FAMILY][1], "model_type": "mistral_large4_text", **changes}


def test_the_default_configuration() -> None:
    given = transformers.MistralLarge4TextConfig().to_dict()
    config = read_config(json.loads(json.dumps(given)))
    latent, moe = config.latent, config.moe
    assert latent is not None and latent.index is not None and moe is not None
    assert config.num_layers == 72 and latent.index.layers == (True,) * 72 and not latent.sources
    assert [index for index in range(72) if latent.unrotated[index]] == list(range(3, 72, 4))
    assert (latent.cached_in(0), latent.plain_in(0), latent.cached_in(3), latent.plain_in(3)) == (576, 64, 512, 128)
    assert (config.rotary_dim(0), config.rotary_dim(3)) == (64, 0)
    assert (config.rope.kind, config.rope.factor, config.logit_softcap) == ("yarn", 2048.0, 30.0)
    assert (moe.scoring, moe.normalize, moe.layers) == ("softmax", True, (False, *(True,) * 71))
    check_layout(config, 8, 72)


def test_a_model_that_also_sees() -> None:
    given = json.loads(json.dumps(transformers.MistralLarge4Config().to_dict()))
    assert read_config(given) == read_config(given["text_config"])
    shared = read_config({"model_type": "mistral_large4", "text_config": tiny()})
    assert shared == read_config(tiny()) and shared.logit_softcap == 20.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_source_layers": [0, 1, 2, 3]}, "kv_source_layers must name a layer for each of 5"),
        ({"kv_source_layers": [0, 2, 2, 3, 4]}, "layer 1 attends to the latents of layer 2, which has none of its own"),
        ({"kv_source_layers": [0, 1, 0, 1, 3]}, "layer 4 attends to the latents of layer 3, which has none of its own"),
        ({"kv_source_layers": [0, 1, 2, 2, 4]}, "layer 3 attends to the latents of layer 2; supported: those of the"),
        ({"kv_source_layers": [0, 1, 2, 3, 1], "no_rope_layers": [1, 0, 1, 1, 1]}, "layer 4 attends to the latents"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers must be 1"),
        ({"indexer_types": ["shared"] + ["full"] * 4}, "the first layer must have an indexer"),
        ({"index_head_dim": 4}, "of which qk_rope_head_dim, 8, are rotated"),
        ({"layer_types": ["full_attention"] * 5}, "layer_types must be indexed_attention"),
        ({"final_logit_softcapping": 0.0}, "final_logit_softcapping is 0"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5: the chosen groups have fewer"),
        ({"num_key_value_heads": 2}, "num_key_value_heads must be num_attention_heads"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"sliding_window": 64}, "sliding_window is 64"),
    ],
    ids=str,
)
def test_configurations_that_cannot_be_run(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_config(tiny(**changes))


def test_layers_keep_latents_of_two_widths_or_those_of_others(folder: Path) -> None:
    engine = make_engine(folder, num_blocks=10)
    keys, kinds = PagedRows(12, 16, torch.float32), engine.runner.kv.shape.kinds
    wide, narrow = (PagedLatent(width, 16, torch.float32) for width in (40, 32))
    assert kinds == (
        BothKinds(wide, keys), BothKinds(narrow, keys), BothKinds(wide, keys), BothKinds(OfLayer(1), keys), OfLayer(1),
    )  # fmt: skip
    caches = engine.runner.kv.layers
    assert caches[3][0] is caches[1][0] is caches[4]
    assert caches[3][1] is not caches[1][1]


def test_stages_begin_where_no_later_layer_attends_to_latents_before() -> None:
    config = read_config(tiny())
    assert config.stage_starts == (True, True, False, False, False)
    check_layout(config, 4, 2)
    with pytest.raises(ConfigError, match="3 stages are more than the 2 layers with an indexer"):
        check_layout(config, 1, 3)
    second = local_config(config, Place(1, 1, 2)).latent
    assert second is not None and second.sources == (0, 1, 0, 0) and second.unrotated == (True, False, True, True)


def test_log_probabilities_are_the_references(folder: Path) -> None:
    """Of every token of a prompt in small chunks, and of those behind it; the head caps its logits."""
    engine = make_engine(folder, token_budget=23)
    engine.submit(Request("a", PROMPT, SamplingParams(max_tokens=8, temperature=0.0, prompt_logprobs=0, logprobs=0)))
    deltas = drain(engine)
    tokens = [token for delta in deltas for token in delta.tokens]
    of_prompt = [entry.logprob for delta in deltas for entry in delta.prompt_logprobs or () if entry is not None]
    found = of_prompt + [entry.logprob for delta in deltas for entry in delta.logprobs or ()]
    theirs = Reference(folder).logprobs(PROMPT + tokens)
    said = torch.tensor(PROMPT[1:] + tokens)
    torch.testing.assert_close(
        torch.tensor(found), theirs[: len(said)].gather(1, said.unsqueeze(1)).squeeze(1), atol=2e-3, rtol=0
    )


@pytest.mark.parametrize("family", [FAMILY, pytest.param("mistral-large4-own", marks=slow)])
def test_chunks_preemption_and_prefixes(family: str, tmp_path: Path) -> None:
    folder = write_checkpoint(family, tmp_path)
    reference = Reference(folder)
    prompts = {f"r{n}": [(n * 13 + j * 7) % 199 for j in range(n)] for n in (20, 61, 90, 133)}
    engine = make_engine(folder, token_budget=23, num_blocks=14, max_running=4)
    got = generate(engine, *(greedy(name, prompt, 16) for name, prompt in prompts.items()))
    for name, prompt in prompts.items():
        assert reference.agrees(prompt, got[name]), name
    assert engine.load_snapshot().preemptions > 0
    again = generate(engine, greedy("first", prompts["r61"], 16), greedy("second", prompts["r61"], 16))
    again |= generate(engine, greedy("third", prompts["r61"], 16))
    assert again == dict.fromkeys(("first", "second", "third"), got["r61"])
    assert engine.load_snapshot().prefix_hit_tokens > 0
    assert_idle(engine)


def test_names_of_published_files(folder: Path, tmp_path: Path) -> None:
    """Without the prefix that the library gives a decoder alone, beside what sees and the draft head."""
    renamed = {"model.embed_tokens.": "tok_embeddings.", "lm_head.": "output.", "model.rotary_emb.": "lerope."}
    renamed |= {"model.layers.": "layers.", "model.norm.": "norm.", ".o_proj.": ".wo.", ".gate_proj.": ".w1."}
    renamed |= {".down_proj.": ".w2.", ".up_proj.": ".w3."}
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for ours, published in renamed.items():
            name = name.replace(ours, published)
        tensors[name] = tensor
    assert {"layers.1.attention.wo.weight", "layers.1.experts.7.w2.weight", "lerope.alpha"} <= tensors.keys()
    tensors["vision_encoder.transformer.layers.0.attention.wq.weight"] = torch.zeros(8, 8)
    tensors["patch_merger.merging_layer.weight"] = torch.zeros(8, 8)
    tensors["mtp_dspark.layers.0.attention.wq.weight"] = torch.zeros(8, 8)
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral_large4", "text_config": config}))
    expected = generate(make_engine(folder), greedy("a", PROMPT, 8))
    assert generate(make_engine(tmp_path), greedy("a", PROMPT, 8)) == expected


def test_own_names_are_the_librarys() -> None:
    assert MISTRAL_LARGE4.own_name is not None
    for published, own in {
        "layers.3.attention.indexer.ssmax_scaling.s": "layers.3.self_attn.indexer.softmax_scaling.scale",
        "layers.3.attention.wq.weight_scale_inv": "layers.3.self_attn.q_proj.weight_scale_inv",
        "layers.3.gate.weight": "layers.3.mlp.gate.weight",
        "layers.3.shared_experts.w3.weight": "layers.3.mlp.shared_experts.up_proj.weight",
        "layers.0.feed_forward.w2.weight": "layers.0.mlp.down_proj.weight",
        "model.language_model.layers.0.mlp.gate_proj.weight": "model.language_model.layers.0.mlp.gate_proj.weight",
        "model.layers.2.mlp.experts.gate_up_proj": "model.layers.2.mlp.experts.gate_up_proj",
    }.items():
        assert MISTRAL_LARGE4.own_name(published) == own


def test_a_checkpoint_without_learned_frequencies_is_incomplete(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.rotary_emb.alpha"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"no tensor 'model\.rotary_emb\.alpha'"):
        make_engine(tmp_path)


@pytest.mark.parametrize(
    ("giving", "taking", "settings"),
    [
        ((2, 2), (1, 1), {}),
        pytest.param((1, 2), (2, 1), {"kv_dtype": "int8"}, marks=slow),
        pytest.param((1, 1), (2, 2), {"kv_dtype": "fp8"}, marks=slow),
    ],
)
def test_a_prompt_computed_on_one_grid_is_continued_on_another(
    folder: Path, giving: Grid, taking: Grid, settings: dict[str, Any]
) -> None:
    check(folder, giving, taking, **settings)


@slow
@pytest.mark.parametrize("layout", ["gptq", "awq", "packed", "fp8", "fp8-tiles"])
def test_checkpoints_in_few_bits(layout: str, tmp_path: Path) -> None:
    """Under published names."""
    assert MISTRAL_LARGE4.own_name is not None
    own_name, base = MISTRAL_LARGE4.own_name, write_checkpoint("mistral-large4-own", tmp_path / "base")
    few, same, _ = write_layout(base, layout, tmp_path, is_linear=lambda name: is_linear(own_name(name)))
    got = generate(make_engine(few, weights="dense"), greedy("a", PROMPT, 8))["a"]
    assert Reference(same).agrees(PROMPT, got, 1e-2)
