"""The OpenAPI document, generated from the table of endpoints, the request structs and the shapes of replies, so that
generated clients and fuzzers see what the server really accepts and returns."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

import penstock
from penstock.gateway.app.endpoint import Endpoint

Document = dict[str, Any]
_ANY_OBJECT: Document = {"type": "object"}
_SCHEMAS = "#/components/schemas/{name}"
_IN_PATH = re.compile(r"{(\w+)(?::path)?}")
_KEYS = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "A key, as `Authorization: Bearer ...`."},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same key."},
}
_REQUEST_ID = {
    "name": "x-request-id",
    "in": "header",
    "schema": {"type": "string"},
    "description": "Name of this request; echoed when it has 1 to 128 letters, digits, `.`, `_`, `:` or `-`.",
}


@dataclass(frozen=True, slots=True)
class Replies:
    """The shapes of successful replies, by the name of the handler."""

    schemas: Mapping[str, Document]
    streams: frozenset[str]
    """Handlers that may answer with a stream of events instead."""
    records: frozenset[str]
    """Handlers that may answer with a stream of such objects, one a line."""
    accepted: frozenset[str]
    """Handlers that answer 202."""


def openapi(endpoints: Sequence[Endpoint], replies: Replies) -> Document:
    structs = [struct for endpoint in endpoints for struct in (endpoint.body, endpoint.query) if struct is not None]
    references, schemas = msgspec.json.schema_components(structs, ref_template=_SCHEMAS)
    reference = dict(zip(structs, references, strict=True))
    paths: Document = {}
    queries = {endpoint.query.__name__ for endpoint in endpoints if endpoint.query is not None}
    seen: set[str] = set()
    for endpoint in endpoints:
        for dialect in (endpoint.dialect, *endpoint.other_dialects):
            schemas[dialect.error_name] = dialect.error_schema
        operation: Document = {
            "tags": [endpoint.tag],
            "summary": endpoint.summary,
            "operationId": _unique(endpoint, seen),
        }
        operation["parameters"] = [*_path_parameters(endpoint), *_query_parameters(endpoint, schemas), _REQUEST_ID]
        operation["responses"] = _responses(endpoint, replies)
        paths.setdefault(endpoint.path.replace(":path", ""), {})[endpoint.method.lower()] = operation
        content = {} if endpoint.body is None else _json(reference[endpoint.body])
        if endpoint.form is not None:
            content["multipart/form-data"] = {"schema": endpoint.form}
        if content:
            operation["requestBody"] = {"required": True, "content": content}
        if endpoint.scope is not None:
            # The empty alternative: a server without keys accepts every request from its machine.
            operation["security"] = [{"bearer": []}, {"x-api-key": []}, {}]
            operation["description"] = f"Needs a key with the scope `{endpoint.scope}`, once there are keys."
    for name in queries:
        del schemas[name]  # written out as parameters
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Penstock",
            "description": "OpenAI-compatible serving of language models.",
            "version": penstock.__version__,
        },
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": _KEYS},
    }


def _unique(endpoint: Endpoint, seen: set[str]) -> str:
    """An operation id; a handler that answers several paths has one for each."""
    name = endpoint.name
    if name in seen:
        name = "_".join((name, *re.findall(r"\w+", endpoint.path)))
    seen.add(name)
    return name


def _path_parameters(endpoint: Endpoint) -> list[Document]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in _IN_PATH.findall(endpoint.path)
    ]


def _query_parameters(endpoint: Endpoint, schemas: Document) -> list[Document]:
    if endpoint.query is None:
        return []
    schema = schemas[endpoint.query.__name__]
    return [
        {"name": name, "in": "query", "required": name in schema.get("required", ()), "schema": _not_null(of)}
        for name, of in schema["properties"].items()
    ]


def _not_null(schema: Document) -> Document:
    """A query parameter is present or absent; it cannot be null."""
    kept = [option for option in schema.get("anyOf", ()) if option != {"type": "null"}]
    found = {**kept[0], **{key: value for key, value in schema.items() if key != "anyOf"}} if kept else dict(schema)
    if found.get("default", ...) is None:
        del found["default"]
    return found


def _responses(endpoint: Endpoint, replies: Replies) -> Document:
    reply = replies.schemas.get(endpoint.name, _ANY_OBJECT)
    content = reply if any("/" in kind for kind in reply) else _json(reply)
    if endpoint.name in replies.streams:
        content = {**content, "text/event-stream": {}}
    if endpoint.name in replies.records:
        content = {**content, "application/x-ndjson": {}}
    dialects = (endpoint.dialect, *endpoint.other_dialects)
    forms: list[Document] = [{"$ref": _SCHEMAS.format(name=dialect.error_name)} for dialect in dialects]
    error = _json({"anyOf": forms} if endpoint.other_dialects else forms[0])
    success = "202" if endpoint.name in replies.accepted else "200"
    found: Document = {success: {"description": "The answer.", "content": content}}
    statuses = {"400": "What is wrong with the request, and where."}
    if endpoint.scope is not None:
        statuses |= {"401": "No key, or one that is not known.", "403": "The key lacks the scope."}
    if _IN_PATH.search(endpoint.path) or endpoint.body is not None:
        statuses["404"] = "There is no such thing."
    if endpoint.body is not None or endpoint.form is not None:
        statuses |= {"408": "The body did not arrive in time.", "413": "The body is too large."}
    if endpoint.serves_tokens:
        statuses |= {"429": "A limit of the caller.", "503": "Not at the moment; `Retry-After` says when."}
    if endpoint.scope is None:  # health: the same body says what is wrong
        found["503"] = {"description": "Not at the moment.", "content": _json(_ANY_OBJECT)}
    found |= {status: {"description": text, "content": error} for status, text in statuses.items()}
    found["default"] = {"description": "Any other error.", "content": error}
    return found


def _json(schema: Document) -> Document:
    return {"application/json": {"schema": schema}}
