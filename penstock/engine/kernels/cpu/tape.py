"""A forward pass recorded once and run again in one native call: what CUDA graphs are on a GPU.

The decoder's Python runs a single time with the library replaced by a recorder: nothing is computed, every native call
is written down, and every tensor made on the way lives in an arena where it stays. A step then copies its inputs to
the addresses of the recording, says how many tokens and sequences it has, and runs the list. A pass that does
anything but native calls (an expert router, a vendor's matmul) cannot be recorded, and its decoder runs as it is.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.engine.kernels.cpu.native import PROTOTYPES
from penstock.engine.kernels.cpu.ops import CpuOps, LayoutError
from penstock.engine.kernels.interface import AttentionBatch
from penstock.errors import PenstockError

log = logging.getLogger(__name__)

_ALIGNMENT: Final = 64
_TOKENS: Final = 0
_SEQUENCES: Final = 1
_STRUCT_COUNTS: Final = {
    "pk_linear": ("rows", _TOKENS),
    "pk_dense": ("rows", _TOKENS),
    "pk_rope_and_cache": ("tokens", _TOKENS),
    "pk_attention": ("sequences", _SEQUENCES),
    "pk_lora": ("tokens", _TOKENS),
}
"""Of functions that take a struct: its field with the number of rows. Others have it as their first int64."""
_FAILURES: Final = {
    ("pk_embed", 1): "a token id is outside the embedding table",
    ("pk_lora", 1): "an adapter's token is not one of the step",
    ("pk_rope_and_cache", 1): "a position is outside the rotary table",
    ("pk_rope_and_cache", 2): "a slot is outside the cache",
}


class _Call(ctypes.Structure):
    """Mirror of `Call` in tape.cpp."""

    _fields_ = (("run", ctypes.c_void_p), ("words", ctypes.c_void_p), ("nanoseconds", ctypes.c_int64))


class _Patch(ctypes.Structure):
    """Mirror of `Patch` in tape.cpp."""

    _fields_ = (("at", ctypes.c_void_p), ("bytes", ctypes.c_int32), ("count", ctypes.c_int32))


class NotRecordableError(PenstockError):
    """The pass did something that no tape can repeat."""


@dataclass(slots=True)
class _Arena:
    """Memory of the recording. A block is given out again once every tensor on it is gone."""

    blocks: list[tuple[Any, weakref.ref[Any] | None]] = field(default_factory=list)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        count = int(np.prod(shape, dtype=np.int64))
        size = max(1, count * dtype.itemsize)
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


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Stands in for the library, and watches what torch is asked to do beside it."""

    def __init__(self, lib: ctypes.CDLL) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._lib = lib
        self.arena = _Arena()
        self.names: list[str] = []
        self.words: list[Any] = []
        self.patches: list[tuple[int, int, int]] = []
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
        if not hasattr(self._lib, f"{name}_taped"):
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
            label, count = _STRUCT_COUNTS[name]
            where = getattr(type(arguments[0]._obj), label)
            self.patches.append((words[0] + where.offset, where.size, count))
        else:
            first = kinds.index(ctypes.c_int64)
            self.patches.append((ctypes.addressof(words) + 8 * first, 8, _TOKENS))
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


Forward = Callable[[Tensor, AttentionBatch, Any], Tensor]


class Tape:
    """A recorded forward pass for up to `tokens` tokens of `sequences` sequences."""

    def __init__(
        self, ops: CpuOps, forward: Forward, kv: Any, block_tables: Tensor, *, tokens: int, sequences: int
    ) -> None:
        self._ops = ops
        self._tokens, self._sequences = tokens, sequences
        self._kv, self._tables = kv, block_tables
        self._inputs = AttentionBatch(
            positions=torch.zeros(tokens, dtype=torch.int64),
            slots=torch.zeros(tokens, dtype=torch.int64),
            query_starts=torch.zeros(sequences + 1, dtype=torch.int32),
            context_lens=torch.zeros(sequences, dtype=torch.int32),
            rows=torch.zeros(sequences, dtype=torch.int32),
            block_tables=block_tables,
            num_decodes=0,
            max_query=tokens,
            max_context=1,
        )
        self._ids = torch.zeros(tokens, dtype=torch.int64)
        recorder = _Recorder(ops.handle.lib)
        with ops.handle.replaced_by(recorder), recorder:
            self._out = forward(self._ids, self._inputs, kv)
        self.names = recorder.names
        self._words, self._kept, self._arena = recorder.words, recorder.kept, recorder.arena
        lib = ops.handle.lib
        self._calls = (_Call * len(self.names))(
            *(
                _Call(ctypes.cast(getattr(lib, f"{name}_taped"), ctypes.c_void_p), ctypes.addressof(words), 0)
                for name, words in zip(self.names, self._words, strict=True)
            )
        )
        self._patches = (_Patch * len(recorder.patches))(*(_Patch(*patch) for patch in recorder.patches))
        self._counts = (ctypes.c_int64 * 2)()
        self.timed = False
        """Whether runs add up the time of each call; see `seconds`."""

    @property
    def nbytes(self) -> int:
        """Memory held for what a pass makes on its way."""
        return self._arena.nbytes

    def fits(self, token_ids: Tensor, batch: AttentionBatch, kv: Any) -> bool:
        """Whether this step is one of those recorded."""
        return (
            token_ids.shape[0] <= self._tokens
            and batch.context_lens.shape[0] <= self._sequences
            and batch.block_tables is self._tables
            and kv is self._kv
        )

    def __call__(self, token_ids: Tensor, batch: AttentionBatch) -> Tensor:
        """The final hidden states, in memory that the next run overwrites."""
        tokens, sequences = token_ids.shape[0], batch.context_lens.shape[0]
        inputs = self._inputs
        self._ids[:tokens].copy_(token_ids)
        inputs.positions[:tokens].copy_(batch.positions)
        inputs.slots[:tokens].copy_(batch.slots)
        inputs.query_starts[: sequences + 1].copy_(batch.query_starts)
        inputs.context_lens[:sequences].copy_(batch.context_lens)
        inputs.rows[:sequences].copy_(batch.rows)
        self._counts[_TOKENS], self._counts[_SEQUENCES] = tokens, sequences
        handle = self._ops.handle
        stopped = handle.lib.pk_run(
            handle.pointer, self._calls, len(self._calls), self._patches, len(self._patches), self._counts, self.timed
        )
        if stopped:
            name, code = self.names[stopped // 256], stopped % 256
            raise LayoutError(_FAILURES.get((name, code), f"{name} stopped with code {code}"))
        return self._out[:tokens]

    def seconds(self) -> dict[str, tuple[int, float]]:
        """Calls in one pass, and seconds spent since the last time this was asked, by function."""
        totals: dict[str, tuple[int, float]] = {}
        for name, call in zip(self.names, self._calls, strict=True):
            calls, spent = totals.get(name, (0, 0.0))
            totals[name] = calls + 1, spent + call.nanoseconds / 1e9
            call.nanoseconds = 0
        return totals


def record(ops: CpuOps, forward: Forward, kv: Any, block_tables: Tensor, *, tokens: int, sequences: int) -> Tape | None:
    """A tape of `forward`, or None where it does something that cannot be recorded."""
    try:
        with torch.inference_mode():
            tape = Tape(ops, forward, kv, block_tables, tokens=tokens, sequences=sequences)
    except NotRecordableError as reason:
        log.info("the forward pass is not recorded: %s", str(reason))  # the error itself would keep the cache alive
        return None
    return tape
