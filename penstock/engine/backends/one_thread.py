"""Small tensors on a CPU: computing them takes less time than its threads need to wait for each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """PyTorch computes on the calling thread meanwhile. Its threads spin at the end of every operation, for
    milliseconds where something else runs on one of their cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
