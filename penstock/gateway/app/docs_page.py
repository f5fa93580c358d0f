"""`/docs`: the OpenAPI document as a page. It is written here, whole, and loads nothing from anywhere."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color-scheme: light dark }
summary { cursor: pointer; padding: .2rem 0 } summary span { opacity: .7 }
code { font: 13px/1.4 ui-monospace, monospace } pre { overflow-x: auto; padding: .6rem; border: 1px solid #8884 }
b { display: inline-block; min-width: 4.2rem }
"""  # noqa: E501


def page(document: Mapping[str, Any]) -> str:
    """Every endpoint by its tag, with what it takes and answers."""
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
