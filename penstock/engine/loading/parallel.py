"""Reading safetensors ahead of the builder of a model, several tensors at a time, straight to a device.

A tensor's bytes go from the page cache (or the disk) through a copy stream's pinned buffers to their place in device
memory, one copy stream per thread. Tensors are read in the order of layers, a bounded number of bytes ahead of the last
one asked for, so that peak memory is the model and that little more.
"""

from __future__ import annotations

import json
import os
import re
import threading
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from penstock.engine.backends.copy_streams import COPY_STREAMS, CopyStream, hand_over
from penstock.errors import CheckpointError

_AHEAD = 2 << 30
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a tensor lies."""

    file: Path
    offset: int
    size: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def stored_tensors(file: Path) -> dict[str, Stored]:
    """The tensors of one safetensors file, from its header."""
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    found = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            dtype = _DTYPES.get(entry["dtype"])
            if dtype is None:
                raise CheckpointError(f"{file}: {name!r} has type {entry['dtype']}, which is not supported")
            found[name] = Stored(file, 8 + length + begin, end - begin, dtype, tuple(entry["shape"]))
    return found


def layer_order(name: str) -> tuple[int, str]:
    """Sorts names as a decoder is built: what belongs to no layer first, then layer after layer."""
    match = re.search(r"\.(\d+)\.", name)
    return (-1 if match is None else int(match.group(1)), name)


def _read(stream: CopyStream, stored: Stored) -> Tensor:
    out = stream.allocate(stored.size)
    with open(stored.file, "rb", buffering=0) as file:

        def fill(buffer: Tensor, at: int) -> None:
            if _fill(file.fileno(), buffer, stored.offset + at) < buffer.numel():
                raise CheckpointError(f"{stored.file} is cut short: fetch it again")

        stream.to_device(out, fill)
    return out.view(stored.dtype).view(stored.shape)


def _fill(descriptor: int, buffer: Tensor, offset: int) -> int:
    """Read until `buffer` is full or the file ends; how much was read."""
    view, done = buffer.numpy(), 0
    while done < len(view):
        got = os.preadv(descriptor, [view[done:].data], offset + done)
        if got == 0:
            break
        done += got
    return done


class ParallelReader:
    """Tensors of a set of files on one device. Each can be asked for once ahead of time and again later."""

    def __init__(self, files: set[Path], device: torch.device) -> None:
        self.device = device
        self._stored = {name: entry for file in files for name, entry in stored_tensors(file).items()}
        self._order = sorted(self._stored, key=layer_order)
        self._place = {name: index for index, name in enumerate(self._order)}
        self._pending: dict[str, Future[Tensor]] = {}
        self._next = 0
        self._streams = threading.local()
        self._pool = ThreadPoolExecutor(COPY_STREAMS, thread_name_prefix="weights")
        weakref.finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)

    def begin(self) -> None:
        """Read the first tensors before any is asked for."""
        self._read_ahead(0)

    def end(self) -> None:
        """Read nothing ahead any more, and drop what nobody has asked for."""
        self._next = len(self._order)
        for future in self._pending.values():
            future.cancel()
        self._pending.clear()

    def tensor(self, name: str) -> Tensor:
        self._read_ahead(self._place[name])
        future = self._pending.pop(name, None) or self._pool.submit(self._read, name)
        tensor = future.result()
        hand_over(tensor)
        return tensor

    def _read_ahead(self, place: int) -> None:
        ahead = sum(self._stored[name].size for name in self._pending)
        while self._next < len(self._order) and (ahead < _AHEAD or self._next <= place):
            name = self._order[self._next]
            self._pending[name] = self._pool.submit(self._read, name)
            ahead += self._stored[name].size
            self._next += 1

    def _read(self, name: str) -> Tensor:
        stream: CopyStream | None = getattr(self._streams, "stream", None)
        if stream is None:
            stream = self._streams.stream = CopyStream(self.device)
        return _read(stream, self._stored[name])
