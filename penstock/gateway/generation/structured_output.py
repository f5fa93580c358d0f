"""The ways in which other servers spell `response_format`, mapped onto it.

Invariant: a request names one constraint, whatever it calls it; two that differ are a 400, never one of them.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from penstock.gateway.generation.schemas import (
    ChoiceFormat,
    GrammarFormat,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    RegexFormat,
    ResponseFormat,
    Sampling,
    StructuralTagFormat,
    StructuredOutputs,
    TextFormat,
)
from penstock.protocol.errors import InvalidRequest

T = TypeVar("T", bound=Sampling)

SPELLINGS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}
"""Parameters of a request, and what of `structured_outputs` they mean."""


def with_response_format(request: T) -> T:
    """The request with its constraint as `response_format`, by whichever name it came."""
    found = [
        (name, kind, value)
        for name, kind in SPELLINGS.items()
        if (value := getattr(request, name)) is not None and value is not False and value != ""
    ]
    nested = request.structured_outputs
    if nested is not None:
        found += [
            (f"structured_outputs.{kind}", kind, value)
            for kind in StructuredOutputs.__struct_fields__
            if (value := getattr(nested, kind)) is not None and value is not False
        ]
    wanted = request.response_format
    if not found:
        return request
    name, kind, value = found[0]
    # The same constraint by several names, for servers of different age, is one.
    names = [name, *(also for also, as_kind, same in found[1:] if (as_kind, same) != (kind, value))]
    if wanted is not None and not isinstance(wanted, TextFormat):
        names.insert(0, "response_format")
    if len(names) > 1:
        raise InvalidRequest(
            f"{' and '.join(f'`{name}`' for name in names)} each prescribe the answer; send one of them.",
            param=names[1],
        )
    cleared: dict[str, Any] = dict.fromkeys((*SPELLINGS, "structured_outputs"))
    return msgspec.structs.replace(request, **cleared, response_format=_format(name, kind, value))


def _format(name: str, kind: str, value: Any) -> ResponseFormat:
    match kind:
        case "json":
            return JsonSchemaFormat(JsonSchema(schema=_object(name, value)))
        case "json_object":
            return JsonObjectFormat()
        case "regex":
            return RegexFormat(value)
        case "choice":
            return ChoiceFormat(value)
        case "grammar":
            return GrammarFormat(value)
        case _:
            try:
                described = {"type": "structural_tag", **_object(name, value)}
                return msgspec.convert(described, StructuralTagFormat)
            except msgspec.ValidationError as error:
                raise InvalidRequest(f"`{name}` is not a structural tag: {error}", param=name) from error


def _object(name: str, value: Any) -> dict[str, Any]:
    """A JSON object, which may have come as text."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequest(f"`{name}` is not JSON: {error}", param=name) from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"`{name}` must be a JSON object.", param=name)
    return value
