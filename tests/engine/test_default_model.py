"""The default model on real text: the same greedy tokens as `transformers` in float32 from the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from transformers.initialization import no_init_weights

from penstock.engine.core import Engine
from penstock.engine.loading.checkpoint import open_checkpoint
from penstock.text import load_text
from tests.engine.harness import assert_idle, generate, greedy, make_engine

QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about rivers.",
    "def fibonacci(n):\n    # explain this function, then finish it\n",
    "List three prime numbers and say why they are prime. " * 12,
]
OUTPUT = 12


@pytest.fixture(scope="module")
def engine(default_model: Path) -> Engine:
    return make_engine(default_model, num_blocks=256, token_budget=128)


@pytest.fixture(scope="module")
def reference(default_model: Path) -> transformers.PreTrainedModel:
    checkpoint = open_checkpoint(default_model)
    config = transformers.LlamaConfig(**{k: v for k, v in checkpoint.config.items() if k != "model_type"})
    with no_init_weights():  # all of them are loaded
        model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.float32)
    model.load_state_dict({name: checkpoint.tensor(name) for name in checkpoint.names()}, strict=False)
    model.tie_weights()
    return model.eval()


@pytest.mark.slow
def test_greedy_tokens_equal_the_reference(
    engine: Engine, reference: transformers.PreTrainedModel, default_model: Path
) -> None:
    text = load_text(default_model)
    prompts = {q: text.encode_chat([{"role": "user", "content": q}]) for q in QUESTIONS}
    got = generate(engine, *(greedy(q, ids, OUTPUT) for q, ids in prompts.items()))
    for question, ids in prompts.items():
        with torch.inference_mode():
            # One pass over prompt and answer: every generated token must be the argmax of its position.
            logits = reference(torch.tensor([ids + got[question][:-1]])).logits[0, len(ids) - 1 :]
        assert got[question] == logits.argmax(-1).tolist(), question
    assert "Paris" in text.decode(got[QUESTIONS[0]])
    assert_idle(engine)
