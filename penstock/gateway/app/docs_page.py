"""`/openapi.json`, and `/docs`: the same document as one page that loads nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from html import escape
from typing import Any

from penstock.gateway.app.endpoint import Endpoint
from penstock.gateway.app.exchange import JSON, Exchange, encode_json
from penstock.gateway.app.openapi import Document, Replies, openapi

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color-scheme: light dark }
summary { cursor: pointer; padding: .2rem 0 } summary span { opacity: .7 }
code { font: 13px/1.4 ui-monospace, monospace } pre { overflow-x: auto; padding: .6rem; border: 1px solid #8884 }
b { display: inline-block; min-width: 4.2rem }
"""  # noqa: E501
HTML = b"text/html; charset=utf-8"


class Documentation:
    """Answers both; they are made when they are first asked for, and all connections share the bytes: no key is needed
    to ask for them."""

    def __init__(self, endpoints: Sequence[Endpoint], replies: Replies) -> None:
        self._endpoints = endpoints
        self._replies = replies

    @cached_property
    def _document(self) -> Document:
        return openapi(self._endpoints, self._replies)

    @cached_property
    def _encoded(self) -> bytes:
        return encode_json(self._document)

    @cached_property
    def _page(self) -> bytes:
        return page(self._document).encode()

    async def openapi_json(self, exchange: Exchange) -> None:
        await exchange.reply(200, self._encoded, JSON)

    async def docs(self, exchange: Exchange) -> None:
        await exchange.reply(200, self._page, HTML)


PAGES = tuple(
    Endpoint(method, path, handler, summary, "Documentation", scope=None, logged=False)
    for method, path, handler, summary in (
        ("GET", "/openapi.json", Documentation.openapi_json, "The OpenAPI document."),
        ("GET", "/docs", Documentation.docs, "The same as a page."),
    )
)
"""Not part of the API, so not in its table."""


def page(document: Mapping[str, Any]) -> str:
    """Every endpoint by its tag, with its parameters and replies."""
    info = document["info"]
    body = "".join(_section(document, tag) for tag in _tags(document))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(info["title"])}</title>'
        f"<style>{_STYLE}</style><h1>{escape(info['title'])} {escape(info['version'])}</h1>"
        f'<p>{escape(info.get("description", ""))} For programs: <a href="openapi.json">openapi.json</a>.</p>{body}'
        f"<h2>Schemas</h2>{_schemas(document)}</html>"
    )


def _operations(document: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def _tags(document: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(tag for _, _, operation in _operations(document) for tag in operation.get("tags", ())))


def _section(document: Mapping[str, Any], tag: str) -> str:
    entries = "".join(
        f"<details><summary><b>{method}</b> <code>{escape(path)}</code> <span>{escape(operation.get('summary', ''))}"
        f"</span></summary>{_json({key: operation[key] for key in _SHOWN if key in operation})}</details>"
        for method, path, operation in _operations(document)
        if tag in operation.get("tags", ())
    )
    return f"<h2>{escape(tag)}</h2>{entries}"


_SHOWN = ("parameters", "requestBody", "responses", "security")


def _schemas(document: Mapping[str, Any]) -> str:
    schemas = document.get("components", {}).get("schemas", {})
    return "".join(
        f'<details id="{escape(name)}"><summary><code>{escape(name)}</code></summary>{_json(schema)}</details>'
        for name, schema in sorted(schemas.items())
    )


def _json(value: object) -> str:
    return f"<pre><code>{escape(json.dumps(value, indent=2, ensure_ascii=False))}</code></pre>"
