"""CUDA C++ kernels on the CPU: g++ compiles the same source against `emulation/`, and every CUDA thread is a fiber.

An `EmulatedKernel` is launched like a `Kernel` of the engine, on CPU tensors. It is for numerics and for the mistakes
that are hard to find on a device: deadlocks, races (run several seeds), accesses outside of shared memory. It says
nothing about speed, and nothing about memory order: a fence that is missing does not show.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from ctypes import byref, c_size_t, c_uint, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.engine.backends.build_cache import cache_dir, cached
from penstock.engine.backends.cuda.nvrtc.arguments import Argument, Dim, dims, pack
from penstock.engine.backends.cuda.nvrtc.cubin import SOURCES, macros

HERE = Path(__file__).resolve().parent / "emulation"
_FLAGS = (
    "-std=c++17", "-O1", "-fPIC", "-shared", "-fno-strict-aliasing", "-Wno-unknown-pragmas", "-U_FORTIFY_SOURCE",
    "-fsanitize=alignment,bounds", "-fsanitize-undefined-trap-on-error",
)  # fmt: skip
_ENTRY = re.compile(r'extern "C" __global__ void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\(')
_MAX_PARAMETERS = 64
_MESSAGE_BYTES = 4096

_kept: list[mmap.mmap] = []


class EmulationError(Exception):
    """What the kernel did wrong, or why it cannot be built."""


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("seed", c_uint),
        ("cooperative", c_uint),
    )


class EmulatedKernel:
    def __init__(self, library: Path, entry: str) -> None:
        self.name = entry
        self._library = ctypes.CDLL(str(library))
        self._launch = getattr(self._library, f"launch_{entry}")
        parameters = getattr(self._library, f"parameters_{entry}")
        parameters.restype = c_size_t
        sizes = (c_size_t * _MAX_PARAMETERS)()
        count = parameters(sizes, c_size_t(_MAX_PARAMETERS))
        self._sizes = list(sizes[:count])

    def launch(
        self,
        grid: Dim,
        block: Dim,
        args: Sequence[Argument],
        *,
        shared_bytes: int = 0,
        cooperative: bool = False,
        overlap: bool = False,
        seed: int = 0,
    ) -> None:
        """Until the kernel has ended. The blocks of a cooperative launch run together, those of another in waves. No
        kernel runs before it, so `overlap` changes nothing. Raises `EmulationError`."""
        pointers, _values = pack(self.name, args, self._sizes)
        config = _Config((c_uint * 3)(*dims(grid)), (c_uint * 3)(*dims(block)), shared_bytes, seed, cooperative)
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        if self._launch(byref(config), pointers, message, c_size_t(_MESSAGE_BYTES)):
            raise EmulationError(f"{self.name}: {message.value.decode(errors='replace')}")


def compiler() -> str | None:
    """The C++ compiler of this machine, if it has one."""
    found = (shutil.which(name) for name in (os.environ.get("CXX"), "g++", "c++") if name)
    return next((path for path in found if path), None)


def emulate(name: str | Path, entry: str, *, defines: Mapping[str, int | float | str] | None = None) -> EmulatedKernel:
    """The function `entry` of a source in the engine's `csrc/`, or at a path. Raises `EmulationError`."""
    source = SOURCES / name
    path = compiler()
    if path is None:
        raise EmulationError("no C++ compiler (looked for $CXX, g++, c++)")
    entries = _ENTRY.findall(source.read_text())
    if entry not in entries:
        raise EmulationError(f'{source.name} has no kernel `extern "C" __global__ void {entry}(`, but {entries}')
    unit = f'#include "{source}"\n' + "".join(f"PENSTOCK_EMULATED({known})\n" for known in entries)
    flags = [*_FLAGS, "-DPENSTOCK_EMULATION=1", *macros(defines or {}), f"-I{SOURCES}", f"-I{HERE}"]
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    key = hashlib.sha256("\0".join((path, version, unit, *flags)).encode())
    for text in (source, *sorted(SOURCES.glob("*.cuh")), *sorted(HERE.glob("*.h"))):
        key.update(text.read_bytes())
    target = cache_dir("emulation") / f"{source.stem}-{key.hexdigest()[:24]}.so"

    def made() -> bytes:
        scratch = target.with_suffix(f".{os.getpid()}.tmp")
        command = [path, *flags, "-x", "c++", "-", "-o", str(scratch)]
        done = subprocess.run(command, input=unit, capture_output=True, text=True, check=False)
        if done.returncode:
            raise EmulationError(f"g++ cannot compile {source.name}:\n{done.stderr[:4000]}")
        library = scratch.read_bytes()
        scratch.unlink()
        return library

    cached(target, made)
    return EmulatedKernel(target, entry)


def guarded(tensor: Tensor) -> Tensor:
    """A copy that ends where an unmapped page begins: a kernel that reads or writes behind it is caught."""
    page = mmap.PAGESIZE
    size = tensor.numel() * tensor.element_size()
    room = (size + page - 1) // page * page
    mapped = mmap.mmap(-1, room + page)
    _kept.append(mapped)  # tensors do not own it
    start = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    if protect(c_void_p(start + room), c_size_t(page), 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    buffer: Any = (ctypes.c_char * size).from_address(start + room - size) if size else bytearray(1)
    flat = torch.frombuffer(buffer, dtype=tensor.dtype, count=tensor.numel()) if size else tensor.new_empty(0)
    return flat.view(tensor.shape).copy_(tensor)
