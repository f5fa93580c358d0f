"""A compiled CUDA C++ kernel on a device: load it, ask what it takes, launch it.

A launch goes to PyTorch's current stream, so it is captured in CUDA graphs like any other. It returns at once; what the
kernel does wrong shows at the next synchronization.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.engine.backends.cuda.nvrtc.arguments import Argument, Dim, dims, pack
from penstock.engine.backends.cuda.nvrtc.compiler import CudaBuildError, compiler
from penstock.engine.backends.cuda.nvrtc.cubin import Defines, architecture, build
from penstock.engine.backends.cuda.nvrtc.driver import (
    COOPERATIVE,
    OVERLAP,
    Attribute,
    CudaDriverError,
    LaunchConfig,
    call,
    driver,
    has,
    processors_of_context,
)

_MAX_THREADS, _SHARED, _LOCAL, _REGISTERS, _MAX_DYNAMIC_SHARED, _CARVEOUT = 0, 1, 3, 4, 8, 9
"""CU_FUNC_ATTRIBUTE_*."""
_FREE_SHARED = 48 * 1024
"""What a kernel may have without asking."""
_INVALID_VALUE = 1

_loaded: dict[tuple[object, ...], Kernel] = {}


@dataclass(frozen=True, slots=True)
class Resources:
    """What a kernel takes of a multiprocessor."""

    registers: int
    local_bytes: int
    """Of a thread; more than a few are spilled registers."""
    shared_bytes: int
    """Without dynamic shared memory."""
    max_threads: int


class Kernel:
    """One entry of a loaded module. Modules stay loaded: captured graphs may refer to them."""

    def __init__(self, cubin: bytes, entry: str, device: torch.device) -> None:
        self.name = entry
        self.device = device
        with torch.cuda.device(device):
            torch.cuda.current_stream(device).query()  # makes the device's context the current one
            self._module, self._function = c_void_p(), c_void_p()
            call("cuModuleLoadData", byref(self._module), c_char_p(cubin))
            call("cuModuleGetFunction", byref(self._function), self._module, c_char_p(entry.encode()))
            self.resources = Resources(*(self._attribute(i) for i in (_REGISTERS, _LOCAL, _SHARED, _MAX_THREADS)))
        self._sizes = self._parameter_sizes()
        self._allowed_shared = _FREE_SHARED - self.resources.shared_bytes
        self._resident: dict[tuple[int, int], int] = {}

    def launch(
        self,
        grid: Dim,
        block: Dim,
        args: Sequence[Argument],
        *,
        shared_bytes: int = 0,
        cooperative: bool = False,
        overlap: bool = False,
    ) -> None:
        """On the current stream. `cooperative`: all blocks run at once, or the launch fails. `overlap`: may begin while
        the kernel before it ends (programmatic dependent launch); it then calls wait_dependencies()."""
        pointers, values = pack(self.name, args, self._sizes)
        self._allow_shared(shared_bytes)
        wanted = [id for id, on in ((COOPERATIVE, cooperative), (OVERLAP, overlap)) if on]
        attributes = (Attribute * max(1, len(wanted)))(*(Attribute(id=id, value=1) for id in wanted))
        config = LaunchConfig(
            (c_uint * 3)(*dims(grid)), (c_uint * 3)(*dims(block)), shared_bytes,
            torch.cuda.current_stream(self.device).cuda_stream, attributes, len(wanted),
        )  # fmt: skip
        with torch.cuda.device(self.device):
            call("cuLaunchKernelEx", byref(config), self._function, pointers, None)
        del values

    def resident_blocks(self, block: Dim, shared_bytes: int = 0) -> int:
        """How many blocks the device runs at once: the largest grid of a cooperative launch."""
        x, y, z = dims(block)
        key = x * y * z, shared_bytes
        if key not in self._resident:
            self._allow_shared(shared_bytes)
            count = c_int(0)
            with torch.cuda.device(self.device):
                call(
                    "cuOccupancyMaxActiveBlocksPerMultiprocessor",
                    byref(count), self._function, c_int(key[0]), c_size_t(shared_bytes),
                )  # fmt: skip
                processors = int(torch.cuda.get_device_properties(self.device).multi_processor_count)
                self._resident[key] = count.value * min(processors, processors_of_context() or processors)
        return self._resident[key]

    def _allow_shared(self, shared_bytes: int) -> None:
        if shared_bytes > self._allowed_shared:
            with torch.cuda.device(self.device):
                call("cuFuncSetAttribute", self._function, c_int(_MAX_DYNAMIC_SHARED), c_int(shared_bytes))
                # All of it, not just what one block takes: else no kernel that needs some runs beside this one.
                call("cuFuncSetAttribute", self._function, c_int(_CARVEOUT), c_int(100))
            self._allowed_shared = shared_bytes

    def _attribute(self, which: int) -> int:
        value = c_int(0)
        call("cuFuncGetAttribute", byref(value), c_int(which), self._function)
        return value.value

    def _parameter_sizes(self) -> list[int] | None:
        """None where the driver is too old to say."""
        if not has("cuFuncGetParamInfo"):
            return None
        sizes: list[int] = []
        offset, size = c_size_t(0), c_size_t(0)
        while True:
            failed = driver().cuFuncGetParamInfo(self._function, c_size_t(len(sizes)), byref(offset), byref(size))
            if failed == _INVALID_VALUE:  # there are no more
                return sizes
            if failed:
                return None
            sizes.append(size.value)


def kernel(
    device: torch.device,
    name: str | Path,
    entry: str,
    *,
    defines: Defines | None = None,
    options: Sequence[str] = (),
) -> Kernel:
    """The function `entry` of a source in `csrc/`; once per process, device and macros. Raises `CudaBuildError` or
    `CudaDriverError`."""
    index = torch.cuda.current_device() if device.index is None else device.index
    key = (index, str(name), entry, tuple(sorted((defines or {}).items())), tuple(options))
    if key not in _loaded:
        placed = torch.device("cuda", index)
        arch = architecture(torch.cuda.get_device_capability(placed))
        _loaded[key] = Kernel(build(name, defines=defines, options=options, arch=arch), entry, placed)
    return _loaded[key]


def unavailable() -> str | None:
    """Why CUDA C++ kernels cannot be compiled and run here; None if they can."""
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA device"
    try:
        compiler()
        driver()
    except (CudaBuildError, CudaDriverError) as error:
        return str(error)
    return None if has("cuLaunchKernelEx") else "the CUDA driver is older than 11.8: update it"
