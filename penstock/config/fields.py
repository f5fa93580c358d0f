"""Declaring a setting: a dataclass field that carries its default, allowed range and explanation."""

from __future__ import annotations

import dataclasses
import importlib
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
    share: bool = False,
    several: bool = False,
    choices: str = "",
    example: str | None = None,
) -> Any:
    """A documented field. `size`: bytes, which may be written as "2GiB". `off`: text that may be the word off, which
    YAML reads as false. `share`: a number from 0 to 1, which may be written as "5%". `several`: labels of which each
    may have one of several values. `choices`: the registry (`module:NAME`) whose keys are the allowed values. It is
    looked up when a value is checked, because registries of implementations lie in layers above this one. `example`:
    shown instead of the default where that says little."""
    least, most = (0, 1) if share else (least, most)
    metadata: Mapping[str, Any] = {
        "doc": doc, "least": least, "most": most, "size": size, "off": off, "share": share, "several": several,
        "choices": choices, "example": example,
    }  # fmt: skip
    return dataclasses.field(default=default, metadata=metadata)


def choices_of(metadata: Mapping[str, Any]) -> list[str]:
    """The values that a field with `choices` accepts; none for any other field."""
    if not metadata.get("choices"):
        return []
    module, _, name = metadata["choices"].partition(":")
    return list(getattr(importlib.import_module(module), name))
