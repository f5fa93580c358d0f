"""Reading GGUF files (versions 2 and 3) through a memory map.

Only the header is walked when a file is opened; string arrays (vocabulary, merges) are decoded when asked for,
and tensor bytes are views of the map. Every length and offset is checked against the file, so that a truncated
or damaged file is a `CheckpointError` here and never a crash later. No torch: the gateway reads tokenizers with this.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import CheckpointError

Bytes = npt.NDArray[np.uint8]

MAX_DIMENSIONS = 4
LONGEST_NAME = 255
"""Of a tensor; llama.cpp reads up to 63 characters."""
MAX_NESTING = 4
"""Arrays of arrays of ...: deeper than anyone writes, far from exhausting the stack."""


class GGMLType(IntEnum):
    """Storage types a GGUF tensor may have. Those with an entry in `BLOCK` can be read."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39


BLOCK: dict[GGMLType, tuple[int, int]] = {
    GGMLType.F32: (1, 4),
    GGMLType.F16: (1, 2),
    GGMLType.BF16: (1, 2),
    GGMLType.Q4_0: (32, 18),
    GGMLType.Q4_1: (32, 20),
    GGMLType.Q5_0: (32, 22),
    GGMLType.Q5_1: (32, 24),
    GGMLType.Q8_0: (32, 34),
    GGMLType.Q4_K: (256, 144),
    GGMLType.Q5_K: (256, 176),
    GGMLType.Q6_K: (256, 210),
    GGMLType.MXFP4: (32, 17),
}
"""Of each readable type: weights in a block, and bytes of a block."""

_TYPE_NAMES = {kind.value: kind.name for kind in GGMLType}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies. `shape` is in row-major order (the file stores it reversed)."""

    name: str
    type: int
    shape: tuple[int, ...]
    offset: int

    @property
    def type_name(self) -> str:
        return _TYPE_NAMES.get(self.type, f"type {self.type}")


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor as stored: `data` is uint8 [rows, bytes of a row], `shape` the shape it stands for."""

    type: GGMLType
    data: Bytes
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Array:
    """An array in the file that has been stepped over but not decoded."""

    type: int
    count: int
    start: int
    end: int


_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRUCTS = {kind: struct.Struct(code) for kind, code in _SCALARS.items()}
_STRING, _ARRAY = 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


class Metadata(Mapping[str, Any]):
    """The key-value part of a file. Strings and numbers are plain values; arrays of numbers come back as numpy
    arrays and arrays of strings as lists, decoded on first access."""

    def __init__(self, buffer: mmap.mmap, values: dict[str, Any]) -> None:
        self._buffer = buffer
        self._values = values

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if isinstance(value, _Array):
            value = self._values[key] = self._decode(value)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def _decode(self, array: _Array) -> Any:
        if array.type == _STRING:
            return self._strings(array)
        if array.type == _ARRAY:
            return [self._decode(inner) for inner in _inner_arrays(self._buffer, array)]
        dtype = np.dtype("?" if array.type == 7 else _SCALARS[array.type])
        return np.frombuffer(self._buffer, dtype, array.count, array.start)

    def _strings(self, array: _Array) -> list[str]:
        region = self._buffer[array.start : array.end]
        read_length = _U64.unpack_from
        strings = []
        position = 0
        for _ in range(array.count):
            start = position + 8
            position = start + read_length(region, position)[0]
            strings.append(region[start:position].decode("utf-8", "replace"))
        return strings


