"""The schema in words: a reference of every key, and an example file that is also a valid configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args, get_origin, get_type_hints

from penstock.config.check import describe_kind
from penstock.config.schema import Config
from penstock.config.tree import ENV_PREFIX
from penstock.config.units import format_size


@dataclass(frozen=True, slots=True)
class Key:
    """One setting, ready to be shown."""

    section: str
    name: str
    accepts: str
    default: str
    doc: str
    example: str

    @property
    def path(self) -> str:
        return f"{self.section}[N].{self.name}" if self.section == "models" else f"{self.section}.{self.name}"

    @property
    def variable(self) -> str:
        index = "0__" if self.section == "models" else ""
        return f"{ENV_PREFIX}{self.section}__{index}{self.name}".upper()


def keys() -> Iterator[Key]:
    """Every key, in the order of the schema."""
    for section, kind in get_type_hints(Config).items():
        cls = get_args(kind)[0] if get_origin(kind) is tuple else kind
        hints = get_type_hints(cls)
        for field in dataclasses.fields(cls):
            default = _shown(field.default, field.metadata["size"])
            yield Key(
                section=section,
                name=field.name,
                accepts=describe_kind(hints[field.name], field.metadata),
                default=default,
                doc=field.metadata["doc"],
                example=field.metadata["example"] or default,
            )


def example() -> str:
    """A commented file in which every key is either set to its default or shown, commented out."""
    sections: dict[str, list[Key]] = {}
    for key in keys():
        sections.setdefault(key.section, []).append(key)
    hints = get_type_hints(Config)
    parts = [
        "# Penstock configuration. Every key is optional; what is shown is the default or, commented out, an example."
    ]
    for section, members in sections.items():
        is_list = get_origin(hints[section]) is tuple
        cls = get_args(hints[section])[0] if is_list else hints[section]
        lines = [f"# {cls.__doc__}", f"{section}:"]
        for position, key in enumerate(members):
            indent = "  - " if is_list and position == 0 else "    " if is_list else "  "
            lines.append(f"{' ' * len(indent)}# {key.doc}")
            hidden = "# " if key.default in ("null", "[]", '""') else ""
            lines.append(f"{indent}{hidden}{key.name}: {key.example}")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _shown(default: Any, size: bool) -> str:
    if default is None:
        return "null"
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, tuple):
        return "[" + ", ".join(str(item) for item in default) + "]"
    if size:
        return format_size(default)
    return '""' if default == "" else str(default)
