"""Values between ranks as bytes: numbers, text, containers, arrays, tensors and a few records; never code.

Rank 0 and a rank on another machine trust each other with the model, not with running whatever they are sent, so
nothing between them is pickled. What is decoded consists of the types below; a record is a dataclass that is listed
here or marked (`record`).
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from penstock.engine.adapters.spec import AdapterSpec, AdapterStatus
from penstock.engine.config import EngineConfig
from penstock.engine.parallel.layout import Place
from penstock.errors import PenstockError

T = TypeVar("T")

_SIZE = struct.Struct("<Q")
_INT = struct.Struct("<q")
_FLOAT = struct.Struct("<d")
_ARRAYS = "biufc"
"""Kinds of numpy arrays that are nothing but numbers (with `?`, booleans)."""


class NotPlain(PenstockError):
    """A value that cannot be sent, or bytes that are no value."""


_RECORDS: dict[str, type[Any]] = {kind.__name__: kind for kind in (AdapterSpec, AdapterStatus, EngineConfig, Place)}


def record(kind: type[T]) -> type[T]:
    """Let a dataclass be sent, as its fields; decorate those whose constructors only store them."""
    _RECORDS[kind.__name__] = kind
    return kind


def encode(value: Any) -> bytes:
    parts: list[bytes] = []
    _write(value, parts.append)
    return b"".join(parts)


def decode(data: bytes) -> Any:
    try:
        value, end = _read(memoryview(data), 0)
    except (struct.error, IndexError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise NotPlain(f"these bytes are no value: {type(error).__name__}: {error}") from error
    if end != len(data):
        raise NotPlain("these bytes are more than one value")
    return value


def send(connection: Connection, value: Any) -> None:
    connection.send_bytes(encode(value))


def receive(connection: Connection) -> Any:
    """The next value; EOFError when the other end is gone."""
    return decode(connection.recv_bytes())


def _write(value: Any, put: Callable[[bytes], None]) -> None:
    if value is None:
        put(b"N")
    elif isinstance(value, (bool, np.bool_)):
        put(b"T" if value else b"F")
    elif isinstance(value, (int, np.integer)):
        _write_int(int(value), put)
    elif isinstance(value, (float, np.floating)):
        put(b"d" + _FLOAT.pack(float(value)))
    elif isinstance(value, str):
        _write_bytes(b"s", value.encode(), put)
    elif isinstance(value, (bytes, bytearray, memoryview)):
        _write_bytes(b"b", bytes(value), put)
    elif isinstance(value, Path):
        _write_bytes(b"p", str(value).encode(), put)
    elif isinstance(value, (list, tuple)):
        put((b"l" if isinstance(value, list) else b"t") + _SIZE.pack(len(value)))
        for item in value:
            _write(item, put)
    elif isinstance(value, dict):
        put(b"m" + _SIZE.pack(len(value)))
        for key, item in value.items():
            _write(key, put)
            _write(item, put)
    elif isinstance(value, np.ndarray):
        _write_array(value, put)
    elif dataclasses.is_dataclass(value) and _RECORDS.get(type(value).__name__) is type(value):
        put(b"c")
        _write(type(value).__name__, put)
        _write({field.name: getattr(value, field.name) for field in dataclasses.fields(value)}, put)
    else:
        _write_tensor(value, put)


def _write_int(value: int, put: Callable[[bytes], None]) -> None:
    if -(1 << 63) <= value < 1 << 63:
        put(b"i" + _INT.pack(value))
    else:
        _write_bytes(b"I", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True), put)


def _write_bytes(tag: bytes, data: bytes, put: Callable[[bytes], None]) -> None:
    put(tag + _SIZE.pack(len(data)))
    put(data)


def _write_array(array: np.ndarray[Any, Any], put: Callable[[bytes], None]) -> None:
    if array.dtype.kind not in _ARRAYS and array.dtype != np.bool_:
        raise NotPlain(f"an array of {array.dtype} cannot be sent between ranks")
    put(b"a")
    _write((array.dtype.str, array.shape), put)
    _write_bytes(b"b", np.ascontiguousarray(array).tobytes(), put)


def _write_tensor(value: Any, put: Callable[[bytes], None]) -> None:
    import torch

    if not isinstance(value, torch.Tensor):
        raise NotPlain(f"a {type(value).__name__} cannot be sent between ranks")
    put(b"x")
    _write((str(value.dtype).removeprefix("torch."), tuple(value.shape)), put)
    _write_bytes(b"b", tensor_bytes(value), put)


def tensor_bytes(tensor: Any) -> bytes:
    """The numbers of a tensor, row by row."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data: bytes = flat.view(torch.uint8).numpy().tobytes()
    return data


def _take(data: memoryview, at: int) -> tuple[memoryview, int]:
    (size,) = _SIZE.unpack_from(data, at)
    begin, end = at + _SIZE.size, at + _SIZE.size + size
    if end > len(data):
        raise IndexError("they end too early")
    return data[begin:end], end


def _read(data: memoryview, at: int) -> tuple[Any, int]:
    tag, at = bytes(data[at : at + 1]), at + 1
    if tag in _CONSTANTS:
        return _CONSTANTS[tag], at
    if tag == b"i":
        return _INT.unpack_from(data, at)[0], at + _INT.size
    if tag == b"d":
        return _FLOAT.unpack_from(data, at)[0], at + _FLOAT.size
    if tag in _TEXTS:
        found, at = _take(data, at)
        return _TEXTS[tag](bytes(found)), at
    if tag in (b"l", b"t"):
        (count,) = _SIZE.unpack_from(data, at)
        at += _SIZE.size
        items = []
        for _ in range(count):
            item, at = _read(data, at)
            items.append(item)
        return (items if tag == b"l" else tuple(items)), at
    if tag == b"m":
        (count,) = _SIZE.unpack_from(data, at)
        at += _SIZE.size
        found_items = {}
        for _ in range(count):
            key, at = _read(data, at)
            found_items[key], at = _read(data, at)
        return found_items, at
    if tag == b"c":
        name, at = _read(data, at)
        fields, at = _read(data, at)
        return _RECORDS[name](**fields), at
    if tag in (b"a", b"x"):
        (kind, shape), at = _read(data, at)
        content, at = _read(data, at)
        return (_array if tag == b"a" else _tensor)(kind, shape, content), at
    raise ValueError(f"no type is called {tag!r}")


def _array(kind: str, shape: tuple[int, ...], content: bytes) -> np.ndarray[Any, Any]:
    dtype = np.dtype(kind)
    if dtype.kind not in _ARRAYS and dtype != np.bool_:
        raise ValueError(f"an array of {dtype}")
    return np.frombuffer(content, dtype).reshape(shape).copy()


def _tensor(kind: str, shape: tuple[int, ...], content: bytes) -> Any:
    import torch

    dtype = getattr(torch, kind)
    if not isinstance(dtype, torch.dtype) or len(content) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(content)} bytes are no {kind} tensor of {shape}")
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(dtype).reshape(shape)


_CONSTANTS: dict[bytes, Any] = {b"N": None, b"T": True, b"F": False}
_TEXTS: dict[bytes, Callable[[bytes], Any]] = {
    b"s": bytes.decode,
    b"b": bytes,
    b"p": lambda found: Path(found.decode()),
    b"I": lambda found: int.from_bytes(found, "little", signed=True),
}
