"""Keywords of JSON schema that the grammar compiler does not know: put in other words, or left out and named.

`uniqueItems`, `propertyNames`, `format`s and patterns come from the schema helpers of client libraries. Where the same
can be said with keywords that are enforced, it is. Otherwise the keyword is left out and its name reported, so that
whoever sent it knows to check the answer. What other keywords demand is never left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import permutations
from typing import Any

from penstock.engine.grammar.interface import GrammarError

ENFORCED_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
"""Those that the compiler knows."""
ANY_TEXT = frozenset(("password", "binary", "path", "string", "text", "char"))
"""Formats that every text has."""
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_WORD = "[0-9a-f]{1,4}"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_IPV6 = rf"{_WORD}(?::{_WORD}){{7}}"
_BITS4 = "(?:3[0-2]|[12]?[0-9])"
_BITS6 = "(?:12[0-8]|1[01][0-9]|[1-9]?[0-9])"
_NETWORK4 = rf"(?:{_BYTE}\.0\.0\.0/8|{_BYTE}\.{_BYTE}\.0\.0/16|(?:{_BYTE}\.){{3}}0/24|{_IPV4}/32)"
_NETWORK6 = rf"(?:(?:{_WORD}:){{2}}:/32|(?:{_WORD}:){{3}}:/48|(?:{_WORD}:){{4}}:/64|{_IPV6}/128)"
_DAYS = "(?:0[1-9]|[12][0-9]|3[01])", "(?:0[1-9]|[12][0-9]|30)", "(?:0[1-9]|1[0-9]|2[0-8])"
PATTERNS = {
    "date": rf"[0-9]{{4}}-(?:(?:0[13578]|1[02])-{_DAYS[0]}|(?:0[469]|11)-{_DAYS[1]}|02-{_DAYS[2]})",
    "ipv4": _IPV4,
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    **{
        f"uuid{version}": f"[0-9a-f]{{8}}-[0-9a-f]{{4}}-{version}[0-9a-f]{{3}}-[89ab][0-9a-f]{{3}}-[0-9a-f]{{12}}"
        for version in range(1, 9)
    },
    "ipvanyaddress": f"(?:{_IPV4}|{_IPV6})",
    "ipv4network": _NETWORK4,
    "ipv6network": _NETWORK6,
    "ipvanynetwork": f"(?:{_NETWORK4}|{_NETWORK6})",
    "ipv4interface": f"{_IPV4}/{_BITS4}",
    "ipv6interface": f"{_IPV6}/{_BITS6}",
    "ipvanyinterface": f"(?:{_IPV4}/{_BITS4}|{_IPV6}/{_BITS6})",
    "base64": "(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/][AQgw]==|[A-Za-z0-9+/]{2}[AEIMQUYcgkosw048]=)?",
    "base64url": "(?:[A-Za-z0-9_-]{4})*(?:[A-Za-z0-9_-][AQgw]==|[A-Za-z0-9_-]{2}[AEIMQUYcgkosw048]=)?",
}
"""Formats that can be written as a pattern. Of several ways to write a value, some allow the usual one only."""
PATTERNS["byte"] = PATTERNS["base64"]
MOST_UNIQUE = 4
"""Values of a list without repetition that are written out: 64 lists of four."""
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SINGLE = ("items", "additionalProperties", "contains", "not", "if", "then", "else")
_LOCAL = re.compile(r"#/(\$defs|definitions)/([^/]+)")
_BEYOND = {"ASSERT", "ASSERT_NOT", "GROUPREF", "GROUPREF_EXISTS"}


def rewritten(schema: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A schema without keywords of this module that the compiler would refuse, and the names of those left out."""
    rewriting = _Rewriting(schema)
    return rewriting.schema(schema), tuple(sorted(rewriting.left_out))


