"""The one place that picks a device, its number type and its backend."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import torch

from penstock.engine.backends import cpu
from penstock.engine.backends.backend import Backend
from penstock.engine.backends.cpu.backend import CpuBackend, has_bfloat16
from penstock.engine.backends.interface import torch_dtype
from penstock.engine.backends.reference.backend import ReferenceBackend
from penstock.errors import ConfigError

native_status = cpu.status


def pick_device(name: str, *, room: int = 0) -> torch.device:
    """The device called `name`; `auto` takes CUDA when there is a device with `room` bytes free."""
    if name == "auto":
        if not torch.cuda.is_available() or torch.cuda.mem_get_info(0)[0] < room:
            return torch.device("cpu")
        name = "cuda"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} is not a device name; use auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not supported; use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device 'cuda' was asked for, but torch sees no CUDA device; use device: cpu")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def rank_device(first: torch.device, rank: int, world: int, named: Sequence[str] = ()) -> torch.device:
    """The device of one rank of `world`: as `named`, or counted from `first`, which is rank 0's."""
    if named:
        if len(named) != world:
            raise ConfigError(f"devices names {len(named)}, but tensor_parallel x pipeline_parallel is {world} ranks")
        found = {pick_device(name).type for name in named}
        if len(found) > 1:
            raise ConfigError(f"devices: the ranks of one engine are all on CPU or all on CUDA, not on {named}")
        device = pick_device(named[rank])
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise ConfigError(f"devices: there is no {device}; torch sees {torch.cuda.device_count()} CUDA devices")
        return device
    if first.type == "cpu":
        return first
    index, count = (first.index or 0) + rank, torch.cuda.device_count()
    if index >= count:
        raise ConfigError(
            f"{world} ranks beginning at {first} need {world} CUDA devices from there on; "
            f"torch sees {count} in all: lower tensor_parallel or pipeline_parallel"
        )
    return torch.device("cuda", index)


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto`: bfloat16 where the hardware multiplies it, float32 elsewhere."""
    if name != "auto":
        return torch_dtype(name)
    return torch.bfloat16 if device.type == "cuda" or has_bfloat16() else torch.float32


def pick_backend(device: torch.device, threads: int) -> Backend:
    """The backend with the fastest kernels available on the device."""
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            return plain_backend(device)
        from penstock.engine.backends.cuda.backend import CudaBackend

        return CudaBackend(device)
    native = cpu.load(threads)
    return ReferenceBackend() if native is None else CpuBackend(native)


def plain_backend(device: torch.device) -> Backend:
    """The backend that needs nothing but PyTorch."""
    if device.type == "cuda":
        from penstock.engine.backends.cuda.device import TorchCudaBackend

        return TorchCudaBackend(device)
    return ReferenceBackend()
