"""Every method of the official SDK that docs/clients.md promises reaches an endpoint."""

from __future__ import annotations

import inspect
import re

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
    "models": "list retrieve",
    "files": "create list retrieve content delete",
    "batches": "create retrieve list cancel",
    "vector_stores": "create retrieve update list delete search",
    "vector_stores.files": "create retrieve update list delete content",
    "vector_stores.file_batches": "create retrieve cancel list_files",
}
_REQUEST = re.compile(r"self\._(get|post|delete|get_api_list)\(\s*(?:path_template\()?\s*f?\"([^\"]+)\"")
_METHODS = {"get": "GET", "get_api_list": "GET", "post": "POST", "delete": "DELETE"}
SERVED = {(endpoint.method, re.sub(r"\{[^}]+\}", "{}", endpoint.path)) for endpoint in ENDPOINTS}


@pytest.mark.parametrize("resource", PROMISED)
def test_a_resource(resource: str) -> None:
    found: object = openai.OpenAI(api_key="none")
    for name in resource.split("."):
        found = getattr(found, name)
    for name in PROMISED[resource].split():
        source = inspect.getsource(getattr(type(found), name))
        request = _REQUEST.search(source)
        assert request is not None, f"{resource}.{name}"
        method = "POST" if 'method="post"' in source else _METHODS[request[1]]
        path = "/v1" + re.sub(r"\{\w+\}", "{}", request[2])
        assert (method, path) in SERVED, f"{resource}.{name}: {method} {path}"