class _Rewriting:
    """The rewriting of one schema."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self.left_out: set[str] = set()

    def schema(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        found = dict(schema)
        for name in _MAPS:
            if isinstance(entries := found.get(name), Mapping):
                found[name] = {key: self._inner(entry) for key, entry in entries.items()}
        for name in _LISTS:
            if isinstance(branches := found.get(name), list):
                found[name] = [self._inner(branch) for branch in branches]
        for name in _SINGLE:
            if isinstance(inner := found.get(name), Mapping):
                found[name] = self.schema(inner)
        self._format(found)
        if isinstance(pattern := found.get("pattern"), str) and not supported(pattern):
            del found["pattern"]
            self.left_out.add("pattern")
        for name in ("contentEncoding", "contentMediaType", "contentSchema"):
            if found.pop(name, None) is not None:
                self.left_out.add(name)
        if "uniqueItems" in found:
            self._unique(found)
        if "propertyNames" in found:
            self._names(found)
        return found

    def _inner(self, schema: object) -> object:
        if isinstance(schema, Mapping):
            return False if schema.get("not") == {} else self.schema(schema)
        return schema

    def _format(self, found: dict[str, Any]) -> None:
        name = found.get("format")
        if not isinstance(name, str) or name in ENFORCED_FORMATS or found.get("type") in ("integer", "number"):
            return
        del found["format"]
        if name in ANY_TEXT:
            return
        if name in PATTERNS and "pattern" not in found:
            found["pattern"] = f"^{PATTERNS[name]}$"
        else:
            self.left_out.add(f"format.{name}")

    def _unique(self, found: dict[str, Any]) -> None:
        if not found.pop("uniqueItems"):
            return
        values = self._values(found.get("items"))
        plain = found.keys() <= {"type", "items", "minItems", "maxItems", "title", "description", "default"}
        if values is None or len(values) > MOST_UNIQUE or not plain:
            self.left_out.add("uniqueItems")
            return
        values = [value for at, value in enumerate(values) if not any(_same(value, other) for other in values[:at])]
        least, most = found.pop("minItems", 0), found.pop("maxItems", len(values))
        if not isinstance(least, int) or not isinstance(most, int) or least < 0:
            raise GrammarError("`minItems` and `maxItems` must be integers from 0 on")
        del found["items"]
        found.pop("type", None)
        found["anyOf"] = [
            {
                "type": "array",
                "prefixItems": [{"const": value} for value in chosen],
                "items": False,
                "minItems": count,
                "maxItems": count,
            }
            for count in range(least, min(most, len(values)) + 1)
            for chosen in permutations(values, count)
        ]

    def _names(self, found: dict[str, Any]) -> None:
        rule = self._resolved(found.pop("propertyNames"))
        if rule is True or (isinstance(rule, Mapping) and rule.keys() <= {"type", "title", "description"}):
            return
        alone = not found.get("properties") and not found.get("patternProperties") and not found.get("required")
        values = self._values(rule)
        value = found.get("additionalProperties", True)
        if alone and values and all(isinstance(key, str) for key in values):
            found["properties"] = dict.fromkeys(values, value)
            found["additionalProperties"] = False
        elif alone and isinstance(rule, Mapping) and (pattern := _key_pattern(rule)) is not None:
            found["patternProperties"] = {pattern: value}
            found["additionalProperties"] = False
        else:
            self.left_out.add("propertyNames")

    def _values(self, schema: object) -> list[Any] | None:
        """All values that a schema allows, if it lists them."""
        schema = self._resolved(schema)
        if not isinstance(schema, Mapping):
            return None
        if "const" in schema:
            return [schema["const"]]
        if isinstance(values := schema.get("enum"), list):
            return values
        return [True, False] if schema.get("type") == "boolean" else None

    def _resolved(self, schema: object) -> object:
        """What a schema refers to, one step."""
        if isinstance(schema, Mapping) and isinstance(ref := schema.get("$ref"), str) and (at := _LOCAL.fullmatch(ref)):
            entries = self._root.get(at[1])
            return entries.get(at[2]) if isinstance(entries, Mapping) else None
        return schema


def _same(one: Any, other: Any) -> bool:
    """JSON's idea of equality: 1 and true differ."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _key_pattern(rule: Mapping[str, Any]) -> str | None:
    """The pattern of keys that a rule allows; None where it says more than that."""
    rest = rule.keys() - {"type", "title", "description"}
    if rest == {"pattern"} and isinstance(pattern := rule["pattern"], str) and supported(pattern):
        return pattern
    if rest == {"format"} and isinstance(rule["format"], str) and rule["format"] in PATTERNS:
        return f"^{PATTERNS[rule['format']]}$"
    if rest and rest <= {"minLength", "maxLength"} and all(isinstance(rule[name], int) for name in rest):
        return f"^(?s:.){{{rule.get('minLength', 0)},{rule.get('maxLength', '')}}}$"
    return None


def supported(pattern: str) -> bool:
    """Whether a pattern has neither look-around nor back-references nor word boundaries, as far as can be seen. What is
    wrong with it otherwise is for the compiler to say."""
    try:
        from re import _parser  # type: ignore[attr-defined]

        parsed = _parser.parse(pattern)
    except (ImportError, re.error, OverflowError, RecursionError, ValueError):
        return True
    waiting = [parsed]
    while waiting:
        part = waiting.pop()
        if isinstance(part, _parser.SubPattern):
            waiting += part.data
        elif isinstance(part, list | tuple):
            if len(part) == 2 and str(part[0]) in _BEYOND:
                return False
            if len(part) == 2 and str(part[0]) == "AT" and "BOUNDARY" in str(part[1]):
                return False
            waiting += [inner for inner in part if isinstance(inner, list | tuple | _parser.SubPattern)]
    return True
