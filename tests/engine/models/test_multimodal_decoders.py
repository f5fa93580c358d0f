"""The text decoder of a model that also takes images: its tokens are those of the reference for text alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.engine.harness import generate, greedy, make_engine
from tests.engine.tiny import COMMON, FAMILIES

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
