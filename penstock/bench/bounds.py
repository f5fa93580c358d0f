"""What this machine can do, measured in the same run: bytes read per second and matrix operations per second.

An engine's tokens/s mean little alone; beside the bound they say how much is left. The probes take the best of a
few short runs, since a bound is what the machine reaches when nothing disturbs it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_GIB = 1 << 30
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Bounds:
    """Measured ceilings of one device."""

    read_gbps: float
    """Gigabytes (10^9) read from memory per second."""
    matmul_tflops: float
    """Tera-operations of a large matrix product per second, in the faster of the dtypes tried."""
    matmul_dtype: str


def probe(device: torch.device, dtype: torch.dtype) -> Bounds:
    """About a second. On CPU the product is tried in float32 too: where the hardware lacks the smaller type,
    float32 is the honest ceiling (small matrices decide, since the wrong type can be a hundred times slower)."""
    if device.type == "cuda":
        best, side = dtype, 8192
    else:
        trial = {candidate: _matmul_tflops(device, candidate, 256) for candidate in (dtype, torch.float32)}
        best, side = max(trial, key=lambda candidate: trial[candidate]), 1024
    return Bounds(_read_gbps(device), _matmul_tflops(device, best, side), str(best).removeprefix("torch."))


def _read_gbps(device: torch.device) -> float:
    """Reads a buffer far larger than the caches; a reduction writes next to nothing."""
    size = 4 * _GIB if device.type == "cuda" else 256 * _MIB
    if device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(device)[0] // 2)
    # Viewed as rows so that the device reduces many at once; ones, so that every page is really there.
    data = torch.ones(size // 4, dtype=torch.float32, device=device).view(-1, 4096)
    out = torch.empty(data.shape[0], dtype=torch.float32, device=device)
    seconds = _best(device, lambda: torch.sum(data, dim=1, out=out))
    return data.numel() * 4 / seconds / 1e9


def _matmul_tflops(device: torch.device, dtype: torch.dtype, side: int) -> float:
    left = torch.ones(side, side, dtype=dtype, device=device)
    right = torch.ones(side, side, dtype=dtype, device=device)
    out = torch.empty(side, side, dtype=dtype, device=device)
    return 2 * side**3 / _best(device, lambda: torch.mm(left, right, out=out)) / 1e12


def _best(device: torch.device, work: Callable[[], object], budget_s: float = 0.4) -> float:
    """Seconds of the fastest run within the budget, the first (cold) one left out."""

    def timed() -> float:
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begin

    timed()
    best, spent = float("inf"), 0.0
    while spent < budget_s:
        seconds = timed()
        best, spent = min(best, seconds), spent + seconds
    return best
