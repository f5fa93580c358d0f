"""States of gated delta nets in native code, against the plain implementation."""

from __future__ import annotations

import pytest
import torch

from penstock.engine.backends.interface import AttentionBatch, DeltaLayout, DeltaWeights, StateBatch
from penstock.engine.backends.reference.delta import delta_net
from penstock.engine.backends.select import pick_backend


def batch_of(reads: list[int], writes: list[int], positions: list[int]) -> AttentionBatch:
    count = len(reads)
    each = torch.arange(count, dtype=torch.int32)
    return AttentionBatch(
        positions=torch.tensor(positions),
        slots=torch.tensor(positions),
        query_starts=torch.arange(count + 1, dtype=torch.int32),
        context_lens=torch.tensor(positions, dtype=torch.int32) + 1,
        rows=torch.zeros(count, dtype=torch.int32),
        block_tables=torch.zeros(1, 1, dtype=torch.int32),
        num_decodes=count,
        max_query=1,
        max_context=max(positions) + 1,
        states=StateBatch(each, each, *(torch.tensor(slots, dtype=torch.int32) for slots in (reads, writes))),
    )


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("values", [5, 16, 24, 128])
def test_decodes_equal_the_plain_ones(values: int, by_channel: bool) -> None:
    """States in place, from one slot to another, from none, and kept nowhere; heads of any width."""
    torch.manual_seed(values)
    layout = DeltaLayout(
        2, 4, 16, values, conv=4, grouped=not by_channel, by_channel=by_channel, sigmoid_gate=by_channel
    )
    weights = DeltaWeights(
        torch.randn(layout.channels, 4), -torch.rand(4), torch.randn(layout.decays), 1 + torch.randn(values) / 5, 1e-6
    )
    batch = batch_of([1, 2, 0, 4], [1, 3, 5, 0], [9, 4, 0, 7])
    rows, gates = torch.randn(4, layout.width), torch.randn(4, 4 + layout.decays)
    inputs, states = torch.randn(6, 4, layout.channels), torch.randn(6, 4, 16, values)
    plain_inputs, plain_states = inputs.clone(), states.clone()
    ops = pick_backend(torch.device("cpu"), 1).ops
    got = ops.delta_net(rows, gates, layout, weights, batch, inputs, states)
    want = delta_net(rows, gates, layout, weights, batch, plain_inputs, plain_states)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(states, plain_states, rtol=1e-5, atol=1e-5)
    assert torch.equal(inputs, plain_inputs)
