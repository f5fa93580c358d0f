"""Values of arguments that models write as plain text, typed by the function's schema.

A value is text where the schema says `string`. Elsewhere it is JSON, or the Python that some templates write in its
place (`True`, `['a']`), if that is of a type the schema allows; everything else is text.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

Schemas = Mapping[str, Mapping[str, Any]]
"""Of each function, the schema of its arguments."""
_WORDS = {"True": True, "False": False, "None": None}
_DEPTH = 8
"""References and alternatives inside one another."""
_LONGEST_LITERAL = 262_144


def argument(text: str, key: str, schema: Mapping[str, Any]) -> Any:
    """The value of one argument, of a function with this schema."""
    properties = schema.get("properties")
    types = types_of(properties.get(key), schema) if isinstance(properties, Mapping) else frozenset()
    if types == {"string"}:
        return text
    for read in (_json, _python):
        found, value = read(text)
        if found and (not types or _type(value) in types or (_type(value) == "integer" and "number" in types)):
            return value
    found, value = _json(text)
    return value if found and "string" not in types else text


def stated_argument(text: str, key: str, schema: Mapping[str, Any], *, as_text: bool) -> Any:
    """The same where the model says whether the value is text or JSON; what it calls JSON and is none goes by the
    schema."""
    if as_text:
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return argument(text, key, schema)
    return value if _sendable(value) else argument(text, key, schema)


def types_of(schema: Any, whole: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """The JSON types that a schema allows; none: unknown, or any."""
    if not isinstance(schema, Mapping) or depth > _DEPTH:
        return frozenset()
    if isinstance(given := schema.get("type"), str):
        return frozenset((given,))
    if isinstance(given, list):
        return frozenset(each for each in given if isinstance(each, str))
    if isinstance(values := schema.get("enum", [schema["const"]] if "const" in schema else None), list):
        return frozenset(map(_type, values))
    if isinstance(name := schema.get("$ref"), str):
        return types_of(_referred(name, whole), whole, depth + 1)
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(options := schema.get(key), list):
            found = [types_of(option, whole, depth + 1) for option in options]
            if key != "allOf" and not all(found):
                return frozenset()
            return frozenset[str]().union(*found)
    return frozenset()


def _referred(name: str, whole: Mapping[str, Any]) -> Any:
    found: Any = whole
    if not name.startswith("#/"):
        return None
    for part in name[2:].split("/"):
        if not isinstance(found, Mapping):
            return None
        found = found.get(part.replace("~1", "/").replace("~0", "~"))
    return found


def _type(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def _json(text: str) -> tuple[bool, Any]:
    """Whether a text is JSON, but no string, and its value."""
    try:
        value = json.loads(text)
        return not isinstance(value, str) and _sendable(value), value
    except (ValueError, RecursionError):
        return False, None


def _python(text: str) -> tuple[bool, Any]:
    """Likewise for what Python's `str` makes of a value."""
    stripped = text.strip()
    if stripped in _WORDS:
        return True, _WORDS[stripped]
    if stripped[:1] not in ("[", "{", "(") or len(stripped) > _LONGEST_LITERAL:
        return False, None
    try:
        value = ast.literal_eval(stripped)
        value = list(value) if isinstance(value, tuple) else value
        return isinstance(value, list | dict) and _sendable(value), value
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return False, None


def _sendable(value: Any) -> bool:
    """Whether JSON can say it: no infinity, no bytes; and only text that can be encoded."""
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, TypeError, RecursionError):
        return False
    return True
