"""The forms that answers of a soak may have to have, and how each is checked."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from penstock.bench.soak.traffic import Form, text_of
from penstock.text import grammars
from penstock.tools.events import gather
from penstock.tools.formats import FORMATS
from penstock.tools.toolbox import Tool, Toolbox

_PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
_FURTHER = re.compile(r"\\u(?!00)[0-9a-f]{4}")
"""A character beyond Latin-1 in a grammar."""
_CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "unit": {"enum": ["c", "f"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
_DATE = r"(19|20)\d\d-(0[1-9]|1[0-2])-[0-3]\d( and (19|20)\d\d){0,3}!"
_CHOICES = ["yes", "no", "perhaps not", "yesterday"]


def forms() -> list[Form]:
    """All of them."""

    def json_with(check: Callable[[Any], bool]) -> Callable[[list[int]], bool]:
        return lambda tokens: check(json.loads(text_of(tokens)))

    def person(value: Any) -> bool:
        known = sorted(value) == sorted(_PERSON["required"]) and len(value["name"]) <= 8
        return known and 0 <= value["age"] <= 150 and set(value["tags"]) <= {"red", "green"}

    def date(tokens: list[int]) -> bool:
        return re.fullmatch(_DATE, text_of(tokens)) is not None

    tools = (Tool("weather", parameters=_CITY, strict=True), Tool("now"))
    found = [
        Form("a person in JSON", grammars.check(grammars.json_schema(_PERSON)), json_with(person)),
        Form("a date", grammars.check(grammars.regex(_DATE)), date),
        Form("a choice", grammars.check(grammars.choice(_CHOICES)), lambda tokens: text_of(tokens) in _CHOICES),
    ]
    for form in FORMATS.values():
        box = Toolbox(tools, form, use="required", parallel=form.name in ("hermes", "smollm2"))
        grammar = grammars.check(box.grammar())
        if not _FURTHER.search(grammar):  # the tokens of a soak cannot spell marks with such characters
            found.append(Form(f"calls as {form.name} has them", grammar, _calls_of(box)))
    return found


def _calls_of(box: Toolbox) -> Callable[[list[int]], bool]:
    """Checks that a text is calls of the toolbox's functions, whether parsed at once or character by character."""

    def valid(tokens: list[int]) -> bool:
        text = text_of(tokens)
        readings = []
        for pieces in ([text], list(text)):
            parser = box.parser()
            readings.append(gather([event for piece in pieces for event in parser.push(piece)] + parser.flush()))
        whole = readings[0]
        arguments = [(call.name, sorted(json.loads(call.arguments or "{}"))) for call in whole.calls]
        wanted = {"weather": ["city", "unit"], "now": []}
        return readings[1] == whole and bool(arguments) and all(keys == wanted[name] for name, keys in arguments)

    return valid
