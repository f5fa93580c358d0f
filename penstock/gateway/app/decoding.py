"""Decodes bytes into typed requests; every failure becomes a 400 that names the parameter."""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping, MutableMapping
from typing import Any, TypeVar
from urllib.parse import parse_qs

import msgspec
from msgspec import Raw, UnsetType

from penstock.gateway.app.choices import choices
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.json_limits import excess

T = TypeVar("T")
Unsupported = Raw | UnsetType
"""The type of a field that exists in a public API and is not supported here."""

_AT = re.compile(r" - at `(?:key` in `)?\$\.?(?P<path>[^`]*)`$")
_BYTE = re.compile(r"\(byte (\d+)\)$")
_NO_CHOICE = ("Invalid enum value", "Invalid value")
_OTHER_PART = re.compile(r"^Invalid value '(?P<kind>(?:input_)?(?:image|video|audio)\w*)'$")
"""A part of a message that models with other senses take."""
_TRUNCATED = "Input data was truncated"
_HALF_AT_END = re.compile(rb'\\u[dD][89abAB][0-9a-fA-F]{2}"[^\\"]{0,4}$')
"""The end of a body whose last string ends with half of a character. The parser expects the other half, an escape of
six bytes, and reports a body with fewer left as truncated."""
_MISTAKES = {
    (b"NaN", b"Infinity"): " JSON has no NaN and no Infinity; leave the field out, or send a number.",
    (b"True", b"False", b"None", b"undefined"): " JSON writes true, false and null.",
    (b"'",): " JSON has double quotes, not single ones.",
    (b"\n", b"\r", b"\t"): " Inside of strings, line breaks and tabs are written as \\n and \\t.",
}
"""What stands where a parser gave up, and what helps."""
_FIELD = re.compile(r"^Object (?P<what>contains unknown|missing required) field `(?P<name>.*)`$", re.DOTALL)


def decode(decoder: msgspec.json.Decoder[T], body: bytes | Raw, at: str = "") -> T:
    """`at`: the path of `body` inside the request, when it is a part of it."""
    if not at and (much := excess(bytes(body))) is not None:
        raise InvalidRequest(f"The request body has {much}; split it into several requests.", code="body_too_complex")
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _explain(str(error), at, decoder.type) from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(_not_json(str(error), bytes(body)), code="invalid_json") from None
    except UnicodeDecodeError:
        raise InvalidRequest("The request body is not valid UTF-8.", code="invalid_json") from None
    except RecursionError:
        raise InvalidRequest("The request body is nested too deeply.", code="invalid_json") from None


def _not_json(problem: str, body: bytes) -> str:
    """What is wrong with a body that is no JSON: `problem` in the words of the parser, and what mends it where that is
    a common mistake."""
    if not body.strip():
        return "The request body is empty; send a JSON object."
    if body.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in body[:2]:
        return "The request body is not valid JSON: it looks like UTF-16; send it as UTF-8."
    if problem == _TRUNCATED and not _HALF_AT_END.search(body):
        return f"The request body is not valid JSON: it ends too early, after {len(body)} bytes."
    if problem == _TRUNCATED:
        problem = "unexpected end of escaped utf-16 surrogate pair"
    at = _BYTE.search(problem)
    wrong = body[int(at[1]) : int(at[1]) + 9] if at is not None else b""
    advice = next((advice for found, advice in _MISTAKES.items() if wrong.startswith(found)), "")
    if "surrogate" in problem:
        advice = " Half of a character is missing: was a string cut inside of it?"
    return f"The request body is not valid JSON: {problem}.{advice}"


def decode_query(kind: type[T], scope: MutableMapping[str, Any]) -> T:
    """The query string as the struct that documents it; where a name is repeated, the last value counts."""
    try:
        found = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True, errors="replace")
    except ValueError as error:  # far too many parameters
        raise InvalidRequest(f"The query cannot be read: {error}.") from None
    return convert_query(kind, {name: values[-1] for name, values in found.items()})


def convert_query(kind: type[T], found: Mapping[str, str]) -> T:
    """Named strings from a query or a form as the struct that documents them."""
    try:
        return msgspec.convert(found, kind, strict=False)
    except msgspec.ValidationError as error:
        raise _explain(str(error), "", kind) from None


def _explain(message: str, inside: str, kind: Any) -> InvalidRequest:
    """`kind`: the type that a body, or the part of it at `inside`, should have had."""
    path = inside
    if at := _AT.search(message):
        path, message = _joined(inside, at["path"]), message[: at.start()]
        if (other := _OTHER_PART.match(message)) and at["path"].endswith("type"):
            return part_not_supported(other["kind"], _limited(path))
        if message.startswith(_NO_CHOICE) and (allowed := choices(kind, at["path"])):
            message = f"{message}; use one of {', '.join(f'`{value}`' for value in allowed)}"
    if field := _FIELD.match(message):
        param = _limited(f"{path}.{field['name']}" if path else field["name"])
        if field["what"] == "missing required":
            return InvalidRequest(f"Missing required parameter: `{param}`.", param=param, code="missing_parameter")
        return InvalidRequest(
            f"Unknown parameter: `{param}`.",
            param=param,
            code="unknown_parameter",
        )
    if not path:
        return InvalidRequest(f"The request body is wrong: {message}.")
    path = _limited(path)
    return InvalidRequest(f"Invalid `{path}`: {_lower(message)}.", param=path, code="invalid_value")


def _joined(outer: str, inner: str) -> str:
    return f"{outer}.{inner}" if outer and inner and not inner.startswith("[") else outer + inner


def _limited(param: str) -> str:
    """Parameter names come from the client and may be arbitrarily long."""
    return param if len(param) <= 128 else param[:125] + "..."


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]


def plain(request: msgspec.Struct) -> dict[str, Any]:
    """A decoded request as dicts, lists and values; what was kept as it was sent (`Raw`) too."""
    return msgspec.to_builtins(request, enc_hook=_plain_raw)  # type: ignore[no-any-return]


def _plain_raw(value: Any) -> Any:
    if isinstance(value, Raw):
        return msgspec.json.decode(value)
    raise NotImplementedError(f"a request has no {type(value).__name__}")


def given(value: Unsupported) -> bool:
    """Whether a raw field was sent with a value other than null and an empty list."""
    return isinstance(value, Raw) and bytes(value).strip() not in (b"null", b"[]")


def part_not_supported(kind: str, param: str, instead: str = "") -> InvalidRequest:
    """For a part of a message that is not text: `kind` is its type, `instead` what would do."""
    if kind.removeprefix("input_").startswith(("image", "video", "audio")):
        instead = "of models that see or hear, only the part that reads and writes text is run; send text"
    return InvalidRequest(
        f"Content parts of type `{kind[:64]}` are not supported yet; {instead or 'send text'}.",
        param=param,
        code="unsupported_parameter",
    )


def not_supported(param: str, why: str = "") -> InvalidRequest:
    """`why`: the reason, and what would do instead."""
    says = f"`{param}` is not supported: {why}." if why else f"`{param}` is not supported yet."
    return InvalidRequest(says, param=param, code="unsupported_parameter")
