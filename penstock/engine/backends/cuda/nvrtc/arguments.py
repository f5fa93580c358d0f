"""The arguments of a launch, as the driver wants them: an array of pointers to values of the right sizes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_void_p
from typing import Any, TypeAlias

from torch import Tensor

from penstock.engine.backends.cuda.nvrtc.driver import CudaDriverError

Argument: TypeAlias = "Tensor | ctypes._SimpleCData[Any] | ctypes.Structure | None"
"""A tensor is its address, None the null pointer. A number says its width: `c_int32(7)`; a struct goes by value."""

Dim: TypeAlias = "int | tuple[int, int, int]"


def pack(name: str, args: Sequence[Argument], sizes: Sequence[int] | None) -> tuple[Any, list[Any]]:
    """The array of pointers, and the values they point to, which must outlive the call. `sizes`: of the kernel's
    parameters in bytes, where they are known."""
    values = [_value(name, index, arg) for index, arg in enumerate(args)]
    if sizes is not None:
        given = [ctypes.sizeof(value) for value in values]
        if given != list(sizes):
            raise CudaDriverError(
                f"{name} takes {len(sizes)} parameters of {list(sizes)} bytes, but {len(given)} of {given} were given"
            )
    pointers = (c_void_p * max(1, len(values)))(*(ctypes.addressof(value) for value in values))
    return pointers, values


def dims(size: Dim) -> tuple[int, int, int]:
    """Three dimensions; one number is x."""
    return (size, 1, 1) if isinstance(size, int) else size


def _value(name: str, index: int, arg: Argument) -> Any:
    if isinstance(arg, Tensor):
        return c_void_p(arg.data_ptr())
    if arg is None:
        return c_void_p(None)
    if isinstance(arg, ctypes._SimpleCData | ctypes.Structure):
        return arg
    raise CudaDriverError(
        f"argument {index} of {name} is a {type(arg).__name__}; pass a tensor, None, or a ctypes value such as c_int32"
    )
