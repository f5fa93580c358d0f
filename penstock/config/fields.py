"""How a setting is declared: its default, range and explanation travel with the field."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


def setting(
    default: Any = dataclasses.MISSING,
    *,
    doc: str,
    least: float | None = None,
    most: float | None = None,
    size: bool = False,
    example: str | None = None,
) -> Any:
    """A documented field. `size`: bytes, also written as "2GiB". `example`: shown where the default says little."""
    metadata: Mapping[str, Any] = {"doc": doc, "least": least, "most": most, "size": size, "example": example}
    return dataclasses.field(default=default, metadata=metadata)
