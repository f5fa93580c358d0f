"""The interface of tool servers: functions with schemas, and a way to call them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from penstock.errors import PenstockError


class ToolError(PenstockError):
    """A tool server is described wrongly, or cannot be reached."""


@dataclass(frozen=True, slots=True)
class Function:
    """A function of a tool server."""

    name: str
    description: str = ""
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments object."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a call, as text for the model."""

    text: str
    ok: bool = True


class ToolServer(ABC):
    """Runs functions."""

    @abstractmethod
    async def functions(self) -> tuple[Function, ...]:
        """Its current functions; `ToolError` when they cannot be listed."""

    @abstractmethod
    async def call(self, function: str, arguments: dict[str, Any]) -> Outcome:
        """Runs a function. Failures are outcomes; only an unreachable server raises `ToolError`."""

    async def close(self) -> None:
        """Closes connections and processes; does nothing by default."""
        return


def clipped(text: str, most_bytes: int) -> str:
    """The text truncated to `most_bytes`, with a note about the missing part."""
    data = text.encode("utf-8", "replace")
    if len(data) <= most_bytes:
        return text
    return data[:most_bytes].decode("utf-8", "ignore") + f"\n[cut: the result has {len(data):,} bytes]"
