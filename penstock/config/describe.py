"""The schema as text: a reference of all keys, and an example file that is also a valid configuration."""

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
class ConfigKey:
    """One setting, formatted for display."""

    section: str
    name: str
    accepts: str
    default: str
    doc: str
    example: str
    listed: bool
    """Whether the section is a list, of whose items this is a key."""

    @property
    def path(self) -> str:
        return f"{self.section}[N].{self.name}" if self.listed else f"{self.section}.{self.name}"

    @property
    def variable(self) -> str:
        index = "0__" if self.listed else ""
        return f"{ENV_PREFIX}{self.section}__{index}{self.name.replace('.', '__')}".upper()


def keys() -> Iterator[ConfigKey]:
    """Every key, in the order of the schema."""
    for section, kind in get_type_hints(Config).items():
        cls = get_args(kind)[0] if get_origin(kind) is tuple else kind
        yield from _keys(cls, section, "", listed=get_origin(kind) is tuple)


def _keys(cls: type, section: str, prefix: str, *, listed: bool) -> Iterator[ConfigKey]:
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        default = _shown(field.default, field.metadata["size"])
        yield ConfigKey(
            section=section,
            name=prefix + field.name,
            accepts=describe_kind(hints[field.name], field.metadata),
            default=default,
            doc=field.metadata["doc"],
            example=field.metadata["example"] or default,
            listed=listed,
        )
        inner: list[type] = [
            kind for kind in get_args(hints[field.name]) if isinstance(kind, type) and dataclasses.is_dataclass(kind)
        ]
        if inner and field.default is None:  # a mapping of settings of its own, which is off by default
            yield from _keys(inner[0], section, f"{prefix}{field.name}.", listed=listed)


def example() -> str:
    """A commented file in which every key is set to its default or shown as a comment."""
    sections: dict[str, list[ConfigKey]] = {}
    for key in keys():
        if "." in key.name:
            continue  # the example of its parent shows how it is written
        sections.setdefault(key.section, []).append(key)
    hints = get_type_hints(Config)
    parts = [
        "# Penstock configuration. Every key is optional; what is shown is the default or, commented out, an example."
    ]
    defaults = Config()
    for section, members in sections.items():
        is_list = get_origin(hints[section]) is tuple
        cls = get_args(hints[section])[0] if is_list else hints[section]
        lines = [f"# {cls.__doc__}", f"{section}:"]
        items = getattr(defaults, section) if is_list else (getattr(defaults, section),)
        for number, item in enumerate(items):
            lines += _item(item, members, is_list, explained=number == 0)
        if not items:  # an example item
            lines[1:] = [f"# {line}" for line in (lines[1], *_item(cls(), members, is_list, explained=True))]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _item(item: Any, members: list[ConfigKey], is_list: bool, explained: bool) -> Iterator[str]:
    """The lines of one section or list item; with every key and its explanation when `explained`."""
    begun = False
    for key in members:
        field = next(field for field in dataclasses.fields(item) if field.name == key.name)
        value = getattr(item, key.name)
        hidden = value is None or value in ((), "")
        if hidden and not explained:
            continue
        indent = "" if not is_list else "  " if begun else "- "
        if explained:
            yield f"  {' ' * len(indent)}# {key.doc}"
        shown = key.example if value == field.default else _shown(value, field.metadata["size"])
        yield f"  {indent}{'# ' if hidden else ''}{key.name}: {shown}"
        begun = True


def _shown(default: Any, size: bool) -> str:
    if default is None:
        return "null"
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, tuple) and default and all(isinstance(item, tuple) for item in default):
        return "{" + ", ".join(f"{name}: {value}" for name, value in default) + "}"
    if isinstance(default, tuple):
        return "[" + ", ".join(str(item) for item in default) + "]"
    if size:
        return format_size(default)
    return '""' if default == "" else str(default)
