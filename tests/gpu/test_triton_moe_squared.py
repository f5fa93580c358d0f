"""Experts without a gate, whose activation is the square of a ReLU (Nemotron-H), against float64; and small engines."""

from __future__ import annotations

import random
from typing import Any

import torch
from gpu_harness import DEVICE, MODE, QUICK, check, check_equal, poisoned_outputs, rand
from state_cases import SameEverywhere
from test_triton_moe import wide
from torch import Tensor

from penstock.engine.backends.cuda.experts import FusedSharedAndRouted, GroupedExpertMlp, group, with_shared
from penstock.engine.backends.cuda.linear import CudaLinear
from penstock.engine.backends.cuda.ops import TritonOps
from penstock.engine.backends.interface import FP8
from penstock.engine.config import EngineConfig
from penstock.engine.core import Engine
from penstock.engine.models.layers.experts import ExpertMlp, ExpertSource, Router
from penstock.engine.models.layers.feed_forward import GatedMlp
from tests.engine.harness import generate, greedy

BF16 = torch.bfloat16
ops = TritonOps(DEVICE)


def squared(hidden: int, ffn: int, dtype: torch.dtype) -> GatedMlp:
    def linear(out: int, inputs: int) -> CudaLinear:
        weight = rand(out, inputs, dtype=BF16 if dtype == FP8 else dtype, scale=inputs**-0.5)
        if MODE == "compile":
            return CudaLinear(weight.to(dtype), None, torch.empty(out) if dtype == FP8 else None)
        return CudaLinear.fp8(weight, None) if dtype == FP8 else CudaLinear(weight, None)

    return GatedMlp(ops, "relu2", linear(ffn, hidden), linear(hidden, ffn))


def squared_moe(experts: int, top_k: int, hidden: int, ffn: int, dtype: torch.dtype) -> GroupedExpertMlp:
    mlps = [squared(hidden, ffn, dtype) for _ in range(experts)]
    router = CudaLinear(rand(experts, hidden, dtype=BF16 if dtype == FP8 else dtype, scale=3 * hidden**-0.5), None)
    choice = Router(router, top_k, True, "sigmoid", scale=1.7)
    grouped = group(ExpertMlp(ops, choice, mlps, ExpertSource(mlps.__getitem__, lambda _: None)))
    assert grouped is not None
    return grouped


def squared64(mlp: GatedMlp, x: Tensor) -> Tensor:
    up: Any = mlp.gate_up
    down: Any = mlp.down
    return (x.double() @ wide(up).t()).relu().square() @ wide(down).t()


def test_experts_without_a_gate_equal_one_pair_at_a_time() -> None:
    """Few tokens and many, alone and with a shared expert in the same launches."""
    for dtype in (torch.float32, BF16, FP8):
        experts, top_k, hidden, ffn = (6, 2, 64, 48) if QUICK else (16, 3, 320, 200)
        grouped = squared_moe(experts, top_k, hidden, ffn, dtype)
        shared = squared(hidden, 80, dtype)
        both = with_shared(grouped, shared, None)
        assert isinstance(both, FusedSharedAndRouted) and both.joined
        for tokens in (1, 3, 20) if QUICK else (1, 16, 17, 300):
            x = rand(tokens, hidden, dtype=BF16 if dtype == FP8 else dtype)
            with poisoned_outputs():
                got, together = grouped.forward(x), both.forward(x)
            if MODE == "compile":
                continue
            weights, chosen = grouped.choose(x)
            want = torch.zeros_like(x, dtype=torch.float64)
            for token in range(tokens):
                for weight, expert in zip(weights[token].double(), chosen[token].tolist(), strict=True):
                    want[token] += weight * squared64(grouped.source.make(expert), x[token : token + 1])[0]
            near = {torch.float32: 1e-4, BF16: 3e-2, FP8: 4e-2}[dtype]  # a square doubles relative errors
            check(f"{tokens} tokens {dtype}", got, want, near)
            check(f"{tokens} tokens {dtype}, shared", together, want + squared64(shared, x), near)
            check_equal("counters", grouped.counters, torch.zeros_like(grouped.counters))


def test_engines_with_experts_without_a_gate_equal_the_cpu() -> None:
    """Nemotron-H with experts, with and without fewer numbers between the tokens and them, with CUDA graphs."""
    if MODE != "device":
        return
    config = {
        "model_type": "nemotron_h", "vocab_size": 199, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "mamba_num_heads": 8,
        "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 24, "conv_kernel": 3, "n_routed_experts": 12,
        "num_experts_per_tok": 3, "moe_intermediate_size": 48, "moe_shared_expert_intermediate_size": 64,
        "hybrid_override_pattern": "MEM*E-", "routed_scaling_factor": 1.5,
    }  # fmt: skip
    chance = random.Random(5)
    prompts = {f"r{n}": [chance.randrange(199) for _ in range(n)] for n in (1, 17, 130, 300)}
    for changes in ({}, {"moe_latent_size": 32, "n_group": 4, "topk_group": 2}):
        weights = SameEverywhere({**config, **changes}, seed=3, dtype=torch.float32, embedding_scale=1.0)

        def engine(device: str, weights: Any = weights) -> Engine:
            settings = EngineConfig(model="experts", device=device, dtype="float32", state_interval=32, max_running=8)
            return Engine.load(settings, checkpoint=weights)

        alone = engine("cpu")
        expected = {name: generate(alone, greedy(name, prompt, 30))[name] for name, prompt in prompts.items()}
        here = engine("cuda")
        for turn in range(2):
            got = generate(here, *(greedy(f"{name}-{turn}", prompt, 30) for name, prompt in prompts.items()))
            for name, tokens in expected.items():
                assert got[f"{name}-{turn}"] == tokens, (changes, name, turn)
        here.check_idle()
        here.close()
