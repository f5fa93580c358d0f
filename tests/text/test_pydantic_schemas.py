"""Schemas as pydantic, the OpenAI SDK and zod emit them: none is refused; random answers under each are valid, and
pydantic takes them; what is not enforced is named."""

from __future__ import annotations

import collections
import dataclasses
import json
import random
import re
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Optional, Required, Union
from uuid import UUID

import jsonschema
import pydantic
import pytest
from openai.lib._pydantic import to_strict_json_schema
from pydantic import BaseModel, ConfigDict, Field, RootModel, create_model
from typing_extensions import TypedDict

from penstock.text import grammars
from penstock.text.schema_keywords import PATTERNS, rewritten, supported
from tests.engine.grammar.tokens import VOCAB, compiler, walk

COMPILER = compiler(VOCAB)
DRAWS = 3


class Colour(Enum):
    red = "red"
    blue = "blue"


class Number(IntEnum):
    one = 1
    two = 2


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str


class Node(BaseModel):
    value: int
    children: list[Node] = []


class Linked(BaseModel):
    next: Linked | None = None


class Typed(TypedDict, total=False):
    a: int
    b: Required[str]


@dataclasses.dataclass
class Data:
    x: int
    y: str = "a"


class Named(NamedTuple):
    a: int
    b: str = "x"


class Root(RootModel[list[int]]):
    pass


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")
    a: int


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    a: int


TYPES: dict[str, tuple[Any, set[str]]] = {
    "int": (int, set()),
    "float": (float, set()),
    "str": (str, set()),
    "bool": (bool, set()),
    "None": (type(None), set()),
    "Any": (Any, set()),
    "Decimal": (Decimal, set()),
    "condecimal": (pydantic.condecimal(max_digits=5, decimal_places=2), set()),
    "date": (date, set()),
    "datetime": (datetime, set()),
    "time": (time, set()),
    "timedelta": (timedelta, set()),
    "UUID": (UUID, set()),
    "UUID4": (pydantic.UUID4, set()),
    "IPv4Address": (IPv4Address, set()),
    "IPv6Address": (IPv6Address, set()),
    "IPvAnyAddress": (pydantic.IPvAnyAddress, set()),
    "IPv4Network": (IPv4Network, set()),
    "IPv6Network": (IPv6Network, set()),
    "IPvAnyNetwork": (pydantic.IPvAnyNetwork, set()),
    "IPv4Interface": (IPv4Interface, set()),
    "IPv6Interface": (IPv6Interface, set()),
    "AnyUrl": (pydantic.AnyUrl, {"format.uri"}),
    "HttpUrl": (pydantic.HttpUrl, {"format.uri"}),
    "PostgresDsn": (pydantic.PostgresDsn, {"format.multi-host-uri"}),
    "Path": (Path, set()),
    "FilePath": (pydantic.FilePath, {"format.file-path"}),
    "bytes": (bytes, set()),
    "Base64Bytes": (pydantic.Base64Bytes, set()),
    "Base64UrlStr": (pydantic.Base64UrlStr, set()),
    "SecretStr": (pydantic.SecretStr, set()),
    "Json": (pydantic.Json[list[int]], {"contentMediaType", "contentSchema"}),
    "set": (set[int], {"uniqueItems"}),
    "frozenset": (frozenset[str], {"uniqueItems"}),
    "set of literals": (set[Literal["a", "b", "c"]], set()),
    "set of an enum, not empty": (Annotated[set[Colour], Field(min_length=1)], set()),
    "tuple": (tuple[int, str], set()),
    "tuple, variadic": (tuple[int, ...], set()),
    "NamedTuple": (Named, set()),
    "deque": (collections.deque[int], set()),
    "conlist": (pydantic.conlist(int, min_length=1, max_length=3), set()),
    "Literal": (Literal["a", 1, None], set()),
    "Enum": (Colour, set()),
    "IntEnum": (Number, set()),
    "Optional": (Optional[int], set()),  # noqa: UP045
    "Union": (Union[int, str, list[int]], set()),  # noqa: UP007
    "discriminated union": (Annotated[Cat | Dog, Field(discriminator="kind")], set()),
    "dict[str, int]": (dict[str, int], set()),
    "dict[int, str]": (dict[int, str], set()),
    "dict[Enum, int]": (dict[Colour, int], set()),
    "dict[Literal, int]": (dict[Literal["a", "b"], int], set()),
    "dict[date, int]": (dict[date, int], set()),
    "dict[constr, int]": (dict[Annotated[str, Field(pattern="^[a-z]+$")], int], set()),
    "defaultdict": (collections.defaultdict[str, list[int]], set()),
    "Counter": (collections.Counter[str], set()),
    "conint": (pydantic.conint(ge=1, lt=10, multiple_of=3), set()),
    "confloat": (pydantic.confloat(gt=0, le=1.5), set()),
    "constr": (pydantic.constr(pattern=r"^[A-Z]{2}\d+$", min_length=2, max_length=6), set()),
    "multiple_of": (Annotated[int, Field(multiple_of=5)], set()),
    "recursive model": (Node, set()),
    "linked model": (Linked, set()),
    "TypedDict": (Typed, set()),
    "dataclass": (Data, set()),
    "RootModel": (Root, set()),
    "closed model": (Closed, set()),
    "open model": (Open, set()),
    "nested": (list[dict[str, Cat]] | None, set()),
    "Pattern": (re.Pattern, {"format.regex"}),
    "annotations": (Annotated[int, Field(description="d", examples=[1], deprecated=True)], set()),
}
SCHEMA_ALLOWS_MORE = {
    *("AnyUrl", "HttpUrl", "timedelta", "date", "datetime", "time", "Decimal", "condecimal", "Any", "Base64UrlStr"),
    *("dict[int, str]", "dict[constr, int]"),
}
"""Than the type takes: the year 0, a key that is no number."""


