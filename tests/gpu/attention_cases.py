"""Sequences in a paged cache, with what attention over them should give, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from gpu_harness import DEVICE, MODE, QUICK, TOLERANCE, check, integers, poison_, poisoned_outputs, rand, rng
from torch import Tensor

from penstock.engine.backends.cuda.ops import TritonOps
from penstock.engine.backends.interface import AttentionBatch, HeadLayout, attended

ops = TritonOps(DEVICE)
BLOCK = 16
FP8 = torch.float8_e4m3fn
INT8 = torch.int8


@dataclass
class Case:
    """Sequences in a paged cache, and the dense keys and values they were built from."""

    batch: AttentionBatch
    layout: HeadLayout
    k_cache: Tensor
    v_cache: Tensor
    q: Tensor
    scales: tuple[Tensor, Tensor] | None
    queries: list[int]
    contexts: list[int]
    sinks: Tensor | None = None


def build(
    queries: list[int],
    contexts: list[int],
    layout: HeadLayout,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    max_context: int | None = None,
    sinks: bool = False,
    run: int = 1,
) -> Case:
    """A batch whose blocks are scattered over the pool, `run` of them one behind the other. Every slot no sequence owns
    is poisoned."""
    kv_dtype = kv_dtype or dtype
    decodes = sum(n == 1 for n in queries)
    assert all(n == 1 for n in queries[:decodes])
    needed = [-(-c // BLOCK) for c in contexts]
    pool = list(range(sum(needed) + 2, 0, -1))  # taken from the end
    runs = [pool[at : at + run] for at in range(0, len(pool), run)]
    rng.shuffle(runs)
    pool = [block for some in runs for block in some]
    shape = (len(pool) + 1, layout.kv_heads, BLOCK, layout.head_dim)
    scales = None
    if kv_dtype == FP8:
        scales = (rand(layout.kv_heads).abs() + 0.5, rand(layout.kv_heads).abs() + 0.5)
    elif kv_dtype == INT8:
        scales = (
            poison_(torch.empty(shape[:3], dtype=torch.bfloat16, device=DEVICE)),
            poison_(torch.empty(shape[:3], dtype=torch.bfloat16, device=DEVICE)),
        )
    if MODE == "compile":
        caches = [torch.empty(shape, dtype=kv_dtype) for _ in range(2)]
    else:
        caches = [poison_(torch.empty(shape, dtype=kv_dtype, device=DEVICE)) for _ in range(2)]
    max_rows = len(queries) + 3
    width = max(needed) + 2
    tables = torch.full((max_rows, width), 10**9, dtype=torch.int32)
    rows = rng.sample(range(max_rows), len(queries))
    positions, slots, starts = [], [], [0]
    for row, blocks, count, context in zip(rows, needed, queries, contexts, strict=True):
        mine = [pool.pop() for _ in range(blocks)]
        tables[row, :blocks] = torch.tensor(mine, dtype=torch.int32)
        starts.append(starts[-1] + count)
        for position in range(context - count, context):
            positions.append(position)
            slots.append(mine[position // BLOCK] * BLOCK + position % BLOCK)
        if MODE != "compile":
            for index, cache in enumerate(caches):
                size = (blocks, layout.kv_heads, BLOCK, layout.head_dim)
                if kv_dtype == INT8:
                    dense = rand(*size, scale=40.0).clamp(-127, 127).to(INT8)
                    assert scales is not None
                    steps = rand(*size[:3], scale=0.025).abs().to(torch.bfloat16)
                    if context % BLOCK:
                        poison_(steps[-1, :, context % BLOCK :])
                    scales[index][mine] = steps
                else:
                    dense = rand(*size, dtype=dtype).to(kv_dtype)
                if context % BLOCK:
                    poison_(dense[-1, :, context % BLOCK :])
                cache.view(torch.uint8)[mine] = dense.view(torch.uint8)
    batch = AttentionBatch(
        positions=integers(positions, torch.int64),
        slots=integers(slots, torch.int64),
        query_starts=integers(starts, torch.int32),
        context_lens=integers(contexts, torch.int32),
        rows=integers(rows, torch.int32),
        block_tables=tables.to(DEVICE),
        num_decodes=decodes,
        max_query=max(queries),
        max_context=max_context or max(contexts),
        total_context=sum(contexts[decodes:]),
        attended=attended(np.array(starts), np.array(contexts), decodes),
    )
    q = rand(starts[-1], layout.heads, layout.head_dim, dtype=dtype)
    return Case(
        batch,
        layout,
        caches[0],
        caches[1],
        q,
        scales,
        queries,
        contexts,
        rand(layout.heads, scale=3) if sinks else None,
    )


def dense64(cache: Tensor, scale: Tensor | None, table: Tensor, context: int) -> Tensor:
    return widened(cache, scale)[table.long()].transpose(0, 1).reshape(cache.shape[1], -1, cache.shape[3])[:, :context]


def widened(cache: Tensor, scale: Tensor | None) -> Tensor:
    wide = cache.float().double()
    if scale is None:
        return wide
    return wide * (scale[:, None, None] if scale.dim() == 1 else scale[..., None]).double()


def attention64(case: Case) -> Tensor:
    layout, out = case.layout, []
    group = layout.heads // layout.kv_heads
    start = 0
    for i, (count, context) in enumerate(zip(case.queries, case.contexts, strict=True)):
        table = case.batch.block_tables[case.batch.rows[i].long()][: -(-context // BLOCK)]
        k_scale, v_scale = case.scales or (None, None)
        k = dense64(case.k_cache, k_scale, table, context).repeat_interleave(group, 0)
        v = dense64(case.v_cache, v_scale, table, context).repeat_interleave(group, 0)
        q = case.q[start : start + count].double().transpose(0, 1)
        at = torch.arange(context, device=DEVICE)
        mine = torch.arange(context - count, context, device=DEVICE)[:, None]
        visible = at <= mine
        if layout.window is not None:
            oldest = mine // layout.window * layout.window if layout.chunked else mine - layout.window + 1
            visible &= at >= oldest
        scores = q @ k.transpose(1, 2) * layout.scale
        if layout.softcap is not None:
            scores = layout.softcap * (scores / layout.softcap).tanh()
        scores = scores.masked_fill(~visible, float("-inf"))
        if case.sinks is not None:
            scores = torch.cat((scores, case.sinks.double().view(-1, 1, 1).expand(-1, count, 1)), -1)
        out.append((scores.softmax(-1)[..., :context] @ v).transpose(0, 1).reshape(count, -1))
        start += count
    return torch.cat(out)


def run_case(name: str, case: Case, tolerance: float | None = None) -> None:
    with poisoned_outputs():
        got = ops.attention(case.q, case.layout, case.batch, case.k_cache, case.v_cache, case.scales, case.sinks)
    if MODE == "compile":
        return
    check(name, got, attention64(case), tolerance or max(TOLERANCE[got.dtype], 1e-5))
    assert int(ops._counters.abs().sum()) == 0, f"{name}: arrival counters were not reset"


def prefill_flops(case: Case) -> float:
    pairs = sum(n * (context - n) + n * (n + 1) / 2 for n, context in zip(case.queries, case.contexts, strict=True))
    return 4 * pairs * case.layout.heads * case.layout.head_dim


def layout(heads: int, kv_heads: int, dim: int, window: int | None = None) -> HeadLayout:
    return HeadLayout(heads, kv_heads, dim, dim**-0.5, window)


SHAPES = (
    [(4, 2, 32), (6, 2, 16)]
    if QUICK
    else [(32, 8, 128), (9, 3, 64), (16, 8, 128), (8, 8, 96), (28, 4, 128), (64, 8, 128), (4, 2, 256), (32, 1, 64)]
)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LLAMA = layout(32, 8, 128)
