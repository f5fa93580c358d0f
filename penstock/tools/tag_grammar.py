"""The grammar of arguments in tags that say which values are text (DSML), from the schema of a function.

Every declared property is one tag, in the order of the schema: text as it is, anything else as JSON that its schema
holds. Schemas that say more about the object than its properties have no such form; their arguments are one JSON
object.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.text import grammars
from penstock.text.grammars import Part, literal
from penstock.tools.xml_calls import Tags

_ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "$comment"}
_OF_OBJECTS = {
    "type",
    "properties",
    "required",
    "additionalProperties",
    "$defs",
    "definitions",
    "$schema",
} | _ANNOTATIONS
_DEFINITIONS = ("$defs", "definitions")
_NAME = re.compile(r"[^\s\"'<>][^\"'<>\n]{0,127}")


@dataclass(slots=True)
class TaggedArguments:
    """Rules for the arguments of one function, and the parts that they refer to."""

    rules: list[str] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)


def arguments_in_tags(
    schema: Mapping[str, Any], tags: Tags, name: str, spelled: Callable[[str], str]
) -> TaggedArguments | None:
    """The rule `name` for arguments of `schema`; None: they have no form in tags. `spelled`: a text in the notation of
    grammars, with its control tokens."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not schema.keys() <= _OF_OBJECTS or not isinstance(properties, Mapping) or not isinstance(required, list):
        return None
    free = schema.get("additionalProperties", True)
    if isinstance(free, Mapping) or (free is not False and not properties) or not set(required) <= properties.keys():
        return None
    made = TaggedArguments()
    line = literal("\n")
    written = []
    for number, (key, value) in enumerate(properties.items()):
        rule = f"{name}_{number}"
        if not _NAME.fullmatch(key) or not isinstance(value, Mapping) or not _refers_to_definitions(value):
            return None
        text, json = (spelled(f'{tags.value}"{key}" string="{stated}">') for stated in ("true", "false"))
        if _is_any_text(value):
            made.rules.append(f"{rule}: {text} {_any_text(made, rule, tags.value_end, spelled)}")
        elif (options := _texts(value, tags.value_end)) is not None:
            one = " | ".join(map(literal, options))
            made.rules.append(f"{rule}: {text} ({one}) {spelled(tags.value_end)}")
        else:
            part = grammars.json_schema({**value, **{at: schema[at] for at in _DEFINITIONS if at in schema}})
            if part.json_start is not None:
                return None  # keys of objects inside may repeat, which is looked for in JSON alone
            made.parts += part.named(f"{rule}_json").parts
            made.rules.append(f"{rule}: {json} @{rule}_json {spelled(tags.value_end)}")
        written.append(f"{rule} {line}" if key in required else f"({rule} {line})?")
    if not required:
        written.append(f"{line}?")  # DeepSeek leaves a line empty where there are no arguments
    made.rules.append(f"{name}: {' '.join(written)}")
    return made


def _is_any_text(schema: Mapping[str, Any]) -> bool:
    return schema.get("type") == "string" and schema.keys() <= {"type"} | _ANNOTATIONS


def _texts(schema: Mapping[str, Any], end: str) -> list[str] | None:
    """The texts that a schema lists; None where it allows anything else."""
    if not schema.keys() <= {"type", "enum"} | _ANNOTATIONS or schema.get("type", "string") != "string":
        return None
    options = schema.get("enum")
    if not isinstance(options, list) or not options:
        return None
    return options if all(isinstance(option, str) and end not in option for option in options) else None


def _any_text(made: TaggedArguments, rule: str, end: str, spelled: Callable[[str], str]) -> str:
    """Any text and its end. A control token is no part of a lexeme, so the text ends with what stands before it."""
    before, found, after = spelled(end).partition("<[")
    if not found:
        made.rules.append(f"{rule}_text[lazy]: /(?s:.*)/ {literal(end)}")
        return f"{rule}_text"
    made.rules.append(f"{rule.upper()}_TEXT: /(?s:.*)/ {before}")
    return f"{rule.upper()}_TEXT <[{after}"


def _refers_to_definitions(schema: Any) -> bool:
    """Whether all references in a schema are to definitions of the whole."""
    if isinstance(schema, Mapping):
        name = schema.get("$ref", "#/$defs/")
        known = isinstance(name, str) and name.startswith(tuple(f"#/{at}/" for at in _DEFINITIONS))
        return known and all(map(_refers_to_definitions, schema.values()))
    return all(map(_refers_to_definitions, schema)) if isinstance(schema, list) else True
