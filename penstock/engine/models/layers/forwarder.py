"""Objects that stand before others of the same interface and do a part of it differently."""

from __future__ import annotations

from typing import Any


class Forwarder:
    """Has everything that `base` has, beside what subclasses define."""

    def __init__(self, base: Any) -> None:
        self._base = base

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)  # a copy under construction has no `_base` yet
        return getattr(self._base, name)
