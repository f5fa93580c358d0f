"""CUDA C++ kernels, compiled where they run: NVRTC comes with PyTorch, so no machine needs a CUDA toolkit.

The sources are in `csrc/` beside this folder. `kernel` compiles one for a device, or takes it from the cache, and loads
it; a `Kernel` is launched on PyTorch's current stream. Where `unavailable` gives a reason, callers use Triton instead.
"""

from penstock.engine.backends.cuda.nvrtc.compiler import CudaBuildError
from penstock.engine.backends.cuda.nvrtc.cubin import SOURCES, architecture, build, report
from penstock.engine.backends.cuda.nvrtc.driver import CudaDriverError, is_shared
from penstock.engine.backends.cuda.nvrtc.kernels import Kernel, Resources, kernel, unavailable

__all__ = [
    "SOURCES",
    "CudaBuildError",
    "CudaDriverError",
    "Kernel",
    "Resources",
    "architecture",
    "build",
    "is_shared",
    "kernel",
    "report",
    "unavailable",
]
