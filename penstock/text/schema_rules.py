"""JSON schemas as the grammar compiler can enforce them.

The compiler refuses the keywords that it does not know. What is left to do here: `patternProperties` with few possible
keys become optional properties. Keys may not repeat, so a text with all of them would otherwise be led into a corner,
where another key must come and none may.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import product
from typing import Any

MOST_KEYS = 64
"""Keys that a pattern may have to be written out."""
_LONGEST_KEY = 256
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SINGLE = ("items", "additionalProperties")


def enforceable(schema: Mapping[str, Any]) -> dict[str, Any]:
    """An equivalent schema without patterns that only a few keys match."""
    found = dict(schema)
    for name in _MAPS:
        if isinstance(entries := found.get(name), Mapping):
            found[name] = {key: _inner(entry) for key, entry in entries.items()}
    for name in _LISTS:
        if isinstance(branches := found.get(name), list):
            found[name] = [_inner(branch) for branch in branches]
    for name in _SINGLE:
        if isinstance(inner := found.get(name), Mapping):
            found[name] = enforceable(inner)
    # With bounds on their number all declared properties must be required, so they stay patterns.
    properties, patterns = found.get("properties", {}), found.get("patternProperties")
    readable = isinstance(properties, Mapping) and isinstance(patterns, Mapping)
    if readable and patterns and not {"minProperties", "maxProperties"} & found.keys():
        _write_out(found, dict(properties), dict(patterns))
    return found


def _inner(schema: object) -> object:
    return enforceable(schema) if isinstance(schema, Mapping) else schema


def _write_out(schema: dict[str, Any], properties: dict[str, Any], patterns: dict[str, Any]) -> None:
    for pattern in list(patterns):
        keys = keys_of(pattern)
        if keys is None:
            continue
        value = patterns.pop(pattern)
        for key in keys:
            properties[key] = {"allOf": [properties[key], value]} if key in properties else value
    schema["properties"] = properties
    if patterns:
        schema["patternProperties"] = patterns
    else:
        del schema["patternProperties"]


def keys_of(pattern: str) -> list[str] | None:
    """All texts that match a pattern, if there are at most `MOST_KEYS`."""
    try:
        from re import _parser  # type: ignore[attr-defined]

        begin, *items, end = [(str(operation), argument) for operation, argument in _parser.parse(pattern, re.ASCII)]
    except (ImportError, re.error, OverflowError, RecursionError, ValueError):
        return None
    anchored = begin[0] == end[0] == "AT" and (str(begin[1]), str(end[1])) == ("AT_BEGINNING", "AT_END")
    return _texts(items) if anchored else None


def _texts(items: Any) -> list[str] | None:
    found = [""]
    for operation, argument in items:
        pieces = _pieces(str(operation), argument)
        if pieces is None or len(found) * len(pieces) > MOST_KEYS:
            return None
        found = [head + tail for head, tail in product(found, pieces)]
        if any(len(text) > _LONGEST_KEY for text in found):
            return None
    return list(dict.fromkeys(found))


def _pieces(operation: str, argument: Any) -> list[str] | None:
    match operation:
        case "LITERAL":
            return [chr(argument)]
        case "IN":
            return _class(argument)
        case "BRANCH":
            branches = [_texts(branch) for branch in argument[1]]
            return None if None in branches else [text for branch in branches for text in branch or ()]
        case "SUBPATTERN":
            return None if argument[1] or argument[2] else _texts(argument[3])
        case "MAX_REPEAT":
            least, most, body = argument
            if most > MOST_KEYS:
                return None
            inner = _texts(body)
            if inner is None or len(inner) ** int(most) > MOST_KEYS:
                return None
            return [
                "".join(parts) for count in range(int(least), int(most) + 1) for parts in product(inner, repeat=count)
            ]
    return None


def _class(entries: Any) -> list[str] | None:
    found: list[str] = []
    for kind, value in entries:
        match str(kind):
            case "LITERAL":
                found.append(chr(value))
            case "RANGE" if value[1] - value[0] < MOST_KEYS:
                found += map(chr, range(value[0], value[1] + 1))
            case _:
                return None
    return found


def keys_may_repeat(schema: object) -> bool:
    """Whether some object may have keys that the schema does not name: only such keys could come twice.

    In doubt it says yes, which costs a request a few microseconds per token.
    """
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if node is False:
            continue
        if not isinstance(node, Mapping):
            return True
        if "enum" in node or "const" in node:
            continue
        branches = [node[name] for name in ("anyOf", "oneOf", "allOf") if name in node]
        kinds = node.get("type")
        kinds = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else None
        if kinds is None and not branches and "$ref" not in node:
            return True
        closed = node.get("additionalProperties") is False and not node.get("patternProperties")
        if kinds and "object" in kinds and not closed:
            return True
        if kinds and "array" in kinds:
            waiting.append(node.get("items", True))
        if not re.match(r"#$|#/(\$defs|definitions)/[^/]+$", str(node.get("$ref", "#"))):
            return True
        for entries in (node.get(name, {}) for name in ("properties", "$defs", "definitions")):
            if not isinstance(entries, Mapping):
                return True
            waiting += entries.values()
        for values in (*branches, node.get("prefixItems", [])):
            if not isinstance(values, list):
                return True
            waiting += values
    return False
