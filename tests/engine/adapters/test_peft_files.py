"""Adapters as peft itself writes them, against what peft computes with them. Needs peft, which is not among the test
requirements."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from penstock.engine.adapters.spec import AdapterSpec
from tests import parts
from tests.engine.adapters.test_equals_merging import TIE, ask, prompts
from tests.engine.harness import generate, make_engine
from tests.engine.tiny import Reference, write_checkpoint

LINEARS = ["q_proj", "down_proj"]
CASES: dict[str, dict[str, Any]] = {
    "saved": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "saved embedding": {"modules_to_save": ["embed_tokens"]},
    "saved head below its adapter": {
        "modules_to_save": ["embed_tokens"],
        "target_modules": [*LINEARS, "lm_head"],
    },
    "tokens": {"trainable_token_indices": [7, 3, 150]},
    "tokens of both": {"trainable_token_indices": {"embed_tokens": [7, 3], "lm_head": [3, 9, 11]}},
    "tokens of both alike": {"trainable_token_indices": {"embed_tokens": [7, 3], "lm_head": [7, 3]}},
    "tied": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "fewer tokens": {"modules_to_save": ["embed_tokens", "lm_head"], "resized": 150},
    "more tokens": {"modules_to_save": ["embed_tokens", "lm_head"], "resized": 207},
    "more tokens, nothing saved": {"resized": 207},
    "more tokens, their rows": {"trainable_token_indices": [200, 199, 206], "resized": 207},
    "more tokens with adapters": {"target_modules": [*LINEARS, "embed_tokens", "lm_head"], "resized": 207},
    "fewer tokens, nothing saved": {"resized": 150},
    "ends": {"target_modules": [*LINEARS, "embed_tokens", "lm_head"]},
    "all linears": {"target_modules": "all-linear"},
    "patterns": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"down_proj": 3}, "use_rslora": True},
    "some layers": {"layers_to_transform": [1], "layers_pattern": "layers"},
    "a pattern": {"target_modules": r".*\.[01]\.self_attn\.(q|v)_proj"},
    "exclusions": {"exclude_modules": ["k_proj"], "target_modules": "all-linear"},
    "exclusions by a pattern": {"exclude_modules": r".*\.[kv]_proj", "target_modules": "all-linear"},
    "patterns of layers": {"rank_pattern": {r".*\.1\.self_attn\.q_proj": 2}, "alpha_pattern": {"1.mlp.down_proj": 3}},
    "root of the rank": {"use_rslora": True, "lora_alpha": 5, "layers_to_transform": 0},
    "initialized": {"init_lora_weights": "orthogonal"},
    "dora": {"use_dora": True},
    "dora of all linears": {"use_dora": True, "target_modules": "all-linear", "use_rslora": True},
    "dora of ends": {"use_dora": True, "target_modules": [*LINEARS, "embed_tokens", "lm_head"]},
    "dora of tied ends": {
        "use_dora": True,
        "target_modules": [*LINEARS, "embed_tokens", "lm_head"],
        "ensure_weight_tying": True,
    },
    "dora and biases": {"use_dora": True, "bias": "all"},
    "biases": {"bias": "all"},
    "biases of targets": {"bias": "lora_only"},
    "biases of B": {"lora_bias": True},
    "norms": {"modules_to_save": ["input_layernorm", "post_attention_layernorm", "norm"]},
    "norms and more": {"modules_to_save": ["input_layernorm", "lm_head"], "use_dora": True},
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "adalora": ("AdaLoraConfig", {"init_r": 6, "total_step": 10, "lora_alpha": 8}),
    "vera": ("VeraConfig", {"r": 8}),
    "vera drawn": ("VeraConfig", {"r": 8, "save_projection": False, "projection_prng_key": 7}),
    "loha": (
        "LoHaConfig",
        {"r": 3, "alpha": 5, "target_modules": [*LINEARS, "lm_head"], "rank_pattern": {"q_proj": 2}},
    ),
    "lokr": ("LoKrConfig", {"r": 2, "alpha": 5}),
    "lokr in pieces": ("LoKrConfig", {"r": 1, "decompose_both": True, "decompose_factor": 4}),
    "lokr whole": ("LoKrConfig", {"r": 64, "target_modules": ["v_proj"]}),
    "miss": ("MissConfig", {"r": 6}),
    "miss mini": ("MissConfig", {"r": 4, "init_weights": "mini", "mini_r": 8}),
    "delora": ("DeloraConfig", {"r": 4}),
    "vblora": ("VBLoRAConfig", {"r": 2, "num_vectors": 12, "vector_length": 16}),
    "vblora by the best": (
        "VBLoRAConfig",
        {"r": 2, "num_vectors": 12, "vector_length": 16, "topk": 3, "save_only_topk_weights": True},
    ),
    "ia3": ("IA3Config", {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "ia3 of all": (
        "IA3Config",
        {
            "target_modules": ["q_proj", "up_proj", "o_proj", "down_proj", "lm_head"],
            "feedforward_modules": ["down_proj"],
        },
    ),
    "ia3 of inputs": (
        "IA3Config",
        {"target_modules": ["q_proj", "o_proj"], "feedforward_modules": ["q_proj", "o_proj"]},
    ),
    "oft": ("OFTConfig", {"oft_block_size": 8}),
    "oft by blocks": ("OFTConfig", {"r": 4, "oft_block_size": 0, "use_cayley_neumann": False}),
    "oft bound": ("OFTConfig", {"oft_block_size": 16, "block_share": True, "coft": True, "eps": 0.5}),
    "boft": ("BOFTConfig", {"boft_block_size": 8}),
    "boft by blocks": ("BOFTConfig", {"boft_block_size": 0, "boft_block_num": 4, "bias": "boft_only"}),
    "beft": ("BeftConfig", {"target_modules": ["v_proj", "o_proj", "lm_head"]}),
    "ln tuning": ("LNTuningConfig", {"target_modules": ["input_layernorm", "post_attention_layernorm"]}),
    "trainable tokens": ("TrainableTokensConfig", {"token_indices": [7, 3, 150], "target_modules": None}),
    "modules to save": ("LoHaConfig", {"r": 2, "modules_to_save": ["norm"]}),
}
"""Kinds other than LoRA: peft's class, and its settings."""
LEARNED_INPUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "prompt tuning": ("PromptTuningConfig", {"num_virtual_tokens": 6}),
    "p-tuning": ("PromptEncoderConfig", {"num_virtual_tokens": 18, "encoder_hidden_size": 24}),
    "p-tuning by lstm": (
        "PromptEncoderConfig",
        {"num_virtual_tokens": 4, "encoder_hidden_size": 16, "encoder_reparameterization_type": "LSTM"},
    ),
    "prefix tuning": ("PrefixTuningConfig", {"num_virtual_tokens": 5}),
    "prefix tuning by a projection": (
        "PrefixTuningConfig",
        {"num_virtual_tokens": 17, "prefix_projection": True, "encoder_hidden_size": 24},
    ),
    "cartridge": ("CartridgeConfig", {"num_virtual_tokens": 6}),
    "cpt": ("CPTConfig", {"cpt_token_ids": [5, 7, 9], "cpt_tokens_type_mask": [1, 2, 3], "cpt_mask": [1, 1, 1]}),
}
"""Kinds that have no target modules."""
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "pissa": ({"init_lora_weights": "pissa"}, "init_lora_weights"),
    "olora": ({"init_lora_weights": "olora"}, "init_lora_weights"),
    "linears": ({"modules_to_save": ["mlp"]}, "mlp"),
}


