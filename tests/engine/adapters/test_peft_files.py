"""Adapters as peft itself writes them, against what peft computes with them. Needs peft, which is not among the test
requirements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
    "dora and biases": {"use_dora": True, "bias": "all"},
    "biases": {"bias": "all"},
    "biases of targets": {"bias": "lora_only"},
    "biases of B": {"lora_bias": True},
    "norms": {"modules_to_save": ["input_layernorm", "post_attention_layernorm", "norm"]},
    "norms and more": {"modules_to_save": ["input_layernorm", "lm_head"], "use_dora": True},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "pissa": ({"init_lora_weights": "pissa"}, "init_lora_weights"),
    "olora": ({"init_lora_weights": "olora"}, "init_lora_weights"),
    "linears": ({"modules_to_save": ["mlp"]}, "mlp"),
}


def write(folder: Path, base: Path, *, resized: int | None = None, **config: Any) -> Any:
    """An adapter whose matrices are all changed, as if trained; the model that has it."""
    peft = parts.library("peft")
    from transformers import AutoModelForCausalLM

    torch.manual_seed(len(folder.name))
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if resized is not None:
        model.resize_token_embeddings(resized)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": LINEARS, "task_type": "CAUSAL_LM", **config}
    adapted = peft.get_peft_model(model, peft.LoraConfig(**settings))
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
def test_what_cannot_be_applied_is_refused(tmp_path: Path) -> None:
    base = write_checkpoint("llama-gqa", tmp_path / "base")
    from tests.engine.adapters.test_end_rows import failure

    for name, (settings, words) in REFUSED.items():
        write(tmp_path / name, base, **settings)
        assert words in failure(base, tmp_path / name), name
