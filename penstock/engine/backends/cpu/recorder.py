"""Recording what a decoder does: its native calls, and the memory they work on.

While a `Recorder` replaces the library, nothing is computed. Every native call becomes a list of 64-bit words, as
recorded_step.cpp reads them; every tensor made meanwhile lives in an arena at a fixed address. Where the number of rows
is an argument of a call, its position is noted, to be filled in before each run.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.engine.backends.cpu.native import PROTOTYPES
from penstock.errors import PenstockError

_ALIGNMENT: Final = 64
TOKENS: Final = 0
SEQUENCES: Final = 1
SAMPLES: Final = 2
_STRUCT_COUNTS: Final = {
    "pk_linear": ("rows", TOKENS),
    "pk_linear_sample": ("rows", TOKENS),
    "pk_dense": ("rows", TOKENS),
    "pk_float8": ("rows", TOKENS),
    "pk_mxfp4": ("rows", TOKENS),
    "pk_rope_and_cache": ("tokens", TOKENS),
    "pk_attention": ("sequences", SEQUENCES),
    "pk_lora": ("tokens", TOKENS),
}
"""Of functions that take a struct: its field with the number of rows. Others have it as their first int64."""


class NotRecordableError(PenstockError):
    """The pass did something that cannot be recorded."""


@dataclass(slots=True)
class Arena:
    """Memory of the recording. A block is given out again once every tensor on it is gone."""

    blocks: list[tuple[Any, weakref.ref[Any] | None]] = field(default_factory=list)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        count = int(np.prod(shape, dtype=np.int64))
        size = max(count, 1) * dtype.itemsize
        free = [
            (block.nbytes, index)
            for index, (block, user) in enumerate(self.blocks)
            if block.nbytes >= size + _ALIGNMENT and (user is None or user() is None)
        ]
        if not free:
            self.blocks.append((np.zeros(size + _ALIGNMENT, np.uint8), None))
        index = min(free)[1] if free else len(self.blocks) - 1
        block = self.blocks[index][0]
        start = -block.ctypes.data % _ALIGNMENT
        # torch keeps the array it was made from alive as long as any tensor shares its memory.
        array = block[start : start + size]
        self.blocks[index] = (block, weakref.ref(array))
        return torch.from_numpy(array).view(dtype)[:count].view(shape)

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block, _ in self.blocks)


_VIEWS: Final = frozenset(
    (
        "_unsafe_view",
        "alias",
        "as_strided",
        "detach",
        "expand",
        "select",
        "slice",
        "split",
        "t",
        "transpose",
        "unsqueeze",
        "view",
    )
)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces the library, and watches what torch is asked to do besides."""

    def __init__(self, lib: ctypes.CDLL) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._lib = lib
        self.arena = Arena()
        self.names: list[str] = []
        self.words: list[Any] = []
        self.patches: list[tuple[int, int, int]] = []
        self.rows = TOKENS
        """Which count the rows of what is recorded now have."""
        self.kept: list[Any] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch would import its compiler, seconds and tens of megabytes, to keep it away from this class."""
        return False

    def __getattr__(self, name: str) -> Callable[..., int]:
        if not name.startswith("pk_"):
            raise AttributeError(name)
        return lambda _, *arguments: self.record(name, arguments)

    def record(self, name: str, arguments: tuple[Any, ...]) -> int:
        if not hasattr(self._lib, f"{name}_recorded"):
            raise NotRecordableError(f"{name} cannot be recorded")
        kinds = PROTOTYPES[name][1][1:]
        words = (ctypes.c_uint64 * max(1, len(kinds)))()
        for index, (kind, value) in enumerate(zip(kinds, arguments, strict=True)):
            if hasattr(value, "_obj"):  # byref(struct)
                self.kept.append(value._obj)
                words[index] = ctypes.addressof(value._obj)
            else:
                ctypes.memmove(ctypes.byref(words, 8 * index), ctypes.byref(kind(value)), ctypes.sizeof(kind))
        self.names.append(name)
        self.words.append(words)
        if name in _STRUCT_COUNTS:
            label, counted = _STRUCT_COUNTS[name]
            where = getattr(type(arguments[0]._obj), label)
            self.patches.append((words[0] + where.offset, where.size, self.rows if counted == TOKENS else counted))
        else:
            first = kinds.index(ctypes.c_int64)
            self.patches.append((ctypes.addressof(words) + 8 * first, 8, self.rows))
        return 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = func._schema.name.removeprefix("aten::"), kwargs or {}
        if name in _VIEWS:
            return func(*args, **kwargs)
        if name == "empty":
            return self.arena.take(tuple(args[0]), kwargs.get("dtype") or torch.get_default_dtype())
        if name == "empty_like":
            return self.arena.take(tuple(args[0].shape), kwargs.get("dtype") or args[0].dtype)
        if name == "embedding":
            return self._embedding(*args[:2])
        raise NotRecordableError(f"{func} is not a native call")

    def _embedding(self, table: Tensor, ids: Tensor) -> Tensor:
        if not table.is_contiguous() or not ids.is_contiguous() or ids.dtype is not torch.int64:
            raise NotRecordableError("the embedding is not a dense table of rows")
        out = self.arena.take((*ids.shape, table.shape[1]), table.dtype)
        width = table.shape[1] * table.element_size()
        arguments = (ids.data_ptr(), table.data_ptr(), out.data_ptr(), ids.shape[0], table.shape[0], width)
        self.record("pk_embed", arguments)
        return out

    def drop_from(self, calls: int, patches: int) -> None:
        """Forget what was recorded after these."""
        del self.names[calls:], self.words[calls:], self.patches[patches:]