def write(folder: Path, base: Path, *, resized: int | None = None, kind: str = "LoraConfig", **config: Any) -> Any:
    """An adapter whose matrices are all changed, as if trained; the model that has it. `kind`: peft's class."""
    peft = parts.library("peft")
    from transformers import AutoModelForCausalLM

    torch.manual_seed(len(folder.name))
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if resized is not None:
        model.resize_token_embeddings(resized)
    settings = {"target_modules": LINEARS, "task_type": "CAUSAL_LM", **config}
    if kind == "LoraConfig":
        settings = {"r": 4, "lora_alpha": 8, **settings}
    if kind in {each for each, _ in LEARNED_INPUTS.values()}:
        del settings["target_modules"]
    with patch.dict(os.environ):  # BOFT looks for a compiler and sets `CXX`
        adapted = peft.get_peft_model(model, getattr(peft, kind)(**settings))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter += torch.randn_like(parameter) * 0.2
    adapted.save_pretrained(folder)
    return adapted.eval()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama-gqa", "llama-mqa-tied", "gemma2"])
def test_what_peft_writes_gives_what_peft_computes(tmp_path: Path, family: str) -> None:
    base = write_checkpoint(family, tmp_path / "base")
    plain, models = Reference(base), {}
    for name, settings in CASES.items():
        models[name.replace(" ", "-").replace(",", "")] = write(tmp_path / name.replace(",", ""), base, **settings)
    specs = tuple(AdapterSpec(name, str(tmp_path / name.replace("-", " "))) for name in models)
    engine = make_engine(base, adapters=specs, num_blocks=80)
    for name, model in models.items():
        plain.model = model
        vocabulary = model.get_input_embeddings().weight.shape[0]
        for i, prompt in enumerate(prompts(2)):
            prompt = [token % vocabulary for token in prompt]
            got = generate(engine, ask(f"{name} {i}", prompt, name))[f"{name} {i}"]
            assert plain.agrees(prompt, got, TIE), (name, plain.margins(prompt, got))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama-gqa", "llama-mqa-tied", "qwen2-bias"])
