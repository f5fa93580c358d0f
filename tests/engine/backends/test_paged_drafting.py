"""Keys of windows, and what pools are made of, in blocks: the same as in states, however a text is cut."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock.engine.backends.interface import (
    AttentionBatch,
    CompressionCache,
    CompressionLayout,
    Entries,
    PoolInputs,
    PoolState,
)
from penstock.engine.backends.reference.ops import ReferenceOps
from penstock.engine.models.layers.rotary import cos_sin_table
from penstock.engine.models.rope import RopeConfig

TOKENS, SIZE, DIM, HEADS, WINDOW, RATE = 43, 8, 12, 3, 10, 4
CUTS = [(43,), (5, 1, 20, 17), (1,) * 43]
BLOCKS = -(-TOKENS // SIZE) + 1


def part_of(begin: int, end: int) -> AttentionBatch:
    """Some tokens of a sequence."""
    whole = AttentionBatch.of_one(TOKENS, SIZE, torch.device("cpu"))
    return replace(
        whole,
        positions=whole.positions[begin:end],
        slots=whole.slots[begin:end],
        query_starts=torch.tensor([0, end - begin], dtype=torch.int32),
        context_lens=torch.tensor([end], dtype=torch.int32),
    )


def parts(cuts: tuple[int, ...]) -> list[tuple[slice, AttentionBatch]]:
    ends = torch.tensor(cuts).cumsum(0).tolist()
    return [(slice(a, b), part_of(a, b)) for a, b in zip([0, *ends], ends, strict=False)]


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_windows(cuts: tuple[int, ...], alone: bool) -> None:
    torch.manual_seed(1)
    q, keys, sinks = torch.randn(TOKENS, HEADS * DIM), torch.randn(TOKENS, DIM), torch.randn(HEADS)
    layout = CompressionLayout(HEADS, DIM, WINDOW, DIM**-0.5, 1e-6)
    table = cos_sin_table(RopeConfig(), 4, TOKENS, torch.device("cpu"))
    ops = ReferenceOps()
    ops.batch_invariant = alone
    state = CompressionCache(torch.zeros(2, WINDOW, DIM))
    batch = AttentionBatch.of_one(TOKENS, SIZE, torch.device("cpu"))
    expected = ops.compressed_attention(q, keys, layout, sinks, table, batch, state, None, None)
    rows = torch.full((BLOCKS, SIZE, DIM), float("nan"))  # what nobody has written is not read
    got = [
        ops.paged_window_attention(q[some], keys[some], layout, sinks, table, batch, rows)
        for some, batch in parts(cuts)
    ]
    torch.testing.assert_close(torch.cat(got), expected)


@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_pools(cuts: tuple[int, ...]) -> None:
    torch.manual_seed(2)
    values, gates, bias = torch.randn(TOKENS, DIM), 3 * torch.randn(TOKENS, DIM), torch.randn(RATE, DIM)

    def empty() -> Entries:
        return Entries(torch.zeros(BLOCKS, SIZE // RATE, DIM), None, SIZE)

    def inputs(some: slice) -> PoolInputs:
        return PoolInputs(values[some], gates[some], bias)

    ops, wanted, got = ReferenceOps(), empty(), empty()
    batch = AttentionBatch.of_one(TOKENS, SIZE, torch.device("cpu"))
    ops.store_pools(inputs(slice(None)), batch, wanted, PoolState(torch.zeros(2, 3, DIM), None))
    rows: Tensor = torch.full((BLOCKS, SIZE, 2 * DIM), float("nan"))
    for some, batch in parts(cuts):
        ops.store_paged_pools(inputs(some), batch, got, rows)
    assert bool(wanted.rows.any())
    torch.testing.assert_close(got.rows, wanted.rows)
