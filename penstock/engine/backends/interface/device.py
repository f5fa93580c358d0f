"""A device beside its operations: copies, memory, what can be measured, and the sizes of steps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.engine.pace import TILE


class Staging(Protocol):
    """Brings small host arrays to the device without waiting."""

    def upload(self, arrays: list[np.ndarray]) -> list[Tensor]:
        """Device tensors with the content and dtype of `arrays` (1-D, C-contiguous)."""
        ...


class CopyEvent(Protocol):
    """The end of a copy, or another point in what a device was given to do."""

    def synchronize(self) -> object:
        """Block until the device has come to it."""
        ...

    def query(self) -> bool:
        """Whether the device has come to it."""
        ...

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from here to a later point; the device has come to both."""
        ...


class DeviceAccess(Protocol):
    """The part of a backend that moves data between host and device."""

    device: torch.device
    in_host_memory: bool
    """Whether the device computes in host memory: arrays and tensors may be the same memory."""
    bounds_are_compiled: bool
    """Whether kernels are compiled for a bound of the context length, so that all steps must use the same one."""

    @abstractmethod
    def staging(self) -> Staging:
        """Upload buffers for one place that uploads a few times per step."""
        ...

    @abstractmethod
    def mark(self) -> CopyEvent | None:
        """The point that follows what was launched so far; None where everything launched is done."""
        ...

    @abstractmethod
    def to_host(self, *tensors: Tensor) -> tuple[list[Tensor], CopyEvent | None]:
        """Queue copies to the host behind what was launched, and the event that ends them; None: they are there."""
        ...


class DeviceMemory(Protocol):
    """The memory of one device."""

    share_of_free: float
    """Of what is free: how much a KV cache takes when no size is configured."""
    share_of_rest: float
    """The same of what this model's configured share of the device has left."""
    shared_by_ranks: bool
    """Whether all ranks of an engine take their memory from this device."""

    def available(self) -> int:
        """Bytes that can still be taken."""
        ...

    def total(self) -> int:
        """Bytes of the whole device."""
        ...

    def used(self) -> int:
        """Bytes that this process has taken."""
        ...

    def peak(self, run: Callable[[], object]) -> int:
        """Bytes that `run` needs on top of what is there; 0 where the device is not measured."""
        ...

    def trim(self, *, workspaces: bool = False) -> None:
        """Give memory that is cached but unused back to the device; with `workspaces` also what libraries keep, to
        which nothing captured may refer any more."""
        ...


class TimedStep(Protocol):
    """A recorded step that can time its kernels."""

    timed: bool

    def seconds(self) -> dict[str, tuple[int, float]]:
        """Calls in one pass, and seconds spent since this was last asked, by kernel."""
        ...


class NativeLibrary(Protocol):
    """A native library whose calls can be intercepted, for profiling."""

    lib: Any

    def replaced_by(self, other: Any) -> AbstractContextManager[None]:
        """Inside, calls go to `other`."""
        ...


@dataclass(frozen=True, slots=True)
class StepDefaults:
    """Sizes of an engine whose configuration does not say."""

    max_running: int
    token_budget: int
    encoder_token_budget: int
    gap_s: float | None = None
    """The gap between tokens that running streams keep; None: no bound."""
    gap_yields_s: float | None = 0.25
    """Prompts that wait, and take so long together, go before it: later where short pieces of them cost hardly more
    than long ones."""
    prompt_tile: int = TILE
    """Prompts that are cut short for it are cut to a multiple of so many tokens."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest steps an engine takes."""

    max_rows: int
    budget: int
    max_context: int
    block_size: int
