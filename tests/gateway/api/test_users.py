"""A key that belongs to a user sees what that user stored, and nothing of other users of its tenant."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.gateway.process.settings import ModelSettings
from tests.gateway.api.test_identity import make_key
from tests.gateway.conftest import Running, Serving, until

LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "tiny", "prompt": "hi"}}


@pytest.fixture
async def gateway(serving: Serving, tmp_path: Path) -> AsyncIterator[Running]:
    models = (ModelSettings("tiny", "", input_price=1.0, output_price=2.0),)
    async with serving(store_url=f"sqlite:///{tmp_path}/store.db", models=models) as running:
        yield running


@pytest.fixture
async def people(gateway: Running) -> AsyncIterator[dict[str, httpx.AsyncClient]]:
    """A client for each key of one tenant; `all` is shared by users, `admin` is bound to a user and administers."""
    await gateway.client.post("/v1/admin/tenants", json={"id": "acme"})
    keys = {"admin": await make_key(gateway, user="root", scopes=["admin", "inference"])}
    for name in ("ann", "bob", "all"):
        keys[name] = await make_key(gateway, keys["admin"], user="" if name == "all" else name)
    clients = {
        name: httpx.AsyncClient(base_url=gateway.client.base_url, headers={"authorization": f"Bearer {key}"})
        for name, key in keys.items()
    }
    yield clients
    for client in clients.values():
        await client.aclose()


async def upload(client: httpx.AsyncClient) -> str:
    form = {"file": ("lines.jsonl", json.dumps(LINE).encode())}
    reply = await client.post("/v1/files", files=form, data={"purpose": "batch"})
    return str(reply.json()["id"])


async def batch_of(client: httpx.AsyncClient, file: str) -> httpx.Response:
    body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    return await client.post("/v1/batches", json=body)


async def ids(client: httpx.AsyncClient, path: str) -> set[str]:
    reply = await client.get(path)
    assert reply.status_code == 200, reply.text
    return {entry.get("id") or entry.get("request_id") for entry in reply.json()["data"]}


async def test_every_stored_object_is_its_users_own(people: dict[str, httpx.AsyncClient]) -> None:
    ann, bob, everyone, admin = (people[name] for name in ("ann", "bob", "all", "admin"))
    said = await ann.post("/v1/responses", json={"model": "tiny", "input": "my secret", "conversation": None})
    response = said.json()["id"]
    request = said.headers["x-request-id"]
    talk = {"model": "tiny", "messages": [{"role": "user", "content": "secret"}]}
    assert (await ann.post("/v1/chat/completions", json=talk, headers={"x-session-id": "trip"})).status_code == 200
    file = await upload(ann)
    batch = (await batch_of(ann, file)).json()["id"]

    async def finished() -> dict[str, Any]:
        found: dict[str, Any] = (await ann.get(f"/v1/batches/{batch}")).json()
        return found

    output = (await until(finished, lambda found: found["status"] == "completed"))["output_file_id"]

    paths = [
        f"/v1/responses/{response}",
        f"/v1/traces/{request}",
        "/v1/conversations/trip",
        f"/v1/files/{file}",
        f"/v1/files/{file}/content",
        f"/v1/files/{output}",
        f"/v1/files/{output}/content",
        f"/v1/batches/{batch}",
    ]
    for path in paths:
        assert (await ann.get(path)).status_code == 200, path
        assert (await bob.get(path)).status_code == 404, path
        if "conversations" not in path:  # these are asked for by user
            assert (await everyone.get(path)).status_code == 200, path
            assert (await admin.get(path)).status_code == 200, path
    for path in ("/v1/files", "/v1/batches", "/v1/traces", "/v1/conversations"):
        assert await ids(bob, path) == set(), path
        assert await ids(ann, path), path
    assert {file, output} == await ids(ann, "/v1/files")
    assert {file, output} <= await ids(everyone, "/v1/files")

    body = {"model": "tiny", "input": "go on", "previous_response_id": response}
    assert (await bob.post("/v1/responses", json=body)).status_code == 400
    assert (await batch_of(bob, file)).status_code == 400
    vote = {"response_id": response, "rating": "down"}
    assert (await bob.post("/v1/feedback", json=vote)).status_code == 404
    for method, path in (
        ("DELETE", f"/v1/responses/{response}"),
        ("DELETE", "/v1/conversations/trip"),
        ("DELETE", f"/v1/files/{output}"),
        ("POST", f"/v1/batches/{batch}/cancel"),
    ):
        assert (await bob.request(method, path)).status_code == 404, path
    assert (await bob.get("/v1/conversations", params={"user": "ann"})).status_code == 403
    for params in ({}, {"by": "user"}, {"by": "key"}):
        assert (await bob.get("/v1/usage", params=params)).json()["data"] == [], params
    assert {row["user"] for row in (await ann.get("/v1/usage", params={"by": "user"})).json()["data"]} == {"ann"}
    assert {row["user"] for row in (await everyone.get("/v1/usage", params={"by": "user"})).json()["data"]} == {"ann"}

    assert (await ann.post("/v1/responses", json=body)).status_code == 200
    assert (await ann.post("/v1/feedback", json=vote)).status_code == 200
    assert (await ann.delete(f"/v1/responses/{response}")).status_code == 200
    assert (await ann.delete(f"/v1/files/{output}")).status_code == 200


async def test_a_user_that_a_shared_key_named_is_that_user(people: dict[str, httpx.AsyncClient]) -> None:
    said = await people["all"].post("/v1/responses", json={"model": "tiny", "input": "hi", "user": "ann"})
    path = f"/v1/responses/{said.json()['id']}"
    assert (await people["ann"].get(path)).status_code == 200
    assert (await people["bob"].get(path)).status_code == 404
