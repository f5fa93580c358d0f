"""Long contexts in chunks: the last token of a prompt of up to 128K attends to every token before it, exactly.

In a model of one layer, keys and values of a token follow from the token and its position alone, so the distribution
behind the last token can be computed in float64 without the work of all the others.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.engine.harness import assert_idle, drain, greedy, make_engine

DIM, BASE = 8, 1e6
BUDGET = 512


def write(folder: Path, positions: int) -> dict[str, Tensor]:
    """One layer with one head; its weights in float64."""
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=DIM, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=DIM, max_position_embeddings=positions, initializer_range=1.0,
        rope_parameters={"rope_type": "default", "rope_theta": BASE}, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    return {name.removeprefix("model.").removeprefix("layers.0."): p.double() for name, p in model.state_dict().items()}


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    frequencies = 1.0 / BASE ** (torch.arange(0, DIM, 2).float() / DIM)
    angles = (positions[:, None].float() * frequencies).double()  # rounded to float32, as these models are trained
    cos, sin = angles.cos(), angles.sin()
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def last_distribution(weights: dict[str, Tensor], ids: list[int]) -> Tensor:
    tokens, positions = torch.tensor(ids), torch.arange(len(ids))
    x = weights["embed_tokens.weight"][tokens]
    normed = norm(x, weights["input_layernorm.weight"])
    q, k, v = (normed @ weights[f"self_attn.{name}_proj.weight"].T for name in "qkv")
    scores = rotate(k, positions) @ rotate(q[-1:], positions[-1:])[0] * DIM**-0.5
    attended = torch.softmax(scores, 0) @ v
    hidden = x[-1] + attended @ weights["self_attn.o_proj.weight"].T
    normed = norm(hidden, weights["post_attention_layernorm.weight"])
    gate, up = (normed @ weights[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    hidden = hidden + (torch.nn.functional.silu(gate) * up) @ weights["mlp.down_proj.weight"].T
    return (norm(hidden, weights["norm.weight"]) @ weights["lm_head.weight"].T).log_softmax(-1)


@pytest.mark.parametrize(
    ("length", "kv_dtype", "limit"),
    [
        (9_000, "auto", 2e-3),
        (9_000, "int8", 0.15),
        pytest.param(131_072, "auto", 2e-2, marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
    ],
)
def test_the_last_token_sees_all_before_it(tmp_path: Path, length: int, kv_dtype: str, limit: float) -> None:
    weights = write(tmp_path, length)
    rng = random.Random(length)
    prompt = [rng.randrange(64) for _ in range(length - 2)]
    engine = make_engine(tmp_path, token_budget=BUDGET, max_running=2, kv_memory=64 << 20, kv_dtype=kv_dtype)
    assert engine.info.max_model_len == length
    engine.submit(greedy("a", prompt, 2, logprobs=0))
    deltas = drain(engine)
    assert engine.load_snapshot().steps == -(-len(prompt) // BUDGET) + 1, "a step computes at most a budget of tokens"
    output = [token for delta in deltas for token in delta.tokens]
    for count, delta in enumerate(deltas):
        assert delta.logprobs is not None
        expected = last_distribution(weights, prompt + output[:count])
        assert delta.logprobs[0].logprob == pytest.approx(float(expected[output[count]]), abs=limit)
        assert float(expected.max() - expected[output[count]]) < limit
    # A token in the middle of a million pairs matters: what the engine says depends on all of the context.
    other = last_distribution(weights, prompt[: length // 2])
    assert float((other - last_distribution(weights, prompt)).abs().max()) > 0.05
    assert_idle(engine)