def valid(schema: dict[str, Any], left_out: set[str], draws: int = DRAWS, seed: int = 1) -> list[str]:
    """Random answers under a schema, which are valid."""
    grammar = grammars.json_schema(schema)
    assert set(grammar.unenforced) <= left_out
    fresh = COMPILER.compile(grammars.check(grammar))
    checker = None if left_out else jsonschema.FormatChecker(["ipv4", "ipv6", "date", "email", "uuid"])
    validator = jsonschema.Draft202012Validator(schema, format_checker=checker)
    found: list[str] = []
    rng = random.Random(seed)
    for _ in range(20 * draws):
        text = walk(COMPILER, fresh, rng)
        if text is not None:
            found.append(text)
            if not left_out:
                validator.validate(json.loads(text))
        if len(found) == draws:
            break
    assert found, "no answer ended"
    return found


@pytest.mark.parametrize("name", TYPES)
def test_every_type(name: str) -> None:
    kind, left_out = TYPES[name]
    model = create_model("Model", value=(kind, ...))
    answers = valid(model.model_json_schema(), left_out)
    if not left_out and name not in SCHEMA_ALLOWS_MORE:
        for answer in answers:
            model.model_validate_json(answer)
    if name not in ("Any",):
        grammars.check(grammars.json_schema(to_strict_json_schema(model)))


ZOD_EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
ZOD: dict[str, tuple[dict[str, Any], set[str]]] = {
    "record": (
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}},
        set(),
    ),
    "record of an enum": (
        {
            "type": "object",
            "propertyNames": {"type": "string", "enum": ["a", "b"]},
            "additionalProperties": {"type": "number"},
        },
        set(),
    ),
    "short keys": ({"type": "object", "propertyNames": {"minLength": 1, "maxLength": 3}}, set()),
    "email": ({"type": "string", "format": "email", "pattern": ZOD_EMAIL}, {"pattern"}),
    "never": ({"type": "object", "properties": {"a": {"not": {}}, "b": {"type": "null"}}, "required": ["b"]}, set()),
    "unique booleans": ({"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "minItems": 2}, set()),
    "unique, false": ({"type": "array", "items": {"type": "null"}, "uniqueItems": False}, set()),
    "names with properties": (
        {"type": "object", "properties": {"a": {"type": "null"}}, "propertyNames": {"pattern": "^a"}},
        {"propertyNames"},
    ),
    "json in a string": ({"type": "string", "contentMediaType": "application/json"}, {"contentMediaType"}),
    "a format of ours": ({"type": "string", "format": "a format of ours"}, {"format.a format of ours"}),
    "number formats": ({"type": "integer", "format": "int32"}, set()),
}


@pytest.mark.parametrize("name", ZOD)
def test_other_helpers(name: str) -> None:
    schema, left_out = ZOD[name]
    assert set(rewritten(schema)[1]) == left_out
    valid(schema, left_out)


def test_lists_without_repetition_have_any_order() -> None:
    schema = {"type": "array", "items": {"enum": ["x", "y"]}, "uniqueItems": True, "minItems": 2}
    assert set(valid(schema, set(), draws=20)) >= {'["x","y"]', '["y","x"]'}


@pytest.mark.parametrize(
    ("pattern", "is_supported"),
    [
        (r"^a(b|c)*$", True),
        (r"(?=a)", False),
        (r"x(?:a(?<!b))", False),
        (r"(a)\1", False),
        (r"\ba", False),
        ("(", True),
    ],
)
def test_patterns_that_no_grammar_can_enforce(pattern: str, is_supported: bool) -> None:
    assert supported(pattern) is is_supported


def test_formats_as_patterns() -> None:
    for name, good, bad in (
        ("ipv4network", "10.1.0.0/16", "10.1.2.3/16"),
        ("ipv6interface", "1:2:3:4:5:6:7:8/64", "1::2/129"),
        ("uuid4", "6f1e9b62-7a39-4b0c-9d5e-3e8f1d2c4b5a", "6f1e9b62-7a39-1b0c-9d5e-3e8f1d2c4b5a"),
        ("date", "2024-01-31", "2024-04-31"),
        ("base64", "aGk=", "aGl="),
    ):
        assert re.fullmatch(PATTERNS[name], good)
        assert not re.fullmatch(PATTERNS[name], bad)
