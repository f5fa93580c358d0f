"""How a request learns that a store does not answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.protocol.errors import ServiceUnavailable
from penstock.storage import DatabaseError


@contextmanager
def store_of(what: str) -> Iterator[None]:
    """Around what is asked of a store: where that cannot answer, the request fails with 503."""
    try:
        yield
    except DatabaseError as error:
        raise ServiceUnavailable(f"The store of {what} cannot be reached at the moment.") from error
