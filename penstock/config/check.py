"""Checks a parsed configuration against the schema and builds its frozen dataclasses, collecting every mistake.

Each message says where the value comes from (file and line, variable or flag), which key it is, what was found, what is
allowed, and for a mistyped key the nearest valid one.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
from collections.abc import Mapping
from datetime import date
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from penstock.config.fields import choices_of
from penstock.config.labels import ALTERNATIVE, LabelPairs, label_problem
from penstock.config.schema import Config
from penstock.config.tree import Node
from penstock.config.units import SHARE_HELP, SIZE_HELP, parse_share, parse_size

_INVALID: Any = object()
MOST_SHOWN = 80
"""Characters of a wrong value that an error repeats: of a file that is no configuration, all may be one value."""


class Checker:
    """One pass over one tree; `problems` lists the mistakes in the order they were found."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def section(self, cls: type, node: Node, path: str) -> Any:
        """An instance of the dataclass `cls`; missing and invalid keys take their defaults."""
        if node.value is None:
            return cls()
        if not isinstance(node.value, dict):
            self._problem(node, path, f"expected a mapping of settings, found {_shown(node.value)}")
            return cls()
        fields = {field.name: field for field in dataclasses.fields(cls)}
        hints = get_type_hints(cls)
        values: dict[str, Any] = {}
        for key, child in node.value.items():
            where = f"{path}.{key}" if path else key
            if key not in fields:
                self._problem(child, where, _unknown(key, list(fields)))
                continue
            value = self.value(hints[key], fields[key].metadata, child, where)
            if value is not _INVALID:
                values[key] = value
        return cls(**values)

    def value(self, kind: Any, metadata: Mapping[str, Any], node: Node, path: str) -> Any:
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            return self.section(kind, node, path)
        if kind == LabelPairs:
            return self._labels(metadata, node, path)
        if get_origin(kind) is tuple:
            return self._items(get_args(kind)[0], metadata, node, path)
        options = [kind]
        if get_origin(kind) in (Union, types.UnionType):
            options = [option for option in get_args(kind) if option is not types.NoneType]
            if node.value is None and len(options) < len(get_args(kind)):
                return None
            if dataclasses.is_dataclass(options[0]) and isinstance(options[0], type):
                return self.section(options[0], node, path)
            if get_origin(options[0]) is tuple:
                return self._items(get_args(options[0])[0], metadata, node, path)
        if get_origin(options[0]) is dict:
            return self._mapping(get_args(options[0])[1], metadata, node, path)
        value = _scalar(options[0], metadata, node)
        if value is _INVALID:
            found = _shown(node.value if node.text is None else node.text)
            self._problem(node, path, f"expected {describe_kind(kind, metadata)}, found {found}")
        return value

    def _items(self, kind: Any, metadata: Mapping[str, Any], node: Node, path: str) -> Any:
        items = node.value
        if node.text is not None and isinstance(items, str | int | float) and kind is str:
            items = [Node(part.strip(), node.origin) for part in node.text.split(",") if part.strip()]
        if not isinstance(items, list):
            self._problem(node, path, f"expected a list, found {_shown(node.value)}")
            return _INVALID
        values = [self.value(kind, metadata, item, f"{path}[{index}]") for index, item in enumerate(items)]
        return _INVALID if any(value is _INVALID for value in values) else tuple(values)

    def _mapping(self, kind: Any, metadata: Mapping[str, Any], node: Node, path: str) -> Any:
        if not isinstance(node.value, dict):
            self._problem(node, path, f"expected a mapping of names, found {_shown(node.value)}")
            return _INVALID
        values = {key: self.value(kind, metadata, child, f"{path}.{key}") for key, child in node.value.items()}
        return _INVALID if any(value is _INVALID for value in values.values()) else values

    def _labels(self, metadata: Mapping[str, Any], node: Node, path: str) -> Any:
        """A mapping of labels, or pairs, as `dump` writes them; in a demand a label may have several values."""
        given = node.value
        if isinstance(given, list):
            listed_pairs = [one.value for one in given if isinstance(one.value, list) and len(one.value) == 2]
            if len(listed_pairs) == len(given):
                given = {str(name.value): value for name, value in listed_pairs}
        if not isinstance(given, dict):
            self._problem(node, path, f"expected a mapping of labels, found {_shown(node.value)}")
            return _INVALID
        pairs = []
        for name, child in given.items():
            values = [_label(child.value)]
            if metadata.get("several"):
                listed = child.value if isinstance(child.value, list) else [child]
                values = [part for one in listed for part in (_label(one.value) or "").split(ALTERNATIVE)]
            problem = next((problem for value in values if (problem := label_problem(name, value or ""))), "")
            if problem or not values:
                self._problem(child, f"{path}.{name}", problem or "expected a value, found none")
                return _INVALID
            pairs.append((name, ALTERNATIVE.join(filter(None, values))))
        return tuple(pairs)

    def _problem(self, node: Node, path: str, message: str) -> None:
        self.problems.append(f"{node.origin}: {path or 'configuration'}: {message}")


