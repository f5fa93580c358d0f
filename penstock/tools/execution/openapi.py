"""Turns an OpenAPI document into functions: the schema that the model sees, and how arguments become
a request. Parameters and properties of a JSON body become arguments on one level; a body that is no object, or whose
properties clash with parameters, is the argument `body`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from penstock.tools.execution.base import Function, ToolError

METHODS = ("get", "post", "put", "patch", "delete")
_NAME = re.compile("[^a-zA-Z0-9-]+")
_PLACES = ("path", "query", "header")
_DEPTH = 32
_MOST_VALUES = 50_000
"""Maximum of values in all schemas after resolving references: a few lines must not be able to fill the memory."""
MOST_OPERATIONS = 128


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of an HTTP API."""

    function: Function
    method: str
    path: str
    places: Mapping[str, str]
    """The place of each argument: path, query, header, or `body` for a property of the body."""
    whole_body: bool = False
    """Whether the argument `body` is the whole body."""

    def request(self, arguments: Mapping[str, Any]) -> tuple[str, dict[str, Any], dict[str, str], Any]:
        """Path, query, headers and JSON body for a call; `ToolError` says what is wrong with the arguments."""
        query: dict[str, Any] = {}
        headers: dict[str, str] = {}
        body: dict[str, Any] = {}
        path = self.path
        for name, value in arguments.items():
            place = self.places.get(name)
            if place is None:
                raise ToolError(f"unknown argument `{name[:64]}`; known: {', '.join(self.places) or 'none'}")
            if place == "path":
                path = path.replace("{" + name + "}", _segment(name, value))
            elif place == "query":
                query[name] = _plain(value)
            elif place == "header":
                headers[name] = str(_plain(value))
            else:
                body[name] = value
        if missing := re.search(r"\{([^}]*)\}", path):
            raise ToolError(f"the argument `{missing[1]}` is missing")
        whole = body.get("body") if self.whole_body else body or None
        return path, query, headers, whole


def operations(document: Mapping[str, Any]) -> tuple[Operation, ...]:
    """Every operation of the document, under its `operationId` or a name made from method and path."""
    paths = document.get("paths")
    if not isinstance(paths, Mapping) or not paths:
        raise ToolError("the OpenAPI document has no `paths`")
    found: list[Operation] = []
    resolver = _Document(document)
    for path, item in paths.items():
        if not isinstance(item, Mapping):
            raise ToolError(f"`paths.{path}` is not a mapping")
        for method in METHODS:
            if method in item:
                try:
                    found.append(_operation(resolver, method, str(path), item))
                except (AttributeError, TypeError, ValueError) as error:  # a value of another type than OpenAPI says
                    raise ToolError(f"`paths.{path}.{method}` is not an operation as OpenAPI has it: {error}") from None
    names = [operation.function.name for operation in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ToolError(f"two operations are called {', '.join(sorted(twice))}; give each an `operationId`")
    if not found or len(found) > MOST_OPERATIONS:
        raise ToolError(f"the OpenAPI document has {len(found)} operations; 1 to {MOST_OPERATIONS} can be used")
    return tuple(found)


def base_url(document: Mapping[str, Any]) -> str:
    """The first server of the document."""
    servers = document.get("servers")
    if isinstance(servers, list) and servers and isinstance(servers[0], Mapping):
        return str(servers[0].get("url") or "")
    return ""


def _operation(document: _Document, method: str, path: str, item: Mapping[str, Any]) -> Operation:
    spec = item[method]
    if not isinstance(spec, Mapping):
        raise ToolError(f"`paths.{path}.{method}` is not a mapping")
    name = _NAME.sub("_", str(spec.get("operationId") or f"{method}_{path}")).strip("_")[:64]
    properties: dict[str, Any] = {}
    required: list[str] = []
    places: dict[str, str] = {}
    for given in (*item.get("parameters", ()), *spec.get("parameters", ())):
        parameter = document.resolved(given)
        where, called = parameter.get("in"), str(parameter.get("name"))
        if where not in _PLACES:
            raise ToolError(f"`{method} {path}`: parameters in `{where}` are not supported")
        schema = dict(document.resolved(parameter.get("schema") or {"type": "string"}))
        if parameter.get("description"):
            schema.setdefault("description", parameter["description"])
        properties[called], places[called] = schema, str(where)
        if (parameter.get("required") or where == "path") and called not in required:
            required.append(called)
    whole = _add_body(document, spec, properties, required, places)
    parameters = {
        "type": "object", "properties": properties, "required": required, "additionalProperties": False
    }  # fmt: skip
    description = str(spec.get("description") or spec.get("summary") or "")
    return Operation(Function(name, description, parameters), method.upper(), path, places, whole)


def _add_body(
    document: _Document,
    spec: Mapping[str, Any],
    properties: dict[str, Any],
    required: list[str],
    places: dict[str, str],
) -> bool:
    """Adds the arguments of the body; returns whether the body is a single argument."""
    body = spec.get("requestBody")
    if body is None:
        return False
    body = document.resolved(body)
    content = body.get("content", {}).get("application/json")
    if content is None:
        raise ToolError(f"`{spec.get('operationId') or 'an operation'}` takes a body that is not JSON")
    schema = document.resolved(content.get("schema") or {})
    inner = schema.get("properties")
    if schema.get("type", "object") != "object" or not inner or inner.keys() & places.keys():
        if "body" in places:
            raise ToolError("a parameter is called `body`, which is also the name of the body")
        properties["body"], places["body"] = schema, "body"
        if body.get("required"):
            required.append("body")
        return True
    for name, sub in inner.items():
        properties[name], places[name] = sub, "body"
    required += [name for name in schema.get("required", ()) if name in inner]
    return False


class _Document:
    """Resolves the references of a document; a recursive reference accepts any value."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._left = _MOST_VALUES

    def resolved(self, value: Any, inside: tuple[str, ...] = ()) -> Any:
        self._left -= 1
        if self._left < 0 or len(inside) > _DEPTH:
            raise ToolError("the document is too large after resolving its references")
        if isinstance(value, list):
            return [self.resolved(item, inside) for item in value]
        if not isinstance(value, Mapping):
            return value
        reference = value.get("$ref")
        if not isinstance(reference, str):
            return {str(key): self.resolved(item, inside) for key, item in value.items()}
        return {} if reference in inside else self.resolved(self._found(reference), (*inside, reference))

    def _found(self, reference: str) -> Any:
        if not reference.startswith("#/"):
            raise ToolError(f"the reference {reference!r} points outside the document")
        found: Any = self._root
        for part in reference[2:].split("/"):
            part = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, Mapping) or part not in found:
                raise ToolError(f"the reference {reference!r} cannot be resolved")
            found = found[part]
        return found


def _segment(name: str, value: Any) -> str:
    text = str(_plain(value))
    if text in ("", ".", ".."):
        raise ToolError(f"the argument `{name}` may not be {text!r}")
    return quote(text, safe="")


def _plain(value: Any) -> Any:
    """The value as text in a URL or header."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return ",".join(str(_plain(item)) for item in value)
    if isinstance(value, Mapping):
        raise ToolError("an object cannot be part of a URL or header")
    return "" if value is None else value
