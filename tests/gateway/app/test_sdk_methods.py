"""Every method of the SDKs that docs/clients.md promises reaches an endpoint, and the page names all others."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import anthropic
import openai
import pytest

from penstock.gateway.api.endpoints import ENDPOINTS

PROMISED = {
    "chat.completions": "create list retrieve update delete",
    "chat.completions.messages": "list",
    "completions": "create",
    "responses": "create retrieve delete cancel compact",
    "responses.input_items": "list",
    "responses.input_tokens": "count",
    "conversations": "create retrieve update delete",
    "conversations.items": "create list retrieve delete",
    "embeddings": "create",
    "moderations": "create",
    "models": "list retrieve delete",
    "files": "create list retrieve content delete",
    "webhooks": "create retrieve update list delete rotate_secret test",
    "webhooks.event_types": "list",
    "batches": "create retrieve list cancel",
    "vector_stores": "create retrieve update list delete search",
    "vector_stores.files": "create retrieve update list delete content",
    "vector_stores.file_batches": "create retrieve cancel list_files",
    "uploads": "create complete cancel",
    "uploads.parts": "create",
    "beta.responses": "create retrieve delete cancel compact",
    "beta.responses.input_items": "list",
    "beta.responses.input_tokens": "count",
}
MESSAGES = {
    "messages": "create parse count_tokens",
    "messages.batches": "create retrieve list cancel delete",
    "models": "list retrieve",
    "files": "upload list retrieve_metadata delete download",
    "beta.files": "upload list retrieve_metadata delete download",
    "beta.messages": "create parse count_tokens",
    "beta.messages.batches": "create retrieve list cancel delete",
    "beta.models": "list retrieve",
}
_REQUEST = re.compile(r"self\._(get|post|delete|get_api_list)\(\s*(?:path_template\()?\s*f?\"([^\"?]+)[\"?]")
_METHODS = {"get": "GET", "get_api_list": "GET", "post": "POST", "delete": "DELETE"}
SERVED = {(endpoint.method, re.sub(r"\{[^}]+\}", "{}", endpoint.path)) for endpoint in ENDPOINTS}
PAGE = Path(__file__).resolve().parents[3] / "docs" / "clients.md"


def client_of(sdk: str) -> object:
    return openai.OpenAI(api_key="none") if sdk == "openai" else anthropic.Anthropic(api_key="none")


def asked(sdk: str, method: object) -> tuple[str, str] | None:
    """The request that a method of an SDK makes; None: it makes none of its own."""
    source = inspect.getsource(method)  # type: ignore[arg-type]
    if (found := _REQUEST.search(source)) is None:
        return None
    prefix = "/v1" if sdk == "openai" else ""
    verb = "POST" if 'method="post"' in source else _METHODS[found[1]]
    return verb, prefix + re.sub(r"\{\w+\}", "{}", found[2])


def methods(sdk: str, found: object, path: str = "client") -> Iterator[tuple[str, object]]:
    """All methods of an SDK, by their full names."""
    for name, member in inspect.getmembers_static(type(found)):
        if name.startswith(("_", "with_")):
            continue
        if isinstance(member, cached_property) or type(member).__name__ == "cached_property":
            part = getattr(found, name)
            if type(part).__module__.startswith(f"{sdk}.resources"):
                yield from methods(sdk, part, f"{path}.{name}")
        elif inspect.isfunction(member) and type(found).__module__.startswith(f"{sdk}.resources"):
            yield f"{path}.{name}", member


def named(heading: str) -> dict[str, bool]:
    """What a table of the page names, and whether it is served. `.b` behind `a.x` is `a.b`; a star is everything."""
    section = PAGE.read_text().split(f"### {heading}\n")[1].split("\n#")[0]
    names: dict[str, bool] = {}
    for row in re.findall(r"^\| (`.*?) \| (.*?) \|$", section, re.M):
        resource = ""
        for name in re.findall(r"`([\w.*]+)`", row[0]):
            if not name.startswith("."):
                resource = name.rpartition(".")[0]
            names[name if not name.startswith(".") else resource + name] = row[1].startswith("yes")
    return names


@pytest.mark.parametrize(
    ("sdk", "resource"), [*(("openai", name) for name in PROMISED), *(("anthropic", name) for name in MESSAGES)]
)
def test_a_resource(sdk: str, resource: str) -> None:
    found = client_of(sdk)
    for name in resource.split("."):
        found = getattr(found, name)
    for name in (PROMISED if sdk == "openai" else MESSAGES)[resource].split():
        assert asked(sdk, getattr(type(found), name)) in SERVED, f"{resource}.{name}"


@pytest.mark.parametrize(
    ("sdk", "heading"), [("openai", "Methods of the official SDK"), ("anthropic", "Methods of Anthropic's SDK")]
)
def test_the_page_names_every_method(sdk: str, heading: str) -> None:
    rows = named(heading)
    wrong = []
    for name, method in methods(sdk, client_of(sdk)):
        request = asked(sdk, method)
        matches = [row for row in rows if row == name or (row.endswith(".*") and name.startswith(row[:-1]))]
        longest = max(matches, key=len, default=None)
        if longest is None and request is not None and not name.endswith("_content"):
            wrong.append(f"{name} is not named")
        elif longest is not None and rows[longest] and request is not None and request not in SERVED:
            wrong.append(f"{name} is not served")
    assert not wrong