def _label(value: Any) -> str | None:
    """The value of a label as text; None: it is none."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, str | int | float) else None


def _scalar(kind: Any, metadata: Mapping[str, Any], node: Node) -> Any:
    value = node.value
    if get_origin(kind) is Literal:
        if isinstance(value, bool) and (word := "on" if value else "off") in get_args(kind):
            return word  # YAML reads an unquoted `off` as false
        return value if isinstance(value, str) and value in get_args(kind) else _INVALID
    if kind is str:
        text = value if node.text is None else node.text
        if text is False and metadata.get("off"):
            return "off"
        if type(text) is date:  # YAML reads an unquoted 2024-10-21 as a date
            return text.isoformat()
        if metadata.get("choices") and text not in choices_of(metadata):
            return _INVALID
        return text if isinstance(text, str) else _INVALID
    if kind is bool:
        return value if isinstance(value, bool) else _INVALID
    if isinstance(value, str) and metadata.get("size"):
        try:
            value = parse_size(value)
        except ValueError:
            return _INVALID
    if isinstance(value, str) and metadata.get("share"):
        try:
            value = parse_share(value)
        except ValueError:
            return _INVALID
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
        return _INVALID
    least, most = metadata.get("least"), metadata.get("most")
    fits = (least is None or value >= least) and (most is None or value <= most)
    return kind(value) if fits and math.isfinite(value) else _INVALID


def describe_kind(kind: Any, metadata: Mapping[str, Any]) -> str:
    """What a setting accepts, in words."""
    if get_origin(kind) in (Union, types.UnionType):
        inner = [option for option in get_args(kind) if option is not types.NoneType]
        return f"{describe_kind(inner[0], metadata)}, or null"
    if dataclasses.is_dataclass(kind):
        return "a mapping of settings"
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(str(option) for option in get_args(kind))
    if kind == LabelPairs:
        return "a mapping of labels"
    if get_origin(kind) is tuple:
        return "a list"
    if get_origin(kind) is dict:
        return "a mapping of names to shares" if metadata.get("share") else "a mapping of names"
    if metadata.get("share"):
        return SHARE_HELP
    if metadata.get("choices"):
        return "one of " + ", ".join(choices_of(metadata))
    if metadata.get("size"):
        return SIZE_HELP
    name = {str: "text", bool: "true or false", int: "a whole number", float: "a number"}[kind]
    least, most = metadata.get("least"), metadata.get("most")
    if least is not None and most is not None:
        return f"{name} from {least:g} to {most:g}"
    return f"{name} of at least {least:g}" if least is not None else name


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    shown = "nothing" if value is None else repr(value)
    return shown if len(shown) <= MOST_SHOWN else f"{shown[:MOST_SHOWN]}…"


def _unknown(key: str, allowed: list[str]) -> str:
    near = difflib.get_close_matches(key.lower().replace("-", "_"), allowed, n=1, cutoff=0.6)
    hint = f' (did you mean "{near[0]}"?)' if near else _elsewhere(key)
    return f"unknown key{hint}; allowed here: {', '.join(allowed)}"


def _elsewhere(key: str) -> str:
    """A hint for a key that exists in another section."""
    for section, kind in get_type_hints(Config).items():
        cls = get_args(kind)[0] if get_origin(kind) is tuple else kind
        if key in {field.name for field in dataclasses.fields(cls)}:
            return f' (it belongs under "{section}")'
    return ""
