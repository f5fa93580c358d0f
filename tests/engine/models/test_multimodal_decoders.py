"""The text decoder of a model that also takes images: its tokens are those of the reference for text alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.engine.harness import generate, greedy, make_engine
from tests.engine.tiny import COMMON, FAMILIES, Reference, write_checkpoint

VISION = {
    "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "image_size": 28, "patch_size": 14, "head_dim": 16,
}  # fmt: skip
PROMPT = [29 * i % 199 for i in range(70)]


@pytest.mark.parametrize("text", ["mistral-window", "ministral3"])
def test_mistral3(text: str, tmp_path: Path) -> None:
    name, changes = FAMILIES[text]
    kind = getattr(transformers, name).model_type
    decoder: dict[str, Any] = {**COMMON, **changes, "model_type": kind}
    config = transformers.Mistral3Config(
        text_config=decoder, vision_config=VISION, image_token_index=198, tie_word_embeddings=False
    )
    torch.manual_seed(0)
    model = transformers.Mistral3ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    got = generate(make_engine(tmp_path), greedy("a", PROMPT, 12))["a"]
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT + got[:-1]])).logits[0, len(PROMPT) - 1 :]
    assert logits.argmax(-1).tolist() == got


@pytest.mark.parametrize("inner", ["deepseek_v3", "kimi_k2"])
def test_kimi_k25(inner: str, tmp_path: Path) -> None:
    """Its text part is DeepSeek V3 under other names. (The reference writes none of the names that it reads.)"""
    text = write_checkpoint("deepseek-v3", tmp_path / "text")
    folder = tmp_path / "whole"
    folder.mkdir()
    tensors = load_file(text / "model.safetensors")
    save_file({f"language_model.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    decoder = {**json.loads((text / "config.json").read_text()), "model_type": inner}
    config = {"model_type": "kimi_k25", "text_config": decoder, "vision_config": {"hidden_size": 32}}
    (folder / "config.json").write_text(json.dumps({**config, "media_placeholder_token_id": 198}))
    got = generate(make_engine(folder), greedy("a", PROMPT, 12))["a"]
    assert Reference(text).agrees(PROMPT, got)
