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
    off: bool = False,
    example: str | None = None,
) -> Any:
    """A documented field. `size`: bytes, also written as "2GiB". `off`: a text that may be the word off, which YAML
    reads as false. `example`: shown where the default says little."""
    metadata: Mapping[str, Any] = {
        "doc": doc, "least": least, "most": most, "size": size, "off": off, "example": example
    }  # fmt: skip
    return dataclasses.field(default=default, metadata=metadata)
