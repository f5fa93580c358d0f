"""An unchecked configuration: plain values with their origin.

Files, environment variables and flags all become one tree of `Node`s, later ones replacing earlier ones, so
that an error can name the line, variable or flag to change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from penstock.errors import ConfigError

Value: TypeAlias = "dict[str, Node] | list[Node] | Any"
ENV_PREFIX = "PENSTOCK_"
FROM_FILE = "file"
"""Last part of a variable that names a file with the value."""


@dataclass(slots=True)
class Node:
    """A value and its origin: `penstock.yaml:3`, `PENSTOCK_SERVER__PORT` or `--port`."""

    value: Value
    origin: str
    text: str | None = None
    """The text as given in a variable or flag; used for text settings."""


def parse_yaml(text: str, name: str) -> Node:
    """The tree of a YAML document; an empty one is an empty mapping."""
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return Node({}, f"{name}:1")
        return _convert(loader, root, name, root.start_mark.line, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark else name
        raise ConfigError(f"{where}: not valid YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not valid YAML: {error}") from error
    finally:
        loader.dispose()


def _convert(loader: yaml.SafeLoader, node: yaml.Node, name: str, line: int, open_nodes: tuple[int, ...]) -> Node:
    origin = f"{name}:{line + 1}"
    if id(node) in open_nodes:
        raise ConfigError(f"{origin}: an alias must not contain itself")
    inner = (*open_nodes, id(node))
    if isinstance(node, yaml.MappingNode):
        mapping: dict[str, Node] = {}
        for key_node, value_node in node.value:
            where = key_node.start_mark.line
            key = str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else None
            if key is None:
                raise ConfigError(f"{name}:{where + 1}: a key must be a scalar, not a list or mapping")
            if key in mapping:
                first = mapping[key].origin
                raise ConfigError(f'{name}:{where + 1}: "{key}" was already given at {first}; remove one')
            mapping[key] = _convert(loader, value_node, name, where, inner)
        return Node(mapping, origin)
    if isinstance(node, yaml.SequenceNode):
        return Node([_convert(loader, item, name, item.start_mark.line, inner) for item in node.value], origin)
    try:
        return Node(loader.construct_object(node), origin)
    except ValueError as error:
        raise ConfigError(f"{origin}: {error}") from error


def from_text(text: str, origin: str) -> Node:
    """The value of a variable or flag, parsed as YAML (so that `[a, b]`, `true`, `null` work)."""
    try:
        node = parse_yaml(text, origin) if text.strip() else Node(text, origin)
    except ConfigError:
        node = Node(text, origin)
    _name(node, origin)
    node.text = text
    return node


def _name(node: Node, origin: str) -> None:
    node.origin = origin
    children = node.value.values() if isinstance(node.value, dict) else node.value
    if isinstance(node.value, dict | list):
        for child in children:
            _name(child, origin)


def from_env(environ: Mapping[str, str]) -> list[tuple[tuple[str, ...], Node]]:
    """Settings in the environment: `PENSTOCK_SERVER__PORT` is `server.port`; `PENSTOCK_STORE__URL__FILE` names a file
    with the value of `store.url`, for what should not be in the environment."""
    found = []
    for variable in sorted(environ):
        if variable.startswith(ENV_PREFIX) and "__" in variable:
            path = tuple(variable.removeprefix(ENV_PREFIX).lower().split("__"))
            if path[-1] == FROM_FILE:
                found.append((path[:-1], from_text(_content(environ[variable], variable), variable)))
            else:
                found.append((path, from_text(environ[variable], variable)))
    return found


def _content(file: str, variable: str) -> str:
    try:
        return Path(file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{variable}: {file} cannot be read: {error}") from error


def assign(root: Node, path: tuple[str, ...], node: Node) -> None:
    """Puts `node` at `path`. A number indexes a list (one past its end appends); `*` means every item."""
    head, *rest = path
    tail = tuple(rest)
    if head == "*" or head.isdigit():
        if not isinstance(root.value, list):
            raise ConfigError(f'{node.origin}: "{head}" needs a list, which is not what {root.origin} holds')
        items = root.value
        if head != "*":
            index = int(head)
            if index > len(items):
                raise ConfigError(f"{node.origin}: there is no item {index}; the list has {len(items)}")
            if index == len(items):
                items.append(Node({}, node.origin))
            items = [items[index]]
            if not tail:
                root.value[index] = node
        for item in items:
            if tail:
                assign(item, tail, node)
        return
    if root.value is None:
        root.value = {}
    if not isinstance(root.value, dict):
        raise ConfigError(f'{node.origin}: "{head}" needs a mapping, which is not what {root.origin} holds')
    if not tail:
        root.value[head] = node
        return
    if head not in root.value:
        root.value[head] = Node([] if tail[0].isdigit() else {}, node.origin)
    assign(root.value[head], tail, node)
