"""Buffers of uploads are used again when what was in them has crossed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from penstock.engine.backends import staging


class LateStream:
    """A device that copies only when it is waited for."""

    def __init__(self) -> None:
        self.waits = 0

    def record_event(self) -> LateStream:
        return self

    def synchronize(self) -> None:
        self.waits += 1


@pytest.mark.parametrize("fenced", [False, True])
def test_a_fenced_buffer_waits_for_the_copy_before(fenced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, empty = LateStream(), torch.empty

    def pageable(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return empty(*args, **options)

    monkeypatch.setattr(torch, "empty", pageable)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    pinned = staging.PinnedStaging(torch.device("cpu"), fenced=fenced)
    for i in range(20):
        assert pinned.upload([np.full(3, i, np.int32)])[0].tolist() == [i] * 3
    assert stream.waits == (12 if fenced else 0)
