"""Gates of feed-forwards bounded behind the SiLU, and gates of one number for each head (Step 3.5), on CUDA: alone,
with adapters' part of a row beside the model's own, in FP8, in the kernels of experts; and small engines."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import torch
from attention_cases import DTYPES
from gpu_harness import DEVICE, MODE, QUICK, TOLERANCE, check, poisoned_outputs, rand
from state_cases import SameEverywhere
from test_triton_moe import wide
from torch import Tensor
from torch.nn import functional as F

from penstock.engine.backends.cuda.experts import group, with_shared
from penstock.engine.backends.cuda.kernels import activation
from penstock.engine.backends.cuda.kernels.addends import Addends
from penstock.engine.backends.cuda.linear import CudaLinear
from penstock.engine.backends.cuda.ops import TritonOps
from penstock.engine.backends.cuda.warmup import _form_of
from penstock.engine.backends.interface import Activation, BoundedSilu
from penstock.engine.config import EngineConfig
from penstock.engine.core import Engine
from penstock.engine.models.layers.experts import ExpertMlp, ExpertSource, Router
from penstock.engine.models.layers.feed_forward import GatedMlp
from tests.engine.harness import generate, greedy

LIMIT = 1.5
ops = TritonOps(DEVICE)


def bounded64(gate_up: Tensor, limit: float = LIMIT) -> Tensor:
    gate, up = gate_up.double().chunk(2, -1)
    return F.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)


def test_bounds_stand_behind_the_silu() -> None:
    for dtype, tokens in product(DTYPES, (1, 5)):
        gate_up, more = (rand(tokens, 2 * 96, dtype=dtype, scale=4) for _ in range(2))
        ranks = (torch.arange(tokens, device=DEVICE) % 3).int()
        both = gate_up + torch.where(ranks.unsqueeze(1) > 0, more, 0)
        with poisoned_outputs():
            alone = ops.bounded_silu(gate_up, LIMIT)
            beside = ops.bounded_silu(Addends(gate_up.clone(), more, ranks), LIMIT)
            data, scale = activation.bounded_silu_fp8(gate_up, LIMIT)
        if MODE == "compile":
            continue
        check(f"{dtype}", alone, bounded64(gate_up), TOLERANCE[dtype])
        check(f"{dtype} with adapters", beside, bounded64(both), TOLERANCE[dtype])
        check(f"{dtype} in FP8", data.double() * scale.double(), bounded64(gate_up), 4e-2)


def test_a_gate_is_for_all_of_a_head() -> None:
    for (heads, dim), tokens, dtype in product([(3, 8)] if QUICK else [(64, 128), (96, 128), (3, 8)], (1, 5), DTYPES):
        x, gate, more = (rand(tokens, width, dtype=dtype, scale=3) for width in (heads * dim, heads, heads))
        ranks = (torch.arange(tokens, device=DEVICE) % 3).int()
        both = gate + torch.where(ranks.unsqueeze(1) > 0, more, 0)
        got = [ops.sigmoid_mul(x, gate), ops.sigmoid_mul(x, Addends(gate.clone(), more, ranks))]
        if MODE == "compile":
            continue
        for name, found, numbers in zip(("alone", "with adapters"), got, (gate, both), strict=True):
            wanted = x.double() * numbers.double().sigmoid().repeat_interleave(dim, 1)
            assert found.dtype == dtype and found.is_contiguous()
            check(f"{name} {heads} x {dim}", found, wanted, TOLERANCE[dtype])


def mlp(hidden: int, ffn: int, dtype: torch.dtype, gate: Activation) -> GatedMlp:
    sizes = (2 * ffn, hidden), (hidden, ffn)
    linears = (CudaLinear(rand(*size, dtype=dtype, scale=3 * size[1] ** -0.5), None) for size in sizes)
    return GatedMlp(ops, gate, *linears)


def mlp64(one: GatedMlp, x: Tensor, limit: float) -> Tensor:
    up: Any = one.gate_up
    down: Any = one.down
    return bounded64(x.double() @ wide(up).t(), limit) @ wide(down).t()


def test_experts_and_the_shared_one_have_bounds_of_their_own() -> None:
    """Few tokens and many."""
    experts, top_k, hidden, ffn = (4, 2, 32, 24) if QUICK else (16, 3, 320, 200)
    limits = ((0.7, 1.6),) if QUICK else ((0.7, 1.6), (0.7, 0.0), (0.0, 1.6), (0.7, 0.7))
    for dtype, (of_experts, of_shared) in product(DTYPES[:1] if QUICK else DTYPES, limits):
        gates = tuple(BoundedSilu(limit) if limit else "silu" for limit in (of_experts, of_shared))
        mlps = [mlp(hidden, ffn, dtype, gates[0]) for _ in range(experts)]
        router = Router(CudaLinear(rand(experts, hidden, dtype=dtype), None), top_k, True, "sigmoid", scale=1.7)
        grouped = group(ExpertMlp(ops, router, mlps, ExpertSource(mlps.__getitem__, lambda _: None)))
        assert grouped is not None
        shared = mlp(hidden, 40 if QUICK else 80, dtype, gates[1])
        both = with_shared(grouped, shared, None)
        for tokens in (1, 20) if QUICK else (1, 16, 17, 300):
            x = rand(tokens, hidden, dtype=dtype)
            with poisoned_outputs():
                got = both.forward(x)
            if MODE == "compile":
                continue
            weights, chosen = grouped.choose(x)
            want = mlp64(shared, x, of_shared or 1e9)
            for token in range(tokens):
                for weight, expert in zip(weights[token].double(), chosen[token].tolist(), strict=True):
                    want[token] += weight * mlp64(mlps[expert], x[token : token + 1], of_experts or 1e9)[0]
            check(f"{tokens} tokens {dtype} {gates}", got, want, {torch.float32: 1e-4}.get(dtype, 3e-2))


def test_layers_with_other_bounds_are_compiled_too() -> None:
    """Bounds are compiled in: layers that differ in nothing else launch kernels of their own."""
    gates: tuple[Activation, ...] = "silu", BoundedSilu(0.7), BoundedSilu(1.6)
    forms = set()
    for of_experts, of_shared in product(gates, repeat=2):
        mlps = [mlp(32, 24, torch.float32, of_experts) for _ in range(2)]
        router = Router(CudaLinear(rand(2, 32), None), 1, True, "sigmoid")
        grouped = group(ExpertMlp(ops, router, mlps, ExpertSource(mlps.__getitem__, lambda _: None)))
        assert grouped is not None
        forms.add(_form_of(with_shared(grouped, mlp(32, 40, torch.float32, of_shared), None)))
    assert len(forms) == 9
    assert len({_form_of(mlp(32, 40, torch.float32, gate)) for gate in gates}) == 3


def test_engines_equal_the_cpu() -> None:
    """With CUDA graphs, query heads by layer, windows and bounds."""
    if MODE != "device":
        return
    config = {
        "model_type": "step3p5", "vocab_size": 199, "hidden_size": 64, "intermediate_size": 96, "head_dim": 32,
        "num_attention_heads": 4, "num_attention_groups": 2, "attention_other_setting": {"num_attention_heads": 6},
        "num_hidden_layers": 3, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "sliding_window": 40, "max_position_embeddings": 1024, "moe_num_experts": 12, "moe_top_k": 3,
        "moe_intermediate_size": 48, "share_expert_dim": 64, "moe_layers_enum": "1,2",
        "moe_router_scaling_factor": 1.7, "rope_theta": [5e4, 1e4, 1e4], "partial_rotary_factors": [0.5, 1.0, 1.0],
        "swiglu_limits": [0.0, 0.0, 0.5], "swiglu_limits_shared": [0.3, 0.0, 0.7],
    }  # fmt: skip
    chance = random.Random(5)
    prompts = {f"r{n}": [chance.randrange(199) for _ in range(n)] for n in (1, 17, 130, 300)}
    weights = SameEverywhere(config, seed=3, dtype=torch.float32, embedding_scale=1.0)

    def engine(device: str) -> Engine:
        settings = EngineConfig(model="step", device=device, dtype="float32", max_running=8)
        return Engine.load(settings, checkpoint=weights)

    alone = engine("cpu")
    expected = {name: generate(alone, greedy(name, prompt, 30))[name] for name, prompt in prompts.items()}
    here = engine("cuda")
    for turn in range(2):
        got = generate(here, *(greedy(f"{name}-{turn}", prompt, 30) for name, prompt in prompts.items()))
        for name, tokens in expected.items():
            assert got[f"{name}-{turn}"] == tokens, (name, turn)
    here.check_idle()
    here.close()
