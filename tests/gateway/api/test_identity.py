"""Keys at the door of a real gateway, and the admin API that makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.config.schema import DEFAULT_TIERS
from tests.gateway.conftest import Running, Serving

pytestmark = pytest.mark.asyncio


def settings(tmp_path: Path, **more: Any) -> dict[str, Any]:
    url = f"sqlite:///{tmp_path / 'keys.db'}"
    return {"store_url": url, "default_tier": "standard", "tiers": DEFAULT_TIERS, "key_fresh_s": 0.05, **more}


async def make_key(running: Running, key: str | None = None, **body: Any) -> str:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    reply = await running.client.post("/v1/admin/keys", json={"tenant": "acme", **body}, headers=headers)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["key"])


async def test_the_first_key_closes_the_doors(serving: Serving, tmp_path: Path) -> None:
    async with serving(**settings(tmp_path)) as running:
        assert (await running.chat()).status_code == 200
        await running.client.post("/v1/admin/tenants", json={"id": "acme", "tier": "free"})
        admin = await make_key(running, scopes=["admin"])
        user = await make_key(running, admin)
        await running.client.get("/health/live")
        running.client.headers["authorization"] = f"Bearer {user}"
        assert (await running.chat()).status_code == 200
        del running.client.headers["authorization"]
        refused = await running.chat()
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"
        assert (await running.client.get("/v1/models")).status_code == 401
        assert (await running.client.get("/metrics")).status_code == 401
        assert (await running.client.get("/health/live")).status_code == 200


async def test_scopes_are_kept_apart(serving: Serving, tmp_path: Path) -> None:
    async with serving(**settings(tmp_path)) as running:
        await running.client.post("/v1/admin/tenants", json={"id": "acme"})
        admin = await make_key(running, scopes=["admin"])
        user = await make_key(running, admin)
        metrics = await make_key(running, admin, scopes=["metrics"])
        allowed = {
            admin: {"/v1/admin/keys": 200, "/v1/models": 403, "/metrics": 403},
            user: {"/v1/admin/keys": 403, "/v1/models": 200, "/metrics": 403},
            metrics: {"/v1/admin/keys": 403, "/v1/models": 403, "/metrics": 200},
        }
        for key, paths in allowed.items():
            for path, status in paths.items():
                reply = await running.client.get(path, headers={"x-api-key": key})
                assert reply.status_code == status, (path, reply.text)


async def test_keys_and_tenants_through_the_admin_api(serving: Serving, tmp_path: Path) -> None:
    async with serving(**settings(tmp_path)) as running:
        client = running.client
        assert (await client.post("/v1/admin/tenants", json={"id": "acme"})).json()["tier"] == "standard"
        client.headers["authorization"] = f"Bearer {await make_key(running, scopes=['admin'])}"
        changed = await client.patch("/v1/admin/tenants/acme", json={"tier": "enterprise"})
        assert changed.json()["tier"] == "enterprise"
        victim = await make_key(running, client.headers["authorization"].split()[1])
        listed = (await client.get("/v1/admin/keys")).json()["data"]
        assert len(listed) == 2 and all("digest" not in key and "key" not in key for key in listed)
        gone = await client.delete(f"/v1/admin/keys/{victim.rpartition('_')[0]}")
        assert gone.json()["revoked"] is True
        wrong = {
            "/v1/admin/tenants": [{"id": "a b"}, {"id": "acme"}, {"id": "x", "tier": "gold"}, {"name": "x"}],
            "/v1/admin/keys": [
                {"tenant": "nobody"},
                {"tenant": "acme", "scopes": ["root"]},
                {"tenant": "acme", "x": 1},
            ],
        }
        for path, bodies in wrong.items():
            for body in bodies:
                assert (await client.post(path, json=body)).status_code == 400, body
        assert (await client.patch("/v1/admin/tenants/nobody", json={})).status_code == 404
        assert (await client.delete("/v1/admin/keys/psk_nothere1")).status_code == 404


async def test_tenants_do_not_share_cached_prefixes(serving: Serving, tmp_path: Path) -> None:
    for share, salts in ((False, ["acme", "other", "acme"]), (True, ["", "", ""])):
        folder = tmp_path / str(share)
        async with serving(**settings(folder, share_prefixes=share)) as running:
            for tenant in ("acme", "other"):
                await running.client.post("/v1/admin/tenants", json={"id": tenant})
            admin = await make_key(running, scopes=["admin"])
            keys = {tenant: await make_key(running, admin, tenant=tenant) for tenant in ("acme", "other")}
            for tenant in ("acme", "other", "acme"):
                running.client.headers["authorization"] = f"Bearer {keys[tenant]}"
                assert (await running.chat()).status_code == 200
            assert [request.cache_salt for request in running.engine.seen][-3:] == salts


async def test_an_expiry_in_milliseconds_is_refused(serving: Serving, tmp_path: Path) -> None:
    async with serving(**settings(tmp_path)) as running:
        await running.client.post("/v1/admin/tenants", json={"id": "acme", "tier": "free"})
        reply = await running.client.post("/v1/admin/keys", json={"tenant": "acme", "expires_at": 1_800_000_000_000})
        assert reply.status_code == 400 and "expires_at" in reply.text
