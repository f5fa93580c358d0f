"""The memory of one CUDA device."""

from __future__ import annotations

from collections.abc import Callable

import torch


class CudaMemory:
    """See `DeviceMemory`. What a cache leaves is for CUDA graphs, the sampler, and fragmentation."""

    share_of_free = 0.92
    share_of_rest = 0.92
    shared_by_ranks = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def available(self) -> int:
        self.trim()
        free, _ = torch.cuda.mem_get_info(self._device)
        return int(free)

    def total(self) -> int:
        return int(torch.cuda.get_device_properties(self._device).total_memory)

    def used(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def peak(self, run: Callable[[], object]) -> int:
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        run()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - before

    def trim(self, *, workspaces: bool = False) -> None:
        if workspaces:
            torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