def test_other_kinds_that_peft_writes_give_what_peft_computes(tmp_path: Path, family: str) -> None:
    base = write_checkpoint(family, tmp_path / "base")
    plain, unchanged = Reference(base), Reference(base)
    models = {
        name.replace(" ", "-"): write(tmp_path / name, base, kind=kind, **settings)
        for name, (kind, settings) in KINDS.items()
    }
    specs = tuple(AdapterSpec(name, str(tmp_path / name.replace("-", " "))) for name in models)
    engine = make_engine(base, adapters=specs, num_blocks=80)
    same = 0
    for name, model in models.items():
        plain.model = model
        for i, prompt in enumerate(prompts(2)):
            prompt = [*prompt, 7, 3]
            got = generate(engine, ask(f"{name} {i}", prompt, name))[f"{name} {i}"]
            assert plain.agrees(prompt, got, TIE), (name, plain.margins(prompt, got))
            same += unchanged.agrees(prompt, got, TIE)
    assert same <= 6, "the adapters make no difference"


@pytest.mark.slow
def test_a_butterfly_is_what_peft_makes_of_its_factors() -> None:
    """PEFT has more than one only with an extension for CUDA; what it does then is computed here with its functions."""
    parts.library("peft")
    from peft.tuners.boft.layer import BOFTLayer

    from tests.engine.adapters.kind_files import Noise, butterfly

    for factors, count, size in ((1, 4, 6), (2, 8, 4), (3, 16, 4), (3, 8, 6)):
        stored, inputs = Noise(factors)(factors, count, size, size), count * size
        expected = torch.eye(inputs)
        for number in range(factors):
            order = BOFTLayer.block_butterfly_perm(None, inputs, count // 2**number, size // 2, factors - 1)
            permutation = BOFTLayer.perm2mat(None, order)
            turns = torch.block_diag(*BOFTLayer.cayley_batch(None, stored[number]))
            expected = permutation @ (turns @ permutation.t()) @ expected
        torch.testing.assert_close(butterfly(stored), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama-gqa", "gemma2", "granite"])
def test_learned_inputs_that_peft_writes_give_what_peft_computes(tmp_path: Path, family: str) -> None:
    base = write_checkpoint(family, tmp_path / "base")
    models = {
        name.replace(" ", "-"): write(tmp_path / name, base, kind=kind, **settings)
        for name, (kind, settings) in LEARNED_INPUTS.items()
    }
    folders = {name: tmp_path / old for name, old in zip(models, LEARNED_INPUTS, strict=True)}
    engine = make_engine(base, adapters=tuple(AdapterSpec(name, str(folders[name])) for name in models), num_blocks=80)
    unchanged, same = Reference(base), 0
    for name, model in models.items():
        for i, prompt in enumerate(prompts(2)):
            got = generate(engine, ask(f"{name} {i}", prompt, name))[f"{name} {i}"]
            with torch.inference_mode():
                logits = model(torch.tensor([prompt + got[:-1]])).logits[0, -len(got) :]
            short = logits.amax(-1) - logits.gather(1, torch.tensor(got).unsqueeze(1)).squeeze(1)
            assert float(short.max()) <= TIE, (name, short)
            same += unchanged.agrees(prompt, got, TIE)
    assert same < 2 * len(models), "the adapters make no difference"


@pytest.mark.slow
def test_what_cannot_be_applied_is_refused(tmp_path: Path) -> None:
    base = write_checkpoint("llama-gqa", tmp_path / "base")
    from tests.engine.adapters.test_end_rows import failure

    for name, (settings, words) in REFUSED.items():
        write(tmp_path / name, base, **settings)
        assert words in failure(base, tmp_path / name), name
