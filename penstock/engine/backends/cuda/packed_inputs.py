"""The inputs of a captured step: host buffers that rotate, and one device buffer at a fixed address."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_PINNED_BUFFERS = 3
"""Steps may be launched ahead of the device by one: a buffer is filled again when its copy has long been made."""
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Field:
    """One array of a captured step."""

    name: str
    kind: Any
    """A NumPy type."""
    size: int

    @property
    def nbytes(self) -> int:
        return int(self.size * np.dtype(self.kind).itemsize)


class PackedInputs:
    """All fields of one captured step, sent with a single copy."""

    def __init__(self, fields: Sequence[Field], device: torch.device) -> None:
        self._fields = {field.name: field for field in fields}
        self._begins: dict[str, int] = {}
        total = 0
        for field in fields:
            self._begins[field.name] = total
            total += -(-field.nbytes // _ALIGNMENT) * _ALIGNMENT
        pinned = device.type == "cuda"
        self.device = torch.zeros(total, dtype=torch.uint8, device=device)
        self._pinned = [torch.zeros(total, dtype=torch.uint8, pin_memory=pinned) for _ in range(_PINNED_BUFFERS)]
        self._turn = 0

    def view(self, name: str, dtype: torch.dtype) -> Tensor:
        begin = self._begins[name]
        return self.device[begin : begin + self._fields[name].nbytes].view(dtype)

    def send(self, values: Mapping[str, np.ndarray], padding: Mapping[str, int]) -> None:
        """Fill the next host buffer, pad every field to its size, and copy it over without waiting."""
        self.fill(values, padding)
        self.upload()

    def fill(self, values: Mapping[str, np.ndarray], padding: Mapping[str, int]) -> npt.NDArray[np.uint8]:
        """The next host buffer with every field, padded to its size; `upload` copies it over."""
        host = self._next()
        for name, array in values.items():
            begin, spec = self._begins[name], self._fields[name]
            field = host[begin : begin + spec.nbytes].view(spec.kind)
            field[: len(array)] = array
            field[len(array) :] = padding.get(name, 0)
        return host

    def load(self, packed: npt.NDArray[np.uint8]) -> None:
        """The same from a buffer that another rank filled."""
        self._next()[:] = packed
        self.upload()

    def upload(self) -> None:
        self.device.copy_(self._pinned[self._turn], non_blocking=True)

    def _next(self) -> npt.NDArray[np.uint8]:
        self._turn = (self._turn + 1) % _PINNED_BUFFERS
        host: npt.NDArray[np.uint8] = self._pinned[self._turn].numpy()
        return host
