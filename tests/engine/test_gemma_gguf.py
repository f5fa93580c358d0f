"""Gemma 3 270M as people publish it (GGUF, K-quants) on real text: the greedy tokens of `transformers` in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from penstock.engine.loading.checkpoint import open_checkpoint
from penstock.errors import SourceError
from penstock.sources.resolve import resolve
from penstock.text import load_text
from tests.engine.harness import assert_idle, generate, greedy, make_engine

PROMPTS = [
    "The capital of France is",
    "Here is a list of planets of the solar system, from the Sun outwards: Mercury, Venus,",
    # Longer than the sliding window of 512, so that local and global layers see different things.
    "A river does not ask where the sea is; it goes down, and the sea is there. " * 34 + "The moral of this story is",
]
OUTPUT = 16


@pytest.fixture(scope="module")
def model() -> Path:
    try:
        return resolve("gemma3-270m")
    except SourceError as error:
        pytest.skip(f"GEMMA 3 NOT TESTED, it cannot be fetched here: {error}")


@pytest.mark.slow
def test_greedy_tokens_equal_the_reference(model: Path) -> None:
    text = load_text(model)
    prompts = {prompt[:20]: text.encode(prompt) for prompt in PROMPTS}
    assert all(ids[0] == text.token_id("<bos>") for ids in prompts.values()) and len(prompts[PROMPTS[2][:20]]) > 512
    engine = make_engine(model, num_blocks=256, token_budget=256, weights="dense")
    got = generate(engine, *(greedy(name, ids, OUTPUT) for name, ids in prompts.items()))
    assert_idle(engine)
    assert "city in France" in text.decode(got[PROMPTS[0][:20]])
    assert "Earth, Mars, Jupiter" in text.decode(got[PROMPTS[1][:20]])
    del engine

    checkpoint = open_checkpoint(model)
    config = transformers.Gemma3TextConfig(**{k: v for k, v in checkpoint.config.items() if k != "model_type"})
    reference = transformers.Gemma3ForCausalLM._from_config(config, dtype=torch.float32).eval()
    reference.load_state_dict({name: checkpoint.tensor(name) for name in checkpoint.names()}, strict=False)
    reference.tie_weights()
    for name, ids in prompts.items():
        with torch.inference_mode():
            hidden = reference.model(torch.tensor([ids + got[name][:-1]])).last_hidden_state[0, len(ids) - 1 :]
            expected = reference.lm_head(hidden).argmax(-1).tolist()
        assert got[name] == expected, name
