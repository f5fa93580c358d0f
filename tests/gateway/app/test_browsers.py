"""Without keys, only programs and pages of this server are let in."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.gateway.api.test_identity import make_key
from tests.gateway.conftest import Running, Serving

TENANT = b'{"id": "evil"}'
EVIL = "https://evil.example"


@pytest_asyncio.fixture
async def gateway(serving: Serving, tmp_path: Path) -> AsyncIterator[Running]:
    async with serving(store_url=f"sqlite:///{tmp_path}/store.db", trusted_hosts=("proxy.lan",)) as running:
        yield running


def post(gateway: Running, kind: str | None = "application/json", **headers: str) -> Any:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    if kind is not None:
        given["content-type"] = kind
    return gateway.client.post("/v1/admin/tenants", content=TENANT, headers=given)


async def test_names_that_others_control_are_refused(gateway: Running) -> None:
    for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "0.0.0.0",
                 "10.0.0.1", "[::2]:8000", "", "[", "proxy.lan.evil.example", "\u00e9"):  # fmt: skip
        headers = {"host": host.encode("latin-1")}
        refused = await gateway.client.get("/v1/models", headers=headers)
        assert refused.status_code in (400, 403), host  # 400: it is no host at all
        refused = await gateway.client.post("/v1/admin/tenants", json={"id": "evil"}, headers=headers)
        assert refused.status_code in (400, 403), host
    for host in ("localhost", "LOCALHOST:8000", "127.0.0.1", "127.9.9.9:1", "[::1]:8000", "[::1]", "proxy.lan:443"):
        assert (await gateway.client.get("/v1/models", headers={"host": host})).status_code == 200, host
    assert (await gateway.client.get("/health/live", headers={"host": "evil.example"})).status_code == 200


async def test_pages_of_other_origins_are_refused(gateway: Running) -> None:
    own = f"http://127.0.0.1:{gateway.port}"
    foreign: list[dict[str, str]] = [
        {"origin": EVIL},
        {"origin": "null"},
        {"origin": f"http://127.0.0.1:{gateway.port + 1}"},
        {"origin": f"http://localhost:{gateway.port}"},
        {"origin": f"http://evil.example:{gateway.port}"},
        {"origin": f"ftp://127.0.0.1:{gateway.port}"},
        {"origin": ""},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
        {"origin": own, "sec_fetch_site": "cross-site"},
    ]
    for headers in foreign:
        for kind in ("application/json", "text/plain", None):
            assert (await post(gateway, kind, **headers, x_penstock_console="1")).status_code == 403, headers
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        for path in ("/v1/admin/keys", "/v1/models", "/metrics"):
            assert (await gateway.client.get(path, headers=given)).status_code == 403, (path, headers)
        assert (await gateway.client.delete("/v1/cache", headers=given)).status_code == 403
        form = {"file": ("a.jsonl", b"{}")}
        upload = await gateway.client.post("/v1/files", files=form, data={"purpose": "batch"}, headers=given)
        assert upload.status_code == 403
    found = (await gateway.client.get("/v1/admin/tenants")).json()["data"]
    assert "evil" not in [tenant["id"] for tenant in found]


async def test_a_page_of_this_server_proves_itself(gateway: Running) -> None:
    own = {"origin": f"http://127.0.0.1:{gateway.port}", "sec_fetch_site": "same-origin"}
    assert (await post(gateway, "text/plain", **own)).status_code == 403, "a form could send this"
    form = {"file": ("a.jsonl", b"{}")}
    headers = {"origin": own["origin"]}
    upload = await gateway.client.post("/v1/files", files=form, data={"purpose": "batch"}, headers=headers)
    assert upload.status_code == 403, "a form could send this too"
    headers["x-penstock-console"] = "1"
    upload = await gateway.client.post("/v1/files", files=form, data={"purpose": "batch"}, headers=headers)
    assert upload.status_code == 200
    assert (await post(gateway, **own)).status_code == 200


async def test_programs_say_json(gateway: Running) -> None:
    for kind in (
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "nonsense",
        None,
    ):
        refused = await post(gateway, kind)
        assert refused.status_code == 415 and refused.json()["error"]["code"] == "unsupported_media_type", kind
    assert (await post(gateway, "Application/JSON; charset=utf-8")).status_code == 200
    assert (await gateway.client.post("/v1/batches/none/cancel")).status_code == 404, "it has no body to declare"
    form = {"file": ("a.jsonl", b"{}")}
    assert (await gateway.client.post("/v1/files", files=form, data={"purpose": "batch"})).status_code == 200


@pytest.mark.parametrize(("origins", "allowed"), [((EVIL,), (EVIL,)), (("*",), ("http://localhost:3000",))])
async def test_configured_origins_are_let_in_without_a_key(
    serving: Serving, tmp_path: Path, origins: tuple[str, ...], allowed: tuple[str, ...]
) -> None:
    async with serving(store_url=f"sqlite:///{tmp_path}/store.db", cors_origins=origins) as gateway:
        for origin in allowed:
            reply = await post(gateway, origin=origin, sec_fetch_site="cross-site")
            assert reply.status_code == 200 and "access-control-allow-origin" in reply.headers
        refused = await post(gateway, origin="https://other.example")
        assert refused.status_code == 403, "`*` is no invitation to administer a server without keys"


async def test_with_keys_the_key_decides(gateway: Running) -> None:
    assert (await post(gateway)).status_code == 200
    key = await make_key(gateway, tenant="evil")
    async with httpx.AsyncClient(base_url=gateway.client.base_url) as client:
        for headers in ({"host": "models.example"}, {"origin": EVIL}, {"content-type": "text/plain"}):
            without = await client.get("/v1/models", headers=headers)
            assert without.status_code == 401, "there are no cookies that a browser would add"
            used = await client.get("/v1/models", headers={**headers, "authorization": f"Bearer {key}"})
            assert used.status_code == 200
