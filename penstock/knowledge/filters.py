"""Filters on the metadata of documents. A comparison holds between values of one kind: text, numbers or booleans. A
document without the key passes `ne` and `nin` only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from penstock.knowledge.entities import Attribute

_attributes = msgspec.json.Decoder(dict[str, Attribute])


@dataclass(frozen=True, slots=True)
class Comparison:
    kind: Literal["eq", "ne", "gt", "gte", "lt", "lte"]
    key: str
    value: Attribute

    def matches(self, metadata: Mapping[str, Attribute]) -> bool:
        found = metadata.get(self.key)
        if self.kind == "ne":
            return found is None or not _equal(found, self.value)
        if found is None:
            return False
        if self.kind == "eq":
            return _equal(found, self.value)
        order = _order(found, self.value)
        if order is None:
            return False
        return {"gt": order > 0, "gte": order >= 0, "lt": order < 0, "lte": order <= 0}[self.kind]


@dataclass(frozen=True, slots=True)
class Membership:
    """`values`: see `of`; looked up, since there may be hundreds of them for every document."""

    kind: Literal["in", "nin"]
    key: str
    values: frozenset[tuple[type, Attribute]]

    @classmethod
    def of(cls, kind: Literal["in", "nin"], key: str, values: Iterable[Attribute]) -> Membership:
        return cls(kind, key, frozenset((_kind(value), value) for value in values))

    def matches(self, metadata: Mapping[str, Attribute]) -> bool:
        found = metadata.get(self.key)
        among = found is not None and (_kind(found), found) in self.values
        return among is (self.kind == "in")


@dataclass(frozen=True, slots=True)
class Compound:
    kind: Literal["and", "or"]
    parts: tuple[AttributeFilter, ...]

    def matches(self, metadata: Mapping[str, Attribute]) -> bool:
        found = (part.matches(metadata) for part in self.parts)
        return all(found) if self.kind == "and" else any(found)


AttributeFilter = Comparison | Membership | Compound


def passing(documents: Iterable[tuple[str, str]], wanted: AttributeFilter) -> Sequence[str]:
    """The ids of the documents that a filter lets through; their metadata is JSON."""
    return [id for id, metadata in documents if wanted.matches(_attributes.decode(metadata))]


def _kind(value: Attribute) -> type:
    return float if isinstance(value, int) and not isinstance(value, bool) else type(value)


def _equal(found: Attribute, value: Attribute) -> bool:
    return _kind(found) is _kind(value) and found == value


def _order(found: Attribute, value: Attribute) -> int | None:
    """Negative, zero or positive; None for values that have no order."""
    if isinstance(found, str) and isinstance(value, str):
        return (found > value) - (found < value)
    if _kind(found) is float and _kind(value) is float:
        assert not isinstance(found, str) and not isinstance(value, str)
        return (found > value) - (found < value)
    return None
