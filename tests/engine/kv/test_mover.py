"""Copies of blocks between the cache and the host: in which order, and into which memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.engine.backends.cuda.block_mover import CudaBlockMover, _runs
from penstock.engine.kv.host import Transfers
from penstock.engine.kv.mover import populate


def test_neighbouring_slots_cross_in_one_copy_whatever_the_order_of_their_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sequence leaves with its end first and comes back with its beginning first."""
    copies: list[tuple[str, list[int], int]] = []

    def send(self: CudaBlockMover, pairs: list[tuple[int, int]]) -> None:
        assert all(slot == 100 + block for block, slot in pairs)
        copies.append(("out", [slot for _, slot in pairs], sum(1 for _ in _runs([slot for _, slot in pairs]))))

    def fetch(self: CudaBlockMover, pairs: list[tuple[int, int]]) -> None:
        assert all(slot == 50 - block for slot, block in pairs)
        copies.append(("back", [slot for slot, _ in pairs], sum(1 for _ in _runs([slot for slot, _ in pairs]))))

    monkeypatch.setattr(CudaBlockMover, "_send", send)
    monkeypatch.setattr(CudaBlockMover, "_fetch", fetch)
    mover = object.__new__(CudaBlockMover)
    mover._at_once = 8
    mover.run(Transfers([(block, 100 + block) for block in (9, 3, 5, 4)], {block: 50 - block for block in range(20)}))
    assert copies == [
        ("out", [103, 104, 105, 109], 2),
        ("back", [*range(31, 39)], 1),
        ("back", [*range(39, 47)], 1),
        ("back", [*range(47, 51)], 1),
    ]


def test_the_memory_of_a_pool_is_taken_and_stays_as_it_is() -> None:
    pool = torch.from_numpy(np.zeros(160 << 20, np.uint8))
    pool[1 << 20] = 7
    assert populate(pool) in (64 << 20, 128 << 20, 0)
    assert int(pool[1 << 20]) == 7 and int(pool[-1]) == 0
    assert populate(torch.zeros(1000)) == 0
