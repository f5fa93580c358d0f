"""Takes the fields that a request's struct does not know out of its JSON, and says which they were.

Only requests that strict decoding has refused come here, so ordinary ones pay nothing. Fields are unknown at any depth:
of a message, a tool, a content part. Values of fields that are known are left to strict decoding.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable
from typing import Any, cast

import msgspec
from msgspec import inspect

MOST_NAMES = 32
"""Names that are kept; a client that sends more learns that there were more."""
NAME_LENGTH = 64
MOST_HEADER = 1024


class UnknownFields:
    """What was taken out of one body."""

    __slots__ = ("names", "unnamed")

    def __init__(self) -> None:
        self.names: dict[str, Any] = {}
        """Paths without list positions, such as `messages.provider_specific_fields`, and the first value of each."""
        self.unnamed = 0
        """Paths beyond `MOST_NAMES`, not counted one by one."""

    def add(self, path: str, value: Any) -> None:
        if path in self.names:
            return
        if len(self.names) < MOST_NAMES:
            self.names[path] = value
        else:
            self.unnamed += 1


def strip_unknown(kind: type[Any], body: Any) -> tuple[bytes, UnknownFields]:
    """`body`, decoded JSON whose values need not be right, without what `kind` does not know; encoded again."""
    found = UnknownFields()
    value = _known(_described(cast(Hashable, kind)), body, "", found)
    return msgspec.json.encode(value), found


@functools.lru_cache(maxsize=256)
def _described(kind: Hashable) -> inspect.Type:
    return inspect.type_info(kind)


def _known(kind: inspect.Type, value: Any, path: str, found: UnknownFields) -> Any:
    if isinstance(value, dict):
        struct = _struct_for(kind, value)
        return value if struct is None else _known_fields(struct, value, path, found)
    if isinstance(value, list):
        items = _items_of(kind)
        return value if items is None else [_known(items, item, path, found) for item in value]
    return value


def _known_fields(struct: inspect.StructType, value: dict[str, Any], path: str, found: UnknownFields) -> dict[str, Any]:
    fields = _fields(cast(Hashable, struct.cls))
    kept = {}
    for name, inner in value.items():
        at = f"{path}.{name}" if path else name
        if name in fields:
            kept[name] = _known(fields[name], inner, at, found)
        elif name == struct.tag_field:
            kept[name] = inner
        else:
            found.add(at, inner)
    return kept


@functools.lru_cache(maxsize=256)
def _fields(kind: Hashable) -> dict[str, inspect.Type]:
    described = _described(kind)
    assert isinstance(described, inspect.StructType)
    return {field.encode_name: field.type for field in described.fields}


def _struct_for(kind: inspect.Type, value: dict[str, Any]) -> inspect.StructType | None:
    """The struct that a JSON object will be decoded as; None where it is none, or its tag fits none."""
    for candidate in _alternatives(kind):
        if isinstance(candidate, inspect.StructType) and (
            candidate.tag_field is None or value.get(candidate.tag_field) == candidate.tag
        ):
            return candidate
    return None


def _items_of(kind: inspect.Type) -> inspect.Type | None:
    for candidate in _alternatives(kind):
        if isinstance(candidate, inspect.ListType | inspect.VarTupleType):
            return candidate.item_type
    return None


def _alternatives(kind: inspect.Type) -> tuple[inspect.Type, ...]:
    if isinstance(kind, inspect.UnionType):
        return tuple(kind.types)
    if isinstance(kind, inspect.Metadata):
        return _alternatives(kind.type)
    return (kind,)


def ignored_header(names: Iterable[str], more: int) -> bytes:
    """The value of `x-penstock-ignored`. Names come from the client: nothing in them may break a header."""
    shown: list[str] = []
    size = 0
    for name in dict.fromkeys(names):
        printable = "".join(letter if letter.isalnum() or letter in "._-" else "?" for letter in name[:NAME_LENGTH])
        safe = printable.encode("ascii", "replace").decode()
        if size + len(safe) > MOST_HEADER:
            more += 1
            continue
        shown.append(safe)
        size += len(safe) + 2
    return ", ".join([*shown, f"and {more} more"] if more else shown).encode()
