"""What is set for a single tier, tenant or key, field by field: how it is changed and how it is stored."""

from __future__ import annotations

from typing import Self

import msgspec
from msgspec import UNSET


class Change(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """New values of some `Options`: a field that is left out stays as it is; null removes what was set."""


class Options(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Fields that are None are not set. A subclass has a `Change` with the same fields."""

    def changed(self, change: Change | None) -> Self:
        """These options with `change` applied."""
        named = {} if change is None else msgspec.structs.asdict(change)
        return msgspec.structs.replace(self, **{name: value for name, value in named.items() if value is not UNSET})

    def stored(self) -> str:
        """The stored text; empty when nothing is set."""
        return "" if self == type(self)() else msgspec.json.encode(self).decode()

    @classmethod
    def read(cls, text: str) -> Self:
        """What was stored."""
        return msgspec.json.decode(text, type=cls) if text else cls()