class GGUFFile:
    """One open GGUF file: `metadata`, `tensors`, and the bytes of each tensor."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                # Copy-on-write: pages stay shared with the page cache, and arrays over them count as writable,
                # which torch wants of memory it wraps.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except FileNotFoundError:
            raise CheckpointError(f"{self.path} does not exist") from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path} cannot be read: {error}") from error
        self._size = len(self._map)
        try:
            self._parse()
        except (struct.error, UnicodeDecodeError, OverflowError) as error:
            raise self._damaged("its header ends early or makes no sense") from error

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path} is not a usable GGUF file: {what}. The file is probably damaged or incomplete: "
            f"delete it and fetch it again"
        )

    def _parse(self) -> None:
        if self._map[:4] != b"GGUF":
            raise self._damaged("it does not start with the GGUF mark")
        (self.version,) = _U32.unpack_from(self._map, 4)
        if self.version not in (2, 3):
            big_endian = int.from_bytes(self._map[4:8], "big") in (2, 3)
            detail = "it is big-endian" if big_endian else f"version {self.version}"
            raise CheckpointError(f"{self.path}: {detail}; only little-endian GGUF versions 2 and 3 can be read")
        (tensor_count,) = _U64.unpack_from(self._map, 8)
        (pair_count,) = _U64.unpack_from(self._map, 16)
        position = 24
        values: dict[str, Any] = {}
        for _ in range(pair_count):
            key, position = _string(self._map, position)
            (kind,) = _U32.unpack_from(self._map, position)
            values[key], position = self._value(kind, position + 4)
        self.metadata = Metadata(self._map, values)
        infos = []
        for _ in range(tensor_count):
            info, position = self._tensor_info(position)
            infos.append(info)
        self._place(infos, position)

    def _value(self, kind: int, position: int) -> tuple[Any, int]:
        if kind == _STRING:
            return _string(self._map, position)
        if kind == _ARRAY:
            array = _step_over(self._map, position)
            if array is None or array.end > self._size:
                raise self._damaged("an array in its header makes no sense or runs past the end of the file")
            return array, array.end
        if kind not in _STRUCTS:
            raise self._damaged(f"its header holds a value of unknown type {kind}")
        reader = _STRUCTS[kind]
        return reader.unpack_from(self._map, position)[0], position + reader.size

    def _tensor_info(self, position: int) -> tuple[TensorInfo, int]:
        name, position = _string(self._map, position)
        if len(name) > LONGEST_NAME:
            raise self._damaged(f"a tensor has a name of {len(name)} characters")
        (dimensions,) = _U32.unpack_from(self._map, position)
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise self._damaged(f"tensor {name!r} has {dimensions} dimensions")
        shape = struct.unpack_from(f"<{dimensions}Q", self._map, position + 4)
        position += 4 + 8 * dimensions
        (kind,) = _U32.unpack_from(self._map, position)
        (offset,) = _U64.unpack_from(self._map, position + 4)
        return TensorInfo(name, kind, tuple(reversed(shape)), offset), position + 12

    def _place(self, infos: list[TensorInfo], header_end: int) -> None:
        """Turn offsets into file positions and check that every tensor lies inside the file."""
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise self._damaged(f"its alignment is {alignment!r}")
        data_start = -(-header_end // alignment) * alignment
        self.tensors: dict[str, TensorInfo] = {}
        for info in infos:
            placed = TensorInfo(info.name, info.type, info.shape, data_start + info.offset)
            if placed.name in self.tensors:
                raise self._damaged(f"tensor {placed.name!r} appears twice")
            if placed.type in BLOCK:
                weights, size = BLOCK[GGMLType(placed.type)]
                if placed.shape[-1] % weights:
                    raise self._damaged(f"rows of {placed.name!r} do not fill whole {placed.type_name} blocks")
                needed = prod(placed.shape) // weights * size
            else:
                needed = 0
            if placed.offset + needed > self._size:
                raise self._damaged(
                    f"tensor {placed.name!r} ends at byte {placed.offset + needed:,} of a file of {self._size:,}"
                )
            self.tensors[placed.name] = placed

    def raw(self, name: str) -> RawTensor:
        """The stored bytes of a tensor, as a view of the file."""
        info = self.tensors.get(name)
        if info is None:
            raise CheckpointError(f"{self.path} has no tensor {name!r}")
        if info.type not in BLOCK:
            readable = ", ".join(sorted(kind.name for kind in BLOCK))
            raise CheckpointError(
                f"{self.path}: tensor {name!r} is stored as {info.type_name}, which this engine does not read; "
                f"use a file quantized as one of {readable}"
            )
        weights, size = BLOCK[GGMLType(info.type)]
        row_bytes = info.shape[-1] // weights * size
        rows = prod(info.shape[:-1])
        data = np.frombuffer(self._map, np.uint8, rows * row_bytes, info.offset)
        return RawTensor(GGMLType(info.type), data.reshape(rows, row_bytes), info.shape)

    def floats(self, name: str) -> list[float]:
        """The numbers of a small float32 tensor."""
        raw = self.raw(name)
        if raw.type is not GGMLType.F32:
            raise self._damaged(f"tensor {name!r} is {raw.type.name} and should be F32")
        return [float(value) for value in raw.data.reshape(-1).view(np.float32)]


def gguf_in(path: str | Path) -> Path | None:
    """The GGUF file that `path` means: the file itself, or the only one in a folder without `config.json`."""
    path = Path(path)
    if path.is_file():
        return path if path.suffix.lower() == ".gguf" else None
    if not path.is_dir() or (path / "config.json").exists():
        return None
    found = sorted(path.glob("*.gguf"))
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise CheckpointError(f"{path} holds several GGUF files ({names}): name the one to load")
    return found[0] if found else None


def _string(buffer: mmap.mmap, position: int) -> tuple[str, int]:
    (length,) = _U64.unpack_from(buffer, position)
    end = position + 8 + length
    if end > len(buffer):
        raise struct.error("string runs past the end")
    return buffer[position + 8 : end].decode("utf-8", "replace"), end


def _step_over(buffer: mmap.mmap, position: int, depth: int = 0) -> _Array | None:
    """The extent of the array at `position`; None when it cannot be one."""
    (kind,) = _U32.unpack_from(buffer, position)
    (count,) = _U64.unpack_from(buffer, position + 4)
    start = position = position + 12
    if kind == _STRING:
        read_length = _U64.unpack_from
        for _ in range(count):
            position += 8 + read_length(buffer, position)[0]
    elif kind == _ARRAY and depth < MAX_NESTING:
        for _ in range(count):
            inner = _step_over(buffer, position, depth + 1)
            if inner is None:
                return None
            position = inner.end
    elif kind in _STRUCTS:
        position += count * _STRUCTS[kind].size
    else:
        return None
    return _Array(kind, count, start, position)


def _inner_arrays(buffer: mmap.mmap, array: _Array) -> Iterator[_Array]:
    position = array.start
    for _ in range(array.count):
        inner = _step_over(buffer, position)
        if inner is None:
            return
        yield inner
        position = inner.end
