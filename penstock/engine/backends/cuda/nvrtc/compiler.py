"""NVRTC, NVIDIA's run-time compiler: which library, and CUDA C++ to machine code with it.

PyTorch's CUDA builds bring the library as a package of their own (`nvidia/cuda_nvrtc` for CUDA 12, `nvidia/cu13` from
13 on); a CUDA toolkit has it too. One of PyTorch's own CUDA version is preferred: the driver that runs PyTorch then
runs the result.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch

from penstock.errors import PenstockError

_LIBRARY = re.compile(r"libnvrtc(-[0-9a-f]+)?\.so(\.[\d.]+)?$")
"""Not its builtins, which have a name of their own."""
_OLDEST = (12, 0)
"""The first that knows `sm_90a`."""


class CudaBuildError(PenstockError):
    """A CUDA C++ kernel cannot be compiled here; the engine runs the same operations in Triton instead."""


class Compiler:
    """A loaded NVRTC."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # It opens its builtins by name only: found if they are loaded already, wherever they lie.
        for builtins in sorted(path.parent.glob("libnvrtc-builtins*.so*")):
            try:
                ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
            except OSError:  # of another version that lies there too
                continue
        try:
            self._library = ctypes.CDLL(str(path))
            self._library.nvrtcGetErrorString.restype = c_char_p
        except (OSError, AttributeError) as error:
            raise CudaBuildError(f"{path} cannot be loaded: {error}") from error
        major, minor = c_int(0), c_int(0)
        self._call("nvrtcVersion", byref(major), byref(minor))
        self.version = (major.value, minor.value)

    def compile(self, source: str, name: str, headers: Mapping[str, str], options: Sequence[str]) -> tuple[bytes, str]:
        """Machine code (a cubin) of a source text that includes `headers` by their names, and what was said of it."""
        program = c_void_p()
        texts = (c_char_p * len(headers))(*(text.encode() for text in headers.values()))
        names = (c_char_p * len(headers))(*(header.encode() for header in headers))
        self._call(
            "nvrtcCreateProgram", byref(program), c_char_p(source.encode()), c_char_p(name.encode()),
            c_int(len(headers)), texts, names,
        )  # fmt: skip
        try:
            flags = (c_char_p * len(options))(*(option.encode() for option in options))
            failed = self._library.nvrtcCompileProgram(program, c_int(len(options)), flags)
            log = self._read("nvrtcGetProgramLog", program).rstrip(b"\0").decode(errors="replace").strip()
            if failed:
                raise CudaBuildError(f"compiling {name} failed ({self._reason(failed)}):\n{log[-4000:]}")
            return self._read("nvrtcGetCUBIN", program), log
        finally:
            self._library.nvrtcDestroyProgram(byref(program))

    def _read(self, what: str, program: c_void_p) -> bytes:
        size = c_size_t(0)
        self._call(f"{what}Size", program, byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(what, program, buffer)
        return buffer.raw

    def _call(self, name: str, *args: Any) -> None:
        try:
            failed = getattr(self._library, name)(*args)
        except AttributeError as error:
            raise CudaBuildError(f"{self.path} is too old: it has no {name}; install a newer PyTorch") from error
        if failed:
            raise CudaBuildError(f"{name} of {self.path} failed: {self._reason(failed)}")

    def _reason(self, code: int) -> str:
        return str((self._library.nvrtcGetErrorString(c_int(code)) or b"?").decode())


@cache
def compiler() -> Compiler:
    """The NVRTC of this machine. Raises `CudaBuildError` if there is none that works."""
    problems: list[str] = []
    for path in candidates():
        try:
            found = Compiler(path)
        except CudaBuildError as error:
            problems.append(str(error))
            continue
        if found.version >= _OLDEST:
            return found
        problems.append(f"{path} is version {found.version[0]}.{found.version[1]}, 12.0 or later is needed")
    raise CudaBuildError(
        f"no usable libnvrtc: {'; '.join(problems) or 'none found'}. PyTorch for CUDA brings one "
        "(package nvidia-cuda-nvrtc); CUDA_HOME may name a toolkit that has it"
    )


def candidates() -> list[Path]:
    """Where an NVRTC lies, the best first: of PyTorch's CUDA version, then newest."""
    wanted = (torch.version.cuda or "").split(".")[0]
    found = {path.resolve(): None for folder in _folders() if folder.is_dir() for path in _libraries(folder)}

    def order(path: Path) -> tuple[bool, list[int]]:
        numbers = [int(part) for part in re.findall(r"\d+", path.name.partition(".so")[2])]
        return bool(wanted) and numbers[:1] == [int(wanted)], numbers

    return sorted(found, key=order, reverse=True)


def _libraries(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.iterdir()) if _LIBRARY.match(path.name))


def _folders() -> Iterator[Path]:
    for site in dict.fromkeys((str(Path(torch.__file__).parents[1]), *sys.path)):
        for package in ("cuda_nvrtc", "cu13", "cu12"):
            yield Path(site or ".") / "nvidia" / package / "lib"
    yield Path(torch.__file__).parent / "lib"
    for toolkit in filter(None, (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")):
        yield from (Path(toolkit) / "lib64", Path(toolkit) / "lib")
    for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":"):
        if folder:
            yield Path(folder)
