"""Capturing work as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Recording:
    """A captured graph, and the tensors that each replay writes."""

    graph: torch.cuda.CUDAGraph
    results: tuple[Tensor, Tensor]


@cache
def _capture_stream(device: torch.device) -> Any:
    """One for all captures: cuBLAS keeps a workspace of tens of megabytes for every stream it was ever used on."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def record(device: torch.device, work: Callable[[], tuple[Tensor, Tensor]], pool: Any) -> Recording:
    """Capture `work` with memory from `pool` (None: a new one). It runs once before, so that kernels are compiled
    outside the graph."""
    stream = _capture_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.inference_mode(), torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.stream(stream):
        # Not `torch.cuda.graph`, which waits for the device and empties the allocator's cache before each capture.
        # Other threads may use the device meanwhile: adapters and blocks are copied while steps are captured.
        graph.capture_begin(**({} if pool is None else {"pool": pool}), capture_error_mode="thread_local")
        try:
            results = work()
        finally:
            graph.capture_end()
    return Recording(graph, results)
