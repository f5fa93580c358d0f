"""Small arrays on their way to the device, more of them than there are buffers."""

from __future__ import annotations

import os

import numpy as np
import torch

from penstock.engine.backends.staging import PinnedStaging

ON_DEVICE = torch.cuda.is_available() and os.environ.get("PENSTOCK_GPU_TESTS") != "compile"


def test_fenced_uploads_are_whole_behind_a_busy_device() -> None:
    """The device does not begin to copy before the host has come to the second turn of the buffers."""
    if not ON_DEVICE:
        return
    staging = PinnedStaging(torch.device("cuda"), fenced=True)
    staging.upload([np.zeros(64, np.int32)])
    torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]
    found = [staging.upload([np.full(64, i, np.int32), np.full(3, -i, np.int64)]) for i in range(50)]
    for i, (first, second) in enumerate(found):
        assert first.tolist() == [i] * 64 and second.tolist() == [-i] * 3
