"""The few calls of the CUDA driver that PyTorch has no names for, and its errors."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_char_p, c_int, c_uint, c_void_p
from functools import cache
from typing import Any

import torch

from penstock.errors import PenstockError

COOPERATIVE = 2
OVERLAP = 6
"""CU_LAUNCH_ATTRIBUTE_COOPERATIVE, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION."""

_HINTS = {
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "the kernel was compiled for another GPU: remove the cache folder penstock/cuda",
    "CUDA_ERROR_INVALID_SOURCE": "the cached kernel is damaged: remove the cache folder penstock/cuda",
    "CUDA_ERROR_INVALID_IMAGE": "the cached kernel is damaged: remove the cache folder penstock/cuda",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": "the GPU driver is older than PyTorch's CUDA: update the driver",
    "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE": "the blocks do not all fit on the GPU at once: launch fewer",
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES": "too many threads or registers in a block: launch fewer threads",
    "CUDA_ERROR_INVALID_VALUE": "grid, block or shared memory are beyond the device's limits",
}


_MPS_ENABLED = 133
"""CU_DEVICE_ATTRIBUTE_MPS_ENABLED."""
_RESOURCE_SM = 1
"""CU_DEV_RESOURCE_TYPE_SM."""


class CudaDriverError(PenstockError):
    """A CUDA C++ kernel could not be loaded or launched."""


class Attribute(ctypes.Structure):
    """CUlaunchAttribute with a value that is one integer."""

    _fields_ = (
        ("id", c_int),
        ("pad", ctypes.c_char * 4),
        ("value", c_int),
        ("rest", ctypes.c_char * 60),
    )


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("num_attributes", c_uint),
    )


class _Resource(ctypes.Structure):
    """CUdevResource with multiprocessors, and more room than any version of it takes."""

    _fields_ = (
        ("type", c_int),
        ("internal", ctypes.c_char * 92),
        ("processors", c_uint),
        ("rest", ctypes.c_char * 412),
    )


@cache
def driver() -> ctypes.CDLL:
    """Raises `CudaDriverError` where there is no driver."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaDriverError(f"there is no CUDA driver here: {error}") from error


def call(name: str, *args: Any) -> None:
    """Raises `CudaDriverError` with the driver's name of the error and what to do about it."""
    library = driver()
    failed = getattr(library, name)(*args)
    if failed:
        text = c_char_p()
        library.cuGetErrorName(c_int(failed), byref(text))
        reason = (text.value or str(failed).encode()).decode()
        hint = _HINTS.get(reason)
        raise CudaDriverError(f"{name} failed: {reason}{f': {hint}' if hint else ''}")


def has(name: str) -> bool:
    """Whether the installed driver knows this call."""
    return hasattr(driver(), name)


def is_shared(device: torch.device) -> bool:
    """Whether processes run beside each other on `device` (MPS); False where the driver is too old to say."""
    ordinal, shared = c_int(0), c_int(0)
    call("cuDeviceGet", byref(ordinal), c_int(device.index or 0))
    failed = driver().cuDeviceGetAttribute(byref(shared), c_int(_MPS_ENABLED), ordinal)
    return not failed and bool(shared.value)


def processors_of_context() -> int | None:
    """Multiprocessors that the current context may use, fewer than the device has in a green context; None where the
    driver is too old to say."""
    context, resource = c_void_p(), _Resource()
    if not has("cuCtxGetDevResource") or driver().cuCtxGetCurrent(byref(context)):
        return None
    if driver().cuCtxGetDevResource(context, byref(resource), c_int(_RESOURCE_SM)):
        return None
    return resource.processors or None
