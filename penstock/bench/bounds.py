"""What this machine can do, measured in the same run: bytes read per second and matrix operations per second.

An engine's tokens/s mean little alone; next to the bound they show how much is left. The probes take the best of a
few short runs, since a bound is what the machine reaches when nothing disturbs it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from penstock.engine.backends.backend import Backend
from penstock.engine.backends.select import plain_backend

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
    backend = plain_backend(device)
    best, side = dtype, 8192
    if backend.in_host_memory:
        rates = {candidate: _matmul_tflops(backend, candidate, 256) for candidate in (dtype, torch.float32)}
        best, side = max(rates, key=lambda candidate: rates[candidate]), 1024
    return Bounds(_read_gbps(backend), _matmul_tflops(backend, best, side), str(best).removeprefix("torch."))


def _read_gbps(backend: Backend) -> float:
    """Reads a buffer far larger than the caches; a reduction writes next to nothing."""
    device = backend.device
    size = min(256 * _MIB if backend.in_host_memory else 4 * _GIB, backend.memory.available() // 2)
    # Viewed as rows so that the device reduces many at once; ones, so that every page is really there.
    data = torch.ones(size // 4, dtype=torch.float32, device=device).view(-1, 4096)
    out = torch.empty(data.shape[0], dtype=torch.float32, device=device)
    seconds = _best(backend, lambda: torch.sum(data, dim=1, out=out))
    return data.numel() * 4 / seconds / 1e9


def _matmul_tflops(backend: Backend, dtype: torch.dtype, side: int) -> float:
    device = backend.device
    left = torch.ones(side, side, dtype=dtype, device=device)
    right = torch.ones(side, side, dtype=dtype, device=device)
    out = torch.empty(side, side, dtype=dtype, device=device)
    return 2 * side**3 / _best(backend, lambda: torch.mm(left, right, out=out)) / 1e12


def _best(backend: Backend, work: Callable[[], object], budget_s: float = 0.4) -> float:
    """Seconds of the fastest run within the budget, the first (cold) one left out."""

    def timed() -> float:
        begin = time.perf_counter()
        work()
        backend.synchronize()
        return time.perf_counter() - begin

    timed()
    best, spent = float("inf"), 0.0
    while spent < budget_s:
        seconds = timed()
        best, spent = min(best, seconds), spent + seconds
    return best
