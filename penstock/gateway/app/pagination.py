"""Lists that are read page by page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec


class NoQuery(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Nothing may stand behind the question mark."""


class Shown(Protocol):
    """Something with an id that can be in a list."""

    def shown(self) -> dict[str, Any]: ...


def page(found: Sequence[Shown], limit: int) -> dict[str, Any]:
    """A list as the wire has it, from one entry more than was asked for."""
    return listed([entry.shown() for entry in found], limit)


def listed(found: Sequence[dict[str, Any]], limit: int) -> dict[str, Any]:
    """The same from entries that are written out already."""
    entries = found[:limit]
    return {
        "object": "list",
        "data": entries,
        "first_id": entries[0]["id"] if entries else None,
        "last_id": entries[-1]["id"] if entries else None,
        "has_more": len(found) > limit,
    }
