"""What the table of endpoints says of each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from penstock.gateway.app.dialects import OPENAI, Dialect
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.process.service import Service
from penstock.identity import Scope

Handler = Callable[[Service, Exchange], Awaitable[None]]
Door = Literal["all", "public", "admin"]
"""What a port answers: everything, or, where administration has a port of its own, one part each. Health, metrics and
the documentation are behind every door."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    method: str
    path: str
    handler: Handler
    summary: str
    tag: str
    body: type[msgspec.Struct] | None = None
    form: dict[str, Any] | None = None
    """The fields of one that is sent a form with a file, as a JSON schema."""
    query: type[msgspec.Struct] | None = None
    """What may stand behind the question mark."""
    hot: bool = False
    """Answered without entering FastAPI."""
    serves_tokens: bool = False
    """Refused while draining, and waited for."""
    scope: Scope | None = "inference"
    """What a key must be allowed to do; None: no key is needed."""
    logged: bool = True
    documented: bool = True
    dialect: Dialect = OPENAI

    def behind(self, door: Door) -> bool:
        if door == "all" or self.scope in (None, "metrics"):
            return True
        return (self.scope == "admin") == (door == "admin")
