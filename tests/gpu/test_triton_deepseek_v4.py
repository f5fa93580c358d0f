"""DeepSeek V4 on CUDA: its experts in the kernels of others, with a gate and a choice of their own, and the whole
family against the CPU."""

from __future__ import annotations

import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from gpu_harness import DEVICE, MODE, QUICK, check, integers, poisoned_outputs, rand
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from penstock.engine.backends.cuda.experts import group, with_shared  # noqa: E402
from penstock.engine.backends.cuda.linear import CudaLinear  # noqa: E402
from penstock.engine.backends.cuda.mxfp4_linear import Mxfp4Linear  # noqa: E402
from penstock.engine.backends.cuda.ops import TritonOps  # noqa: E402
from penstock.engine.backends.interface import ClampedSilu  # noqa: E402
from penstock.engine.loading.mxfp4 import Mxfp4, round_mxfp4  # noqa: E402
from penstock.engine.models.layers.experts import ExpertMlp, ExpertSource, Router, StepTokens  # noqa: E402
from penstock.engine.models.layers.feed_forward import GatedMlp  # noqa: E402
from tests.engine.harness import assert_idle, generate, greedy, make_engine  # noqa: E402
from tests.engine.tiny import write_checkpoint  # noqa: E402

ON_DEVICE = torch.cuda.is_available() and os.environ.get("PENSTOCK_GPU_TESTS") != "compile"
GATE = ClampedSilu(1.5)
VOCAB = 50
ops = TritonOps(DEVICE)


def product(x: Tensor, linear: Any) -> Tensor:
    weight = linear.weight.dense() if isinstance(linear.weight, Mxfp4) else linear.weight
    return x.double() @ weight.double().T


def mlp64(x: Tensor, mlp: GatedMlp) -> Tensor:
    gate, up = product(x, mlp.gate_up).chunk(2, -1)
    gate, up = gate.clamp(max=GATE.limit), up.clamp(-GATE.limit, GATE.limit)
    return product(gate * gate.sigmoid() * up, mlp.down)


def make(experts: int, hidden: int, ffn: int, dtype: torch.dtype, *, packed: bool, hashed: bool) -> ExpertMlp:
    def linear(out: int, inputs: int) -> Mxfp4Linear | CudaLinear:
        if not packed:
            return CudaLinear(rand(out, inputs, dtype=dtype, scale=3 * inputs**-0.5), None)
        if MODE == "compile":
            blocks = torch.empty(out, inputs // 2, dtype=torch.uint8)
            return Mxfp4Linear(Mxfp4(blocks, torch.empty(out, inputs // 32, dtype=torch.uint8)), None)
        return Mxfp4Linear(round_mxfp4(rand(out, inputs, scale=3 * inputs**-0.5)), None)

    mlps = [GatedMlp(ops, GATE, linear(2 * ffn, hidden), linear(hidden, ffn)) for _ in range(experts)]
    table = torch.stack([torch.randperm(experts)[:3] for _ in range(VOCAB)]).to(DEVICE) if hashed else None
    router = Router(
        CudaLinear(rand(experts, hidden, dtype=dtype, scale=3 * hidden**-0.5), None), 3, True, scoring="sqrt_softplus",
        bias=None if hashed else rand(experts), scale=1.5, table=table, tokens=StepTokens(),
    )  # fmt: skip
    return ExpertMlp(ops, router, mlps, ExpertSource(mlps.__getitem__, lambda _: None))


def test_experts_chosen_by_token_ids_and_by_their_own_scores() -> None:
    """Dense and in MXFP4, beside a shared one; one token, few and more."""
    if MODE == "compile":
        return  # the kernels are those of gpt-oss
    for packed, hashed, dtype in (
        (False, True, torch.float32),
        (False, False, torch.bfloat16),
        (True, False, torch.float32),
        (True, True, torch.bfloat16),
    ):
        hidden, ffn = 96, 64
        plain = make(6, hidden, ffn, dtype, packed=packed, hashed=hashed)
        routed = group(plain)
        assert routed is not None and not routed.fuses and not routed.takes_one
        up, down = rand(2 * ffn, hidden, dtype=dtype), rand(hidden, ffn, dtype=dtype)
        shared = GatedMlp(ops, GATE, CudaLinear(up / hidden**0.5, None), CudaLinear(down / ffn**0.5, None))
        both = with_shared(routed, shared, None)
        for tokens in (1, 9, 40) if QUICK else (1, 3, 17, 64, 300):
            x = rand(tokens, hidden, dtype=dtype)
            plain.router.tokens.ids = integers([7 * token % VOCAB for token in range(tokens)], torch.int64)
            weights, chosen = plain.router(x)
            if hashed:
                assert plain.router.table is not None
                assert torch.equal(chosen, plain.router.table[plain.router.tokens.ids])
            want = mlp64(x, shared)
            for token in range(tokens):
                for weight, expert in zip(weights[token].double(), chosen[token].tolist(), strict=True):
                    want[token] += weight * mlp64(x[token : token + 1], plain.experts[expert])[0]
            with poisoned_outputs():
                got = both.forward(x.clone())
            check(f"{dtype} mxfp4={packed} hashed={hashed} {tokens}", got, want, 1e-4 if dtype.itemsize == 4 else 3e-2)


def test_the_family_equals_the_cpu() -> None:
    """With chunked prompts, cached prefixes, draft tokens and preemption; float32."""
    if not ON_DEVICE:
        return
    chance = random.Random(7)
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint("deepseek-v4", Path(folder))
        prompts = {f"r{n}": [chance.randrange(199) for _ in range(n)] for n in (1, 2, 17, 130, 400)}
        expected = generate(make_engine(path), *(greedy(name, prompt, 16) for name, prompt in prompts.items()))
        settings: list[dict[str, Any]] = [
            {"token_budget": 96, "num_blocks": 200},
            {"token_budget": 48, "num_blocks": 40, "speculation": "ngram"},
            {"token_budget": 48, "num_blocks": 200, "deterministic": True},
        ]
        for changes in settings:
            engine = make_engine(path, device="cuda", max_running=8, **changes)
            for _ in range(2):
                got = generate(engine, *(greedy(name, prompt, 16) for name, prompt in prompts.items()))
                different = [name for name, tokens in expected.items() if got[name] != tokens]
                assert not different, (changes, different)
            assert_idle(engine)
            print(f"as on the CPU: {changes}")
