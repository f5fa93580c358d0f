"""Attention over latents in the native library: equal to the definition in every type, and batch-invariant."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from torch import Tensor

from penstock.engine.backends import cpu
from penstock.engine.backends.interface import FP8, INT8, SCALE_DTYPE, AttentionBatch, LatentLayout, LatentWeights
from penstock.engine.backends.reference.ops import ReferenceOps

ops = cpu.load(2)
pytestmark = pytest.mark.skipif(ops is None, reason="no native kernels here")
BLOCK = 16
SHAPES = [(4, 32, 16, 8, 20), (5, 96, 24, 12, 40), (16, 128, 32, 16, 32), (1, 7, 3, 2, 5), (4, 32, 24, 0, 20)]


def make_batch(contexts: list[int], lengths: list[int], rng: random.Random) -> tuple[AttentionBatch, int]:
    width = -(-max(contexts) // BLOCK)
    blocks = list(range(1, 1 + len(contexts) * width))
    rng.shuffle(blocks)
    tables = [blocks[i * width : (i + 1) * width] for i in range(len(contexts))]
    owners = [
        (i, p) for i, (all_, new) in enumerate(zip(contexts, lengths, strict=True)) for p in range(all_ - new, all_)
    ]
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    batch = AttentionBatch(
        positions=torch.tensor([p for _, p in owners]),
        slots=torch.tensor([tables[i][p // BLOCK] * BLOCK + p % BLOCK for i, p in owners]),
        query_starts=torch.tensor(starts, dtype=torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        rows=torch.arange(len(contexts), dtype=torch.int32),
        block_tables=torch.tensor(tables, dtype=torch.int32),
        num_decodes=sum(length == 1 for length in lengths),
        max_query=max(lengths),
        max_context=max(contexts),
    )
    return batch, 1 + len(contexts) * width


@dataclasses.dataclass
class Case:
    layout: LatentLayout
    batch: AttentionBatch
    cache: Tensor
    scales: Tensor | None
    q: Tensor
    kv: Tensor
    weights: LatentWeights
    table: Tensor


def make(
    shape: tuple[int, ...], contexts: list[int], lengths: list[int], dtype: torch.dtype, kind: torch.dtype
) -> Case:
    torch.manual_seed(7)
    heads, latent, plain, rotary, value = shape
    layout = LatentLayout(heads, latent, plain, rotary, value, (plain + rotary) ** -0.5, heads % 2 == 0)
    batch, blocks = make_batch(contexts, lengths, random.Random(3))
    cache, scales = torch.randn(blocks, BLOCK, layout.cached).to(dtype), None
    if kind == INT8:
        cache = (cache.float() * 40).clamp(-127, 127).to(INT8)
        scales = torch.rand(blocks, BLOCK).mul(0.02).to(SCALE_DTYPE)
    elif kind == FP8:
        cache, scales = cache.to(FP8), torch.full((1,), 0.7)
    rows = torch.randn(len(batch.positions), heads * layout.query + layout.cached).to(dtype)
    up = torch.randn(heads, plain + value, latent).mul(0.1).to(dtype)
    angles = torch.arange(1001).unsqueeze(1) * 10000.0 ** (-torch.arange(0, rotary, 2) / rotary)
    table = torch.cat((angles.cos(), angles.sin()), 1).float()
    weights = LatentWeights(torch.randn(latent).to(dtype), 1e-6, up)
    return Case(layout, batch, cache, scales, rows[:, : -layout.cached], rows[:, -layout.cached :], weights, table)


def run(case: Case, through: object, batch: AttentionBatch | None = None, some: slice = slice(None)) -> Tensor:
    out: Tensor = through.latent_attention(  # type: ignore[attr-defined]
        case.q[some], case.kv[some], case.layout, case.weights, case.table, batch or case.batch, case.cache, case.scales
    )
    return out


def copy(case: Case) -> Case:
    scales = None if case.scales is None else case.scales.clone()
    return dataclasses.replace(case, cache=case.cache.clone(), scales=scales)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, INT8, FP8], ids=str)
def test_it_equals_the_definition(shape: tuple[int, ...], kind: torch.dtype) -> None:
    dtype = torch.bfloat16 if kind == torch.bfloat16 else torch.float32
    for contexts, lengths in (([5, 700, 1, 256, 257], [1] * 5), ([40, 3, 90, 30], [1, 1, 50, 7])):
        case = make(shape, contexts, lengths, dtype, kind)
        theirs = copy(case)
        got, want = run(case, ops), run(theirs, ReferenceOps())
        few = 5e-3 if kind in (INT8, FP8) else 1e-5
        limit = 2e-2 if dtype is torch.bfloat16 else few
        assert float((got.float() - want.float()).norm() / want.float().norm()) < limit, (contexts, lengths)
        stored, expected = case.cache.float(), theirs.cache.float()
        assert float((stored - expected).norm() / expected.norm()) < (1e-2 if kind != torch.float32 else 1e-6)


@pytest.mark.parametrize("kind", [torch.float32, INT8], ids=str)
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[-1]])
def test_latents_that_another_layer_has_stored(shape: tuple[int, ...], kind: torch.dtype) -> None:
    case = make(shape, [40, 3, 90, 30], [1, 1, 50, 7], torch.float32, kind)
    run(case, ops)
    stored, rest = case.cache.clone(), (case.layout, case.weights, case.table, case.batch, case.cache, case.scales)
    got, want = (through.latent_attention(case.q, None, *rest) for through in (ops, ReferenceOps()))  # type: ignore[union-attr]
    assert torch.equal(case.cache, stored)
    assert float((got - want).norm() / want.norm()) < (5e-3 if kind == INT8 else 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        case = make(shape, [5, 700, 1, 256, 257, 300, 44], [1] * 7, dtype, dtype)
        whole = run(case, ops)
        for first, last in ((0, 1), (1, 2), (1, 6), (4, 5), (3, 7)):
            some = slice(first, last)
            few = dataclasses.replace(
                case.batch, positions=case.batch.positions[some], slots=case.batch.slots[some],
                rows=case.batch.rows[some], context_lens=case.batch.context_lens[some], num_decodes=last - first,
                query_starts=case.batch.query_starts[: last - first + 1],
            )  # fmt: skip
            assert torch.equal(run(case, ops, few, some), whole[some]), (shape, first, last)
