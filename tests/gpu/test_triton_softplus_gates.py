"""Gates by softplus (Laguna) on CUDA: one for each number or for each head, also where adapters' part of a row stands
beside the model's own."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

import torch
from attention_cases import DTYPES
from gpu_harness import DEVICE, MODE, QUICK, TOLERANCE, check, rand
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from penstock.engine.backends.cuda.kernels.addends import Addends  # noqa: E402
from penstock.engine.backends.cuda.ops import TritonOps  # noqa: E402

SHAPES = [(3, 8)] if QUICK else [(3, 8), (48, 128), (64, 128)]
"""Heads, and size of each."""
ops = TritonOps(DEVICE)


def test_outputs_are_multiplied_by_softplus_of_their_gates() -> None:
    for (heads, dim), by_head, tokens, dtype in product(SHAPES, (True, False), (1, 5), DTYPES):
        gates = heads if by_head else heads * dim
        x = rand(tokens, heads * dim, dtype=dtype)
        gate = (torch.linspace(-60, 60, tokens * gates, device=DEVICE).view(tokens, gates) / 2).to(dtype)
        more = rand(tokens, gates, dtype=dtype)
        ranks = (torch.arange(tokens, device=DEVICE) % 3).int()
        both = gate + torch.where(ranks.unsqueeze(1) > 0, more, 0)
        got = [ops.softplus_mul(x, gate), ops.softplus_mul(x, Addends(gate.clone(), more, ranks))]
        if MODE == "compile":
            continue
        for name, found, numbers in zip(("alone", "with adapters"), got, (gate, both), strict=True):
            wanted = x.double() * F.softplus(numbers.double()).repeat_interleave(heads * dim // gates, 1)
            assert found.dtype == dtype and found.is_contiguous()
            check(f"{name} {heads} x {dim}, {gates} gates", found, wanted, TOLERANCE[dtype])


def test_small_factors_keep_their_digits() -> None:
    if MODE == "compile":
        return
    x, gate = torch.ones(1, 64, device=DEVICE), torch.linspace(-40, 25, 64, device=DEVICE).view(1, 64)
    wanted = F.softplus(gate.double())
    torch.testing.assert_close(ops.softplus_mul(x, gate).double(), wanted, rtol=1e-5, atol=0)
