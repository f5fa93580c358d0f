"""What an engine's start can do while Python imports: load PyTorch's libraries, have the system read the weights, and
make the CUDA context.

All run on threads of their own, outside of Python's lock, and are hints: whatever goes wrong shows when the engine
does the same in earnest.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.engine.config import EngineConfig

WEIGHTS = (".safetensors", ".gguf")
_WITH_LIBRARIES = (
    *("zlib", "bz2", "lzma", "fcntl", "subprocess", "select", "math", "datetime", "uuid", "heapq", "json", "struct"),
    *("zoneinfo", "binascii", "csv", "bisect", "random", "socket", "array", "pickle", "queue", "ssl", "asyncio"),
    *("hashlib", "contextvars", "decimal", "multiprocessing.connection", "yaml", "zmq", "msgspec", "numpy"),
)
"""Modules that are imported in any case before PyTorch is, and load libraries of their own."""


def begin(config: EngineConfig) -> None:
    """Return at once; see above."""
    _on_thread("read ahead", lambda: read_ahead(Path(config.model)))
    device = cuda_device(config.device) if config.ranks == 1 and not config.devices else None
    if device is not None and torch_has_cuda():
        _on_thread("CUDA context", lambda: make_context(device))


def begin_libraries() -> None:
    """Have PyTorch's libraries loaded and linked, a second's work, before their turn comes. Returns when it has begun.

    The system loads one library at a time. So the other ones that Python needs before PyTorch's turn come first: what
    imports them would wait for all of PyTorch's."""
    import penstock.engine  # noqa: F401 - sets what they read from the environment when they are loaded

    for name in _WITH_LIBRARIES:
        with suppress(ImportError):
            importlib.import_module(name)
    _on_thread("libraries", lambda: load_libraries(libraries()))


def libraries() -> list[Path]:
    """Those that most of that time goes into and that do not know Python; the first needs the others that there are."""
    found = importlib.util.find_spec("torch")
    folders = [] if found is None else found.submodule_search_locations or []
    names = ("libtorch_cuda.so", "libtorch_cpu.so")
    return [path for folder in folders for name in names if (path := Path(folder) / "lib" / name).exists()]


def load_libraries(paths: Sequence[Path]) -> bool:
    """Load libraries as importing them will. Not by `ctypes.CDLL`, which holds Python's lock meanwhile."""
    system = ctypes.CDLL(None)
    system.dlopen.restype = ctypes.c_void_p
    system.dlopen.argtypes = ctypes.c_char_p, ctypes.c_int
    return all(system.dlopen(os.fsencode(path), os.RTLD_NOW) for path in paths)


def read_ahead(model: Path) -> int:
    """Ask the system to read a model's files into its cache, and return how many bytes there are."""
    files = [model] if model.is_file() else sorted(file for file in model.glob("*") if file.suffix in WEIGHTS)
    asked = 0
    for path in files:
        try:
            file = os.open(path, os.O_RDONLY)
            try:
                size = os.fstat(file).st_size
                os.posix_fadvise(file, 0, size, os.POSIX_FADV_WILLNEED)
                asked += size
            finally:
                os.close(file)
        except (OSError, AttributeError):  # no such call on this system
            break
    return asked


def cuda_device(device: str) -> int | None:
    """The number of the GPU that an engine configured like this will use; None: it may use none."""
    if device in ("auto", "cuda"):
        return 0
    kind, _, number = device.partition(":")
    return int(number) if kind == "cuda" and number.isdigit() else None


def torch_has_cuda() -> bool:
    """Whether the installed PyTorch can use a GPU; asked without importing it."""
    return any(path.name == "libtorch_cuda.so" for path in libraries())


def make_context(device: int) -> bool:
    """Make the context that PyTorch will use on a GPU; False where there is none."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(handle), device):
        return False
    return not cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)


def _on_thread(name: str, work: Callable[[], object]) -> None:
    threading.Thread(target=work, name=name, daemon=True).start()
