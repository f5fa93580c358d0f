"""Which part of every block, or state, one rank of an engine holds, and where that lies in a whole one.

A whole one, as engines hand it over, does not depend on how the model is spread over devices: for each tensor of the
cache, all of its layers in order, and of each layer all rows of units (KV heads, heads of a state, channels of a
convolution) in order. A rank has a run of layers, and one or more runs of units. Latents are one unit that every shard
has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Span = tuple[int, int]
"""First and one past the last."""
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class TensorPart:
    """One rank's part of one tensor's piece of every block."""

    num_layers: int
    """Of the whole model, as the units."""
    num_units: int
    layers: Span
    units: tuple[Span, ...]
    rows: int
    """Rows of units that a layer has: keys and values, or the inputs of a convolution."""
    unit_bytes: int
    gives: bool = True
    """Whether it is this rank that supplies them for whole blocks: with more shards than KV heads several have one."""

    @property
    def whole_bytes(self) -> int:
        return self.num_layers * self.rows * self.num_units * self.unit_bytes

    @property
    def own_bytes(self) -> int:
        """Of this rank's piece."""
        units = sum(last - first for first, last in self.units)
        return (self.layers[1] - self.layers[0]) * self.rows * units * self.unit_bytes

    @property
    def empty(self) -> bool:
        """Whether this rank has no layer of this kind, and so no such tensor."""
        return self.layers[0] == self.layers[1]

    def take(self, whole: memoryview | bytes, piece: memoryview) -> None:
        """Copy this part of a whole tensor's piece into the rank's own."""
        begin, alone = 0, self._alone(piece)
        for first, last in self.units:
            alone[:, :, begin : begin + last - first] = self._of(whole)[:, :, first:last]
            begin += last - first

    def put(self, piece: memoryview | bytes, whole: memoryview) -> None:
        """The other way round."""
        begin, alone = 0, self._alone(piece)
        for first, last in self.units:
            self._of(whole)[:, :, first:last] = alone[:, :, begin : begin + last - first]
            begin += last - first

    def _of(self, whole: memoryview | bytes) -> Bytes:
        shape = (self.num_layers, self.rows, self.num_units, self.unit_bytes)
        return np.frombuffer(whole, np.uint8).reshape(shape)[slice(*self.layers)]

    def _alone(self, piece: memoryview | bytes) -> Bytes:
        units = sum(last - first for first, last in self.units)
        layers = self.layers[1] - self.layers[0]
        return np.frombuffer(piece, np.uint8).reshape(layers, self.rows, units, self.unit_bytes)


@dataclass(frozen=True, slots=True)
class BlockPart:
    """One rank's part of every block: of all tensors of a whole one, in order."""

    tensors: tuple[TensorPart, ...]

    @property
    def own(self) -> list[tuple[int, TensorPart]]:
        """Those that this rank has, each with its place among all."""
        return [(index, part) for index, part in enumerate(self.tensors) if not part.empty]

    @property
    def gives(self) -> bool:
        """Whether whole blocks need something of this rank."""
        return any(part.gives for _, part in self.own)

    @property
    def whole_bytes(self) -> list[int]:
        """Of a whole block, by tensor."""
        return [part.whole_bytes for part in self.tensors]

    def take(self, whole: list[memoryview], pieces: list[memoryview]) -> None:
        """Copy this rank's part of a whole block into its own pieces."""
        for (index, part), piece in zip(self.own, pieces, strict=True):
            part.take(whole[index], piece)

    def put(self, pieces: Sequence[memoryview | bytes], whole: list[memoryview]) -> None:
        """Copy its own pieces to where they are in a whole block."""
        for (index, part), piece in zip(self.own, pieces, strict=True):
            if part.gives:
                part.put(piece, whole[index])

    def cut(self, whole: list[memoryview]) -> list[bytes]:
        """This rank's pieces of a whole block."""
        pieces = [bytearray(part.own_bytes) for _, part in self.own]
        self.take(whole, [memoryview(piece) for piece in pieces])
        return [bytes(piece) for piece in pieces]
