"""An entry of the table of endpoints, and how its handler is bound to the object that answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from penstock.gateway.app.dialects import OPENAI, Dialect
from penstock.gateway.app.exchange import Exchange
from penstock.identity import Scope
from penstock.protocol.errors import ApiError

UnboundHandler = Callable[[Any, Exchange], Awaitable[None]]
"""A method of an endpoint class, as the table names it. Its name is the operation id."""
Handler = Callable[[Exchange], Awaitable[None]]
Door = Literal["all", "public", "admin"]
"""What a port answers: everything, or, where administration has a port of its own, one part each. Health, metrics and
the documentation are behind every door."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    method: str
    path: str
    handler: UnboundHandler
    summary: str
    tag: str
    body: type[msgspec.Struct] | None = None
    form: dict[str, Any] | None = None
    """The fields of a form with a file, as a JSON schema."""
    query: type[msgspec.Struct] | None = None
    """The parameters of the query string."""
    serves_tokens: bool = False
    """Refused while draining; the drain waits for it."""
    scope: Scope | None = "inference"
    """The scope that a key needs; None: no key is needed."""
    logged: bool = True
    untyped: bool = False
    """Programs need not say that the body is JSON, because those made for this API do not."""
    dialect: Dialect = OPENAI
    other_dialects: tuple[Dialect, ...] = ()
    """Those in which errors come where the body is made for another API."""

    @property
    def name(self) -> str:
        return self.handler.__name__

    def behind(self, door: Door) -> bool:
        if door == "all" or self.scope in (None, "metrics"):
            return True
        return (self.scope == "admin") == (door == "admin")


@dataclass(frozen=True, slots=True)
class BoundEndpoint:
    """An endpoint with the handler that answers it."""

    endpoint: Endpoint
    handle: Handler


def bind(endpoints: Iterable[Endpoint], owners: Sequence[object]) -> list[BoundEndpoint]:
    """Bind each handler to the one of `owners` whose class defines it."""
    handlers = {function: handle for owner in owners for function, handle in _handlers(owner)}
    bound = []
    for endpoint in endpoints:
        handle = handlers.get(endpoint.handler)
        if handle is None:
            raise LookupError(f"nothing answers {endpoint.method} {endpoint.path} ({endpoint.name})")
        bound.append(BoundEndpoint(endpoint, handle))
    return bound


class Unavailable:
    """Stands in for an endpoint class whose feature is not configured: each of its handlers raises an error."""

    def __init__(self, kind: type, error: Callable[[str], ApiError], message: str) -> None:
        self.kind = kind
        self._error = error
        self._message = message

    async def refuse(self, exchange: Exchange) -> None:
        raise self._error(self._message)


def _handlers(owner: object) -> Iterator[tuple[object, Handler]]:
    """The public methods of an object's class, as the table names them, with what they are bound to."""
    kind = owner.kind if isinstance(owner, Unavailable) else type(owner)
    for base in kind.__mro__:
        for name, function in vars(base).items():
            if not name.startswith("_") and callable(function):
                yield function, owner.refuse if isinstance(owner, Unavailable) else getattr(owner, name)
