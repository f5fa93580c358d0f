"""Bytes arrive whole whatever their sizes, and an error leaves nothing under way."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.engine.backends import copy_streams

CPU = torch.device("cpu")
SIZES = [0, 1, 999, 1000, 1001, 3999, 4000, 4001, 12_345, 50_000]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_streams, "BUFFER", 1000)
    monkeypatch.setattr(copy_streams, "_PIECE", 4000)


def test_spans_of_any_size_go_there_and_back() -> None:
    there = [torch.randint(256, (size,), dtype=torch.uint8) for size in SIZES]
    here = [torch.zeros_like(part) for part in there]
    copy_streams.to_host(zip(there, here, strict=True), CPU)
    assert all(torch.equal(*pair) for pair in zip(there, here, strict=True))
    back = [torch.zeros_like(part) for part in there]
    copy_streams.to_device(zip(back, here, strict=True), CPU)
    assert all(torch.equal(*pair) for pair in zip(there, back, strict=True))


def test_an_error_in_one_copy_stream_is_raised_when_all_have_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = []

    def fails_once(target: Tensor, source: Tensor) -> None:
        moved.append(source.numel())
        if len(moved) == 3:
            raise MemoryError("no room")

    monkeypatch.setattr(copy_streams, "_move", fails_once)
    with pytest.raises(MemoryError, match="no room"):
        copy_streams.to_host([(torch.zeros(50_000, dtype=torch.uint8), torch.zeros(50_000, dtype=torch.uint8))], CPU)
    assert len(moved) > 50 - 4, "the piece that failed is given up, all others are not"
