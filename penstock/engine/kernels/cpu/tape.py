"""A forward pass recorded once and run again in one native call: what CUDA graphs are on a GPU.

The decoder's Python runs a single time with the library replaced by a recorder: nothing is computed, every native call
is written down, and every tensor made on the way lives in an arena where it stays. A step then copies its inputs to
the addresses of the recording, says how many tokens, sequences and samples it has, and runs the list as far as it
needs it: to the hidden states, to the logits, or to the tokens drawn from them. A pass that does anything but native
calls (an expert router, a vendor's matmul) cannot be recorded, and its decoder runs as it is.
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
from penstock.engine.kernels.interface import AttentionBatch, Floats, HostBatch, Ints
from penstock.errors import PenstockError

log = logging.getLogger(__name__)

_ALIGNMENT: Final = 64
_TOKENS: Final = 0
_SEQUENCES: Final = 1
_SAMPLES: Final = 2
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
        self.rows = _TOKENS
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
            label, counted = _STRUCT_COUNTS[name]
            where = getattr(type(arguments[0]._obj), label)
            self.patches.append((words[0] + where.offset, where.size, self.rows if counted == _TOKENS else counted))
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


Forward = Callable[[Tensor, AttentionBatch, Any], Tensor]
Head = Callable[[Tensor], Tensor]


class Tape:
    """A recorded step of up to `tokens` tokens of `sequences` sequences, behind which up to `samples` are drawn."""

    def __init__(
        self,
        ops: CpuOps,
        forward: Forward,
        head: Head,
        kv: Any,
        block_tables: Tensor,
        *,
        tokens: int,
        sequences: int,
        samples: int,
    ) -> None:
        self._ops = ops
        self._tokens, self._sequences, self._samples = tokens, sequences, samples
        self._kv, self._tables = kv, block_tables
        inputs = AttentionBatch(
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
        ids = torch.zeros(tokens, dtype=torch.int64)
        at = torch.zeros(samples, dtype=torch.int64)
        temperatures = torch.zeros(samples, dtype=torch.float32)
        keys = torch.zeros(samples, dtype=torch.int64)
        recorder = _Recorder(ops.handle.lib)
        with ops.handle.replaced_by(recorder), recorder:
            self.hidden = forward(ids, inputs, kv)
            """Final hidden states; as everything that a tape gives, in memory that the next run overwrites."""
            self._to_hidden = len(recorder.names)
            recorder.rows = _SAMPLES
            self._logits = _record_head(recorder, head, self.hidden, at)
            self._to_logits, drawn = len(recorder.names), at
            if self._logits is not None:
                drawn = ops.gumbel_argmax(self._logits, temperatures, keys)
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
        self._counts = (ctypes.c_int64 * 3)()
        # Arrays over the memory of the recorded inputs: filling one costs a tenth of a tensor operation.
        self._ids, self._positions, self._slots = ids.numpy(), inputs.positions.numpy(), inputs.slots.numpy()
        self._query_starts, self._context_lens = inputs.query_starts.numpy(), inputs.context_lens.numpy()
        self._rows = inputs.rows.numpy()
        self._at, self._temperatures, self._keys = at.numpy(), temperatures.numpy(), keys.numpy()
        self._drawn = drawn.numpy()
        self.timed = False
        """Whether runs add up the time of each call; see `seconds`."""

    @property
    def nbytes(self) -> int:
        """Memory held for what a pass makes on its way."""
        return self._arena.nbytes

    @property
    def has_head(self) -> bool:
        """Whether logits and draws are part of it."""
        return self._logits is not None

    def fits(self, step: HostBatch, samples: int, block_tables: Tensor, kv: Any) -> bool:
        """Whether this step is one of those recorded."""
        return (
            len(step.token_ids) <= self._tokens
            and len(step.rows) <= self._sequences
            and samples <= self._samples
            and block_tables is self._tables
            and kv is self._kv
        )

    def forward(self, step: HostBatch) -> Tensor:
        """The hidden states of a step's tokens."""
        self._run(self._to_hidden, step, 0)
        return self.hidden[: len(step.token_ids)]

    def logits(self, step: HostBatch, at: Ints) -> Tensor:
        """float32 [S, vocab] behind the tokens with the packed indices `at`."""
        assert self._logits is not None
        self._at[: len(at)] = at
        self._run(self._to_logits, step, len(at))
        return self._logits[: len(at)]

    def draw(self, step: HostBatch, at: Ints, temperatures: Floats, keys: Ints | None) -> Ints:
        """int64 [S]: tokens drawn behind those, as `Ops.gumbel_argmax` does; without keys all are greedy."""
        count = len(at)
        self._at[:count] = at
        self._temperatures[:count] = temperatures
        if keys is not None:
            self._keys[:count] = keys
        self._run(len(self.names), step, count)
        return self._drawn[:count].copy()

    def _run(self, calls: int, step: HostBatch, samples: int) -> None:
        tokens, sequences = len(step.token_ids), len(step.rows)
        self._ids[:tokens] = step.token_ids
        self._positions[:tokens] = step.positions
        self._slots[:tokens] = step.slots
        self._query_starts[: sequences + 1] = step.query_starts
        self._context_lens[:sequences] = step.context_lens
        self._rows[:sequences] = step.rows
        counts, handle = self._counts, self._ops.handle
        counts[_TOKENS], counts[_SEQUENCES], counts[_SAMPLES] = tokens, sequences, samples
        stopped = handle.lib.pk_run(
            handle.pointer, self._calls, calls, self._patches, len(self._patches), counts, self.timed
        )
        if stopped:
            name, code = self.names[stopped // 256], stopped % 256
            raise LayoutError(_FAILURES.get((name, code), f"{name} stopped with code {code}"))

    def seconds(self) -> dict[str, tuple[int, float]]:
        """Calls in one pass, and seconds spent since the last time this was asked, by function."""
        totals: dict[str, tuple[int, float]] = {}
        for name, call in zip(self.names, self._calls, strict=True):
            calls, spent = totals.get(name, (0, 0.0))
            totals[name] = calls + 1, spent + call.nanoseconds / 1e9
            call.nanoseconds = 0
        return totals


def _record_head(recorder: _Recorder, head: Head, hidden: Tensor, at: Tensor) -> Tensor | None:
    """Logits behind chosen tokens; None, and nothing recorded, where the head is not a native one."""
    calls, patches = len(recorder.names), len(recorder.patches)
    try:
        logits = head(torch.nn.functional.embedding(at, hidden))
        if logits.dtype is torch.float32:
            return logits
    except NotRecordableError as reason:
        log.info("the head is not recorded: %s", str(reason))
    del recorder.names[calls:], recorder.words[calls:], recorder.patches[patches:]
    return None


def record(
    ops: CpuOps,
    forward: Forward,
    head: Head,
    kv: Any,
    block_tables: Tensor,
    *,
    tokens: int,
    sequences: int,
    samples: int,
) -> Tape | None:
    """A tape of a step, or None where it does something that cannot be recorded."""
    try:
        with torch.inference_mode():
            tape = Tape(ops, forward, head, kv, block_tables, tokens=tokens, sequences=sequences, samples=samples)
    except NotRecordableError as reason:
        log.info("the forward pass is not recorded: %s", str(reason))  # the error itself would keep the cache alive
        return None
    return tape
