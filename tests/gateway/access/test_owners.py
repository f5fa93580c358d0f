"""Owners of adapters: in the configuration, and of whoever loads one at run time, through a real engine (R-GW-9)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.config.schema import DEFAULT_TIERS
from penstock.engine.adapters.spec import AdapterSpec
from penstock.engine.config import EngineConfig
from penstock.engine.core import Engine
from penstock.sources.adapters import resolve_adapter
from penstock.testing.in_process_backend import InProcessBackend
from tests.engine.adapters.files import write_adapter
from tests.engine.tiny import write_checkpoint
from tests.gateway.conftest import Running, Serving


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama-gqa", tmp_path_factory.mktemp("base"))


async def test_an_adapter_is_for_its_owner(serving: Serving, base: Path, tmp_path: Path) -> None:
    folder = str(write_adapter(tmp_path / "one", base, seed=1, size=0.6))
    specs = (AdapterSpec("of-acme", folder, owner="acme"), AdapterSpec("of-all", folder))
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_blocks": 64, "threads": 1}
    config = EngineConfig(model=str(base), adapters=specs, adapter_slots=4, **settings)
    engine = Engine.load(config, find_adapter=resolve_adapter)
    served = {"adapters": ("of-acme", "of-all"), "adapter_owners": {"of-acme": "acme"}}
    store = {"store_url": f"sqlite:///{tmp_path / 'state.db'}", "tiers": DEFAULT_TIERS, "key_fresh_s": 0.05}
    async with serving(backend=InProcessBackend(engine), served=served, **store) as running:
        keys = await people(running)

        async def models(who: str) -> list[str]:
            listed = await running.client.get("/v1/models", headers=keys[who])
            return [one["id"] for one in listed.json()["data"]]

        async def load(who: str, **body: Any) -> httpx.Response:
            sent = {"source": folder, **body}
            return await running.client.post("/v1/admin/adapters", json=sent, headers=keys[who])

        assert await models("acme") == ["tiny", "of-acme", "of-all"]
        assert await models("rival") == ["tiny", "of-all"]

        loaded = await load("operator of acme", name="later")
        assert loaded.status_code == 200 and loaded.json()["owner"] == "acme"
        assert "later" in await models("acme") and "later" not in await models("rival")
        again = await load("operator of rival", name="later")
        assert again.json()["owner"] == "acme", "a reload does not take it away"
        body = {"model": "later", "prompt": [1, 2, 3], "max_tokens": 2, "temperature": 0, "ignore_eos": True}
        used = await running.client.post("/v1/completions", json=body, headers=keys["acme"])
        assert used.status_code == 200, used.text
        assert (await running.client.post("/v1/completions", json=body, headers=keys["rival"])).status_code == 404

        assert (await load("operator of acme", name="later", owner="rival")).json()["owner"] == "rival"
        assert "later" in await models("rival") and "later" not in await models("acme")
        assert (await load("operator of acme", name="free", owner="")).json()["owner"] is None
        assert "free" in await models("rival")
        refused = await load("operator of rival", name="of-acme", owner="rival")
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "owner"
        shown = (await running.client.get("/v1/admin/adapters", headers=keys["operator of rival"])).json()["data"]
        assert {one["id"]: one["owner"] for one in shown} == {
            "of-acme": "acme", "of-all": None, "later": "rival", "free": None
        }  # fmt: skip


async def people(running: Running) -> dict[str, dict[str, str]]:
    keys: dict[str, dict[str, str]] = {}
    headers: dict[str, str] = {}
    for tenant in ("acme", "rival"):
        await running.client.post("/v1/admin/tenants", json={"id": tenant}, headers=headers)
        for name, scopes in ((f"operator of {tenant}", ["admin"]), (tenant, ["inference"])):
            body = {"tenant": tenant, "scopes": scopes}
            made = await running.client.post("/v1/admin/keys", json=body, headers=headers)
            keys[name] = {"authorization": f"Bearer {made.json()['key']}"}
            headers = headers or keys[name]
    return keys
