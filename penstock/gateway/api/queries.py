"""Query parameters and pages: a parameter is known or refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol
from urllib.parse import parse_qs

from penstock.gateway.exchange import Exchange
from penstock.protocol.errors import InvalidRequest


class Shown(Protocol):
    """Something with an id that can be in a list."""

    def shown(self) -> dict[str, Any]: ...


def query(exchange: Exchange, *known: str) -> dict[str, str]:
    """What was asked for after the `?`; the last of one name counts."""
    asked = parse_qs(exchange.scope["query_string"].decode("latin-1"), keep_blank_values=True)
    for name in asked:
        if name not in known:
            there = f"; there are {', '.join(known)}" if known else ""
            raise InvalidRequest(f"Unknown parameter: `{name[:64]}`{there}.", param=name[:64])
    return {name: values[-1] for name, values in asked.items()}


def whole_number(asked: dict[str, str], name: str, default: int, most: int) -> int:
    text = asked.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 9 and 1 <= int(text) <= most):
        raise InvalidRequest(f"`{name}` must be a whole number from 1 to {most}.", param=name)
    return int(text)


def page(found: Sequence[Shown], limit: int) -> dict[str, Any]:
    """A list as the wire has it, from one entry more than was asked for."""
    entries = [entry.shown() for entry in found[:limit]]
    return {
        "object": "list",
        "data": entries,
        "first_id": entries[0]["id"] if entries else None,
        "last_id": entries[-1]["id"] if entries else None,
        "has_more": len(found) > limit,
    }
