"""Muse Spark's experts on CUDA, whose outputs are normalized before they are weighted, against float64: all of them in
one process, some of them in each of several, parts of all in each, and with something added to their linears."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch
from gpu_harness import DEVICE, MODE, QUICK, check, rand
from test_triton_moe import BF16, make_moe, ops, wide
from torch import Tensor
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from penstock.engine.backends.cuda.experts import GroupedExpertMlp, group  # noqa: E402
from penstock.engine.backends.cuda.linear import CudaLinear  # noqa: E402
from penstock.engine.models.layers.experts import ExpertMlp, ExpertSlots  # noqa: E402
from penstock.engine.models.layers.feed_forward import GatedMlp  # noqa: E402
from penstock.engine.models.layers.linear import WideLinear  # noqa: E402
from penstock.engine.models.layers.visit_norm import VisitNorm  # noqa: E402

EPS = 1e-3
TOKENS = (1, 5, 19)
DTYPES = (torch.float32,) if QUICK else (torch.float32, BF16)


def made(dtype: torch.dtype) -> ExpertMlp:
    experts, top_k, hidden, ffn = (5, 3, 32, 32) if QUICK else (16, 4, 256, 192)
    mlp = make_moe(experts, top_k, hidden, ffn, dtype)
    scores = WideLinear(rand(experts, hidden, dtype=torch.float32, scale=3 * hidden**-0.5), lambda: False)
    bias = rand(experts, dtype=torch.float32, scale=0.2)
    router = replace(mlp.router, linear=scores, scoring="sigmoid", bias=bias, logit_scale=0.4, total_eps=1e-15)
    scale = 1 + rand(hidden, dtype=torch.float32, scale=0.3)
    return replace(mlp, router=router, visit_norm=VisitNorm(ops, scale, torch.ones(hidden, device=DEVICE), EPS))


def grouped(mlp: ExpertMlp) -> GroupedExpertMlp:
    found = group(mlp)
    assert found is not None
    return found


def outputs64(mlp: ExpertMlp, x: Tensor, expert: int) -> Tensor:
    one = mlp.experts[expert]
    gate, up = (wide(one.gate_up) @ x.double()).chunk(2)  # type: ignore[arg-type]
    return wide(one.down) @ (F.silu(gate) * up)  # type: ignore[arg-type]


def want64(mlp: ExpertMlp, x: Tensor, added: Tensor | None = None) -> Tensor:
    """`added`: to what experts give, before it is normalized."""
    norm = mlp.visit_norm
    assert norm is not None
    out = torch.zeros_like(x, dtype=torch.float64)
    for token, (weights, chosen) in enumerate(zip(*mlp.router(x), strict=True)):
        for weight, expert in zip(weights.double(), chosen.tolist(), strict=True):
            y = outputs64(mlp, x[token], expert)
            y = (y if added is None else y + added.double()) * norm.scale.double()
            out[token] += weight * y * torch.rsqrt(y.square().mean() + EPS)
    return out


def tolerance(dtype: torch.dtype) -> float:
    return 1e-4 if dtype == torch.float32 else 2e-2


def test_what_experts_give_is_normalized_before_it_is_weighted() -> None:
    for dtype in DTYPES:
        mlp = made(dtype)
        ours = grouped(mlp)
        assert not ours.fuses and not ours.leaving_sums().leaves_sums
        for tokens in TOKENS:
            x = rand(tokens, mlp.experts[0].down.weight.shape[0], dtype=dtype)  # type: ignore[attr-defined]
            got = ours.forward(x)
            if MODE != "compile":
                check(f"{tokens} tokens, {dtype}", got, want64(mlp, x), tolerance(dtype))


def test_ranks_with_some_of_the_experts_or_parts_of_all_have_parts_of_the_sum() -> None:
    if MODE == "compile":
        return
    for dtype in DTYPES:
        mlp = made(dtype)
        experts, hidden = len(mlp.experts), mlp.experts[0].down.weight.shape[0]  # type: ignore[attr-defined]
        x = rand(11, hidden, dtype=dtype)
        size = -(-experts // 2)
        table = (tuple(range(size)), tuple(range(experts - size, experts)))
        total = torch.zeros(11, hidden, dtype=torch.float64, device=DEVICE)
        for shard in range(2):
            held = [mlp.experts[expert] for expert in table[shard]]
            slots = ExpertSlots(table, shard, experts, torch.device(DEVICE))
            total += grouped(replace(mlp, experts=held, slots=slots)).forward(x).double()
        check(f"some of the experts, {dtype}", total, want64(mlp, x), tolerance(dtype))
        total.zero_()
        halves = [grouped(replace(mlp, experts=[half(one, rank) for one in mlp.experts])) for rank in range(2)]
        weights, chosen = mlp.router(x)
        ones = torch.ones_like(weights)
        bare = [replace(ours, visit_norm=None) for ours in halves]
        for rank, ours in enumerate(halves):
            assert ours.visit_norm is not None
            theirs = unsummed(bare[1 - rank], x, ones, chosen)
            norm = replace(ours.visit_norm, over_ranks=theirs.add, share=(rank, 2))
            total += replace(ours, visit_norm=norm).apply(x, weights, chosen).double()
        check(f"parts of all experts, {dtype}", total, want64(mlp, x), tolerance(dtype))


def test_what_is_added_to_experts_is_normalized_with_them() -> None:
    if MODE == "compile":
        return
    for dtype in DTYPES:
        mlp = made(dtype)
        hidden = mlp.experts[0].down.weight.shape[0]  # type: ignore[attr-defined]
        x, more = rand(7, hidden, dtype=dtype), rand(hidden, dtype=dtype)
        for ours in (mlp, grouped(mlp)):
            got = ours.apply(x, *ours.choose(x), Added(more))
            check(f"{type(ours).__name__}, {dtype}", got, want64(mlp, x, more), tolerance(dtype))


class Added:
    """See `Additions`: the same for all visits."""

    def __init__(self, more: Tensor) -> None:
        self.more = more

    def gate_up(self, x, base, pairs=None):  # type: ignore[no-untyped-def]
        return base(x)

    def down(self, x, base, pairs=None, weights=None):  # type: ignore[no-untyped-def]
        assert weights is None or bool((weights == 1).all()), "what is normalized is not weighted yet"
        return base(x) + self.more


def half(expert: GatedMlp, rank: int) -> GatedMlp:
    """One rank's part of an expert."""
    gate, up = (part.chunk(2)[rank] for part in expert.gate_up.weight.chunk(2))  # type: ignore[attr-defined]
    down = expert.down.weight.chunk(2, 1)[rank].contiguous()  # type: ignore[attr-defined]
    return GatedMlp(ops, expert.activation, CudaLinear(torch.cat((gate, up)), None), CudaLinear(down, None))


def unsummed(ours: GroupedExpertMlp, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """What experts give for each visit."""
    top_k = chosen.shape[1]
    each = [ours.apply(x, ones, chosen) for ones in weights.new_tensor(torch.eye(top_k).tolist()).unsqueeze(1)
            .expand(-1, len(x), -1).contiguous()]  # fmt: skip
    return torch.stack(each, 1).flatten(0, 1)
