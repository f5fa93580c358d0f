"""Paginated lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec


class NoQuery(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """For endpoints without query parameters."""


class Shown(Protocol):
    """Something with an id that can be listed."""

    def shown(self) -> dict[str, Any]: ...


def page(found: Sequence[Shown], limit: int) -> dict[str, Any]:
    """A page for clients. `found` has one entry more than `limit` when there is another page."""
    return listed([entry.shown() for entry in found], limit)


def listed(found: Sequence[dict[str, Any]], limit: int) -> dict[str, Any]:
    """The same from entries that are dictionaries already."""
    entries = found[:limit]
    return {
        "object": "list",
        "data": entries,
        "first_id": entries[0]["id"] if entries else None,
        "last_id": entries[-1]["id"] if entries else None,
        "has_more": len(found) > limit,
    }
