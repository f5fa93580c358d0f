"""Bytes between a device and ordinary host memory, at the speed of the bus.

A device copies fast only from and to pinned memory, and pinning as much memory as a model needs takes seconds. So bytes
pass through small pinned buffers: each copy stream fills or empties one of its two while the device copies the other.
Copying on the host is the slower half, hence several copy streams, each with a thread of its own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from penstock.machine import usable_cores

COPY_STREAMS = min(16, usable_cores())
BUFFER = 8 << 20
_PIECE = 4 * BUFFER
"""What one copy stream takes on at a time."""

Span = tuple[Tensor, Tensor]
"""Bytes on the device, and as many on the host."""


class CopyStream:
    """Two pinned buffers, a stream, and the end of each buffer's last copy. One thread uses it."""

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self._device = device
        self.stream: Any = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]
        with self.current():
            self._buffers = [torch.empty(BUFFER, dtype=torch.uint8, pin_memory=cuda) for _ in range(2)]
        self._copied: list[torch.cuda.Event | None] = [None, None]

    def current(self) -> Any:
        """Inside, work is queued on this stream."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def to_device(self, out: Tensor, fill: Callable[[Tensor, int], None]) -> None:
        """Fill `out` [bytes]: `fill(buffer, at)` writes the bytes from `at` on. On return they are there."""
        for turn, at in enumerate(range(0, out.numel(), BUFFER)):
            target = out[at : at + BUFFER]
            buffer = self._buffer(turn % 2)[: target.numel()]
            fill(buffer, at)
            self._copy(turn % 2, target, buffer)
        self._finish()

    def to_host(self, source: Tensor, drain: Callable[[Tensor, int], None]) -> None:
        """Hand over the bytes of `source`: `drain(buffer, at)` takes those from `at` on."""
        starts = range(0, source.numel(), BUFFER)
        for turn, at in enumerate(starts):
            piece = source[at : at + BUFFER]
            self._copy(turn % 2, self._buffers[turn % 2][: piece.numel()], piece)
            if turn:
                drain(self._buffer(1 - turn % 2), at - BUFFER)
        if starts:
            last = len(starts) - 1
            drain(self._buffer(last % 2)[: source.numel() - starts[last]], starts[last])

    def allocate(self, size: int) -> Tensor:
        """Device memory [bytes] to fill. Of this stream's own pool: memory of another stream may still be read by that
        stream's unfinished kernels."""
        with self.current():
            return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _buffer(self, which: int) -> Tensor:
        """A buffer whose last copy is over."""
        if (event := self._copied[which]) is not None:
            event.synchronize()
        return self._buffers[which]

    def _copy(self, which: int, target: Tensor, source: Tensor) -> None:
        with self.current():
            target.copy_(source, non_blocking=True)
            self._copied[which] = None if self.stream is None else self.stream.record_event()

    def _finish(self) -> None:
        if self.stream is not None:
            self.stream.synchronize()


def to_host(spans: Iterable[Span], device: torch.device) -> None:
    """Copy from the device. The device must be done with what it computes."""
    _carry(
        spans, device, lambda stream, there, here: stream.to_host(there, lambda buffer, at: _move(here[at:], buffer))
    )


def to_device(spans: Iterable[Span], device: torch.device) -> None:
    """Copy to the device. The device must be done with what it computes."""

    def send(stream: CopyStream, there: Tensor, here: Tensor) -> None:
        stream.to_device(there, lambda buffer, at: _move(buffer, here[at : at + buffer.numel()]))

    _carry(spans, device, send)


def _carry(spans: Iterable[Span], device: torch.device, carry: Callable[[CopyStream, Tensor, Tensor], None]) -> None:
    """In pieces, by all copy streams at once; when this returns or raises, no copy is under way."""
    pieces = iter(
        [
            (there[at : at + _PIECE], here[at : at + _PIECE])
            for there, here in spans
            for at in range(0, there.numel(), _PIECE)
        ]
    )

    @torch.inference_mode()  # a thread does not inherit it
    def run() -> None:
        stream = CopyStream(device)
        for there, here in pieces:  # a list's iterator gives each piece to one thread
            carry(stream, there, here)

    with ThreadPoolExecutor(COPY_STREAMS, thread_name_prefix="copy-stream") as pool:
        runs = [pool.submit(run) for _ in range(COPY_STREAMS)]
    for ended in runs:
        ended.result()


def hand_over(tensor: Tensor) -> None:
    """Let the current stream use memory that a copy stream allocated."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def _move(target: Tensor, source: Tensor) -> None:
    """Copy host memory in this thread, without the interpreter's lock."""
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())
