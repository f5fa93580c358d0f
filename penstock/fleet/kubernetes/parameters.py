"""Parameters inside objects: what the user of a Helm chart may set.

A parameter is a piece of text that stands for itself in any string of an object, so that names and endpoints can be
put together as usual. `plain` replaces it by its default, `templated` by an expression of Helm's template language.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

Json: TypeAlias = Any
"""What YAML can hold: mappings, lists, text, numbers, booleans."""

_OPEN, _CLOSE = "\ue000", "\ue001"
"""Of the private use area: no name, URL or command contains them."""
_TOKEN = re.compile(f"{_OPEN}([^{_CLOSE}]*){_CLOSE}")
_WORD = re.compile(r"[A-Za-z_]\w*")


class Parameters:
    """The parameters of one deployment, with their defaults."""

    def __init__(self) -> None:
        self._defaults: dict[str, Json] = {}
        self._expressions: dict[str, str] = {}
        self.values: dict[str, Json] = {}
        """The chart's `values.yaml`."""

    def value(self, *path: str, default: Json) -> str:
        """A value that the chart's user may set."""
        inner = self.values
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = default
        return self.built_in(_lookup(path), default)

    def built_in(self, expression: str, default: Json) -> str:
        """Something that Helm knows by itself, such as the namespace."""
        key = str(len(self._defaults)) if expression not in self._expressions.values() else self._key(expression)
        self._defaults[key] = default
        self._expressions[key] = expression
        return f"{_OPEN}{key}{_CLOSE}"

    def _key(self, expression: str) -> str:
        return next(key for key, known in self._expressions.items() if known == expression)

    def plain(self, tree: Json) -> Json:
        """The object with every parameter at its default."""
        return _mapped(tree, self._plain_text)

    def templated(self, tree: Json) -> tuple[Json, dict[str, str]]:
        """The object with a marker in place of every text that Helm computes, and each marker's expression."""
        markers: dict[str, str] = {}

        def mark(text: str) -> str:
            expression = self._expression(text)
            if expression is None:
                return text
            marker = f"HELM{len(markers)}MARKER"
            markers[marker] = expression
            return marker

        return _mapped(tree, mark), markers

    def _plain_text(self, text: str) -> Json:
        whole = _TOKEN.fullmatch(text)
        if whole:
            return self._defaults[whole[1]]
        return _TOKEN.sub(lambda found: str(self._defaults[found[1]]), text)

    def _expression(self, text: str) -> str | None:
        whole = _TOKEN.fullmatch(text)
        if whole:
            return f"{{{{ {self._expressions[whole[1]]} | toJson }}}}"
        if not _TOKEN.search(text):
            return f"{{{{ {json.dumps(text)} | toJson }}}}" if "{{" in text else None
        form = _TOKEN.sub("%v", text.replace("%", "%%"))
        arguments = " ".join(f"({self._expressions[found[1]]})" for found in _TOKEN.finditer(text))
        return f"{{{{ printf {json.dumps(form)} {arguments} | toJson }}}}"


def _lookup(path: tuple[str, ...]) -> str:
    if all(_WORD.fullmatch(key) for key in path):
        return ".Values." + ".".join(path)
    return "index .Values " + " ".join(json.dumps(key) for key in path)


def _mapped(tree: Json, change: Callable[[str], Json]) -> Json:
    if isinstance(tree, Mapping):
        return {change(key): _mapped(inner, change) for key, inner in tree.items()}
    if isinstance(tree, list | tuple):
        return [_mapped(inner, change) for inner in tree]
    return change(tree) if isinstance(tree, str) else tree
