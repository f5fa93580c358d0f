"""What a tool server is: functions with schemas, and a way to call them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from penstock.errors import PenstockError


class ToolError(PenstockError):
    """A tool server cannot be used as it was described, or cannot be reached."""


@dataclass(frozen=True, slots=True)
class Function:
    """Something a server can do for the model."""

    name: str
    description: str = ""
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments object."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call came to, in words for the model."""

    text: str
    ok: bool = True


class ToolServer(ABC):
    """A place where functions run."""

    @abstractmethod
    async def functions(self) -> tuple[Function, ...]:
        """What it offers now; `ToolError` when that cannot be found out."""

    @abstractmethod
    async def call(self, function: str, arguments: dict[str, Any]) -> Outcome:
        """Run a function. What goes wrong is an outcome; only a server that is away may raise `ToolError`."""

    async def close(self) -> None:
        """Let go of connections and processes; nothing by default."""
        return


def clipped(text: str, most_bytes: int) -> str:
    """At most so many bytes of a text, with a word about what is missing."""
    data = text.encode("utf-8", "replace")
    if len(data) <= most_bytes:
        return text
    return data[:most_bytes].decode("utf-8", "ignore") + f"\n[cut: the result has {len(data):,} bytes]"
