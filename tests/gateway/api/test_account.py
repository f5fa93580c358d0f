"""What a key without the scope `admin` sees: limits, spending, keys and requests of its own tenant only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from penstock.config.schema import DEFAULT_TIERS, RequestLogConfig
from penstock.gateway.process.settings import ModelSettings
from tests.gateway.conftest import Running, Serving, eventually

PRICED = (ModelSettings("tiny", "", input_price=1.0, output_price=2.0),)
FAST = RequestLogConfig(flush_s=0.01)
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


def settings(tmp_path: Path) -> dict[str, Any]:
    url = f"sqlite:///{tmp_path / 'keys.db'}"
    return {"store_url": url, "default_tier": "standard", "tiers": DEFAULT_TIERS, "request_log": FAST, "models": PRICED}


async def get(running: Running, path: str, key: str) -> httpx.Response:
    return await running.client.get(path, headers={"x-api-key": key})


async def test_tenants_see_their_own_account_and_nothing_of_each_other(serving: Serving, tmp_path: Path) -> None:
    async with serving(**settings(tmp_path)) as running:
        client = running.client
        open_account = (await client.get("/v1/account")).json()
        assert (open_account["tenant"], open_account["key"], open_account["allowed"]) == ("default", None, None)
        admin = ""
        keys = {}
        for tenant in ("acme", "globex"):
            made = await client.post(
                "/v1/admin/tenants",
                json={"id": tenant, "limits": {"requests_per_minute": 100}},
                headers={"x-api-key": admin} if admin else {},
            )
            assert made.status_code == 200
            if not admin:
                admin = (await client.post("/v1/admin/keys", json={"tenant": "acme", "scopes": ["admin"]})).json()[
                    "key"
                ]
            for user in ("", "ann"):
                body = {"tenant": tenant, "user": user, "name": f"{tenant}-{user}", "limits": {"daily_budget": 5}}
                reply = await client.post("/v1/admin/keys", json=body, headers={"x-api-key": admin})
                keys[tenant, user] = reply.json()["key"]
        for key in keys.values():
            assert (await client.post("/v1/chat/completions", json=CHAT, headers={"x-api-key": key})).status_code == 200

        account = (await get(running, "/v1/account", keys["acme", ""])).json()
        assert (account["tenant"], account["scopes"]) == ("acme", ["inference"])
        used = {(one["per"], one["limit"]): one for one in account["used"]}
        assert used["tenant", "requests_per_minute"]["used"] == 2, "both keys of the tenant"
        budget = used["key", "daily_budget"]
        assert budget["most"] == 5 and 0 < budget["used"] < account["spent"]["today"], "only this key's part"
        assert account["allowed"]["requests_per_minute"] == used["tenant", "requests_per_minute"]["most"]

        listed = (await get(running, "/v1/keys", keys["acme", ""])).json()["data"]
        assert {key["name"] for key in listed} == {"", "acme-", "acme-ann"} and {key["tenant"] for key in listed} == {
            "acme"
        }
        assert all(not {"key", "digest"} & set(key) for key in listed)
        assert next(key for key in listed if key["name"] == "acme-")["spent"]["month"] > 0
        of_ann = (await get(running, "/v1/keys", keys["acme", "ann"])).json()["data"]
        assert [key["name"] for key in of_ann] == ["acme-ann"]

        await eventually(lambda: running.parts.metrics.request_log_written.value >= 8)
        for (tenant, user), key in keys.items():
            path = "/v1/requests?inference=true&since=1h&tenant=globex"
            assert (await get(running, path, key)).status_code == 400, "no other tenant can be asked for"
            rows = (await get(running, "/v1/requests?inference=true", key)).json()["data"]
            assert {row["tenant"] for row in rows} == {tenant} and {row["route"] for row in rows} == {
                "/v1/chat/completions"
            }
            assert len(rows) == (1 if user else 2)
            assert (await get(running, "/v1/admin/requests", key)).status_code == 403
        everything = (await get(running, "/v1/admin/requests?inference=true&model=tiny", admin)).json()["data"]
        assert len(everything) == 4
        assert not (await get(running, "/v1/admin/requests?model=none", admin)).json()["data"]

        mine = (await get(running, "/v1/requests?inference=true", keys["acme", ""])).json()["data"][0]["request_id"]
        trace = (await get(running, f"/v1/traces/{mine}", keys["acme", ""])).json()
        assert float(trace["charge"]["cost"]) > 0 and trace["asked_model"] == "tiny" and trace["selection"]
        assert (await get(running, f"/v1/traces/{mine}", keys["globex", ""])).status_code == 404
        tenant = (await get(running, "/v1/admin/tenants/acme", admin)).json()
        assert {one["per"] for one in tenant["used"]} == {"tenant"} and tenant["spent"]["today"] > 0
        by_key = (await get(running, "/v1/admin/keys", admin)).json()["data"]
        assert all(set(key["spent"]) == {"today", "month"} for key in by_key)
