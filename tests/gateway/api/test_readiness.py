"""Whatever makes every request a 503 makes `/health/ready` one too, and says why."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.config.guardrails import GuardrailConfig
from penstock.config.schema import CountersConfig, LimitConfig
from penstock.errors import ConfigError
from penstock.identity.exposure import check_exposure
from penstock.storage.sqlite_health import DAMAGED, GONE
from penstock.testing.in_process_backend import InProcessBackend
from penstock.text import TextModel
from tests.gateway.api.test_identity import make_key
from tests.gateway.conftest import Running, Serving, until
from tests.ports import free_port
from tests.scripted import ScriptedEngine


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.storage.watch.CHECK_S", 0.05)
    monkeypatch.setattr("penstock.gateway.accounting.charges.RETRY_S", 0.05)


async def problem(gateway: Running, name: str) -> str | None:
    """What `/health/ready` says about one check, and that its status fits."""
    reply = await gateway.client.get("/health/ready")
    checks = reply.json()["checks"]
    assert (reply.status_code == 503) == any(checks.values()) == (reply.json()["status"] == "unavailable")
    found: str | None = checks[name]
    return found


async def lost_store_records(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if "cannot be used" in record.getMessage()]


@pytest.fixture
async def store(serving: Serving, tmp_path: Path) -> AsyncIterator[tuple[Running, Path]]:
    path = tmp_path / "store.db"
    async with serving(store_url=f"sqlite:///{path}") as gateway:
        assert await problem(gateway, "store") is None
        yield gateway, path


async def test_a_deleted_store_stops_paid_work_and_never_opens_the_server(
    store: tuple[Running, Path], serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    gateway, path = store
    await gateway.client.post("/v1/admin/tenants", json={"id": "acme"})
    key = await make_key(gateway, scopes=["admin", "inference"])
    gateway.client.headers["authorization"] = f"Bearer {key}"
    assert (await gateway.chat()).status_code == 200

    for file in sorted(path.parent.glob("store.db*")):  # its log last, so that whoever looks meanwhile misses the store
        file.unlink()
    refused = await gateway.chat()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "ledger_unavailable")
    assert (await gateway.client.post("/v1/embeddings", json={"model": "tiny", "input": "x"})).status_code >= 400
    assert await until(lambda: problem(gateway, "store"), bool) == GONE
    (logged,) = await until(partial(lost_store_records, caplog), bool)  # the watch logs it, at its next look
    assert GONE in vars(logged)["why"] and str(path) in vars(logged)["why"]
    made = await gateway.client.post("/v1/admin/keys", json={"tenant": "acme"})
    assert made.status_code == 503, "it would vanish"
    async with httpx.AsyncClient(base_url=gateway.client.base_url) as stranger:
        assert (await stranger.get("/v1/admin/keys")).status_code == 401

    with pytest.raises(ConfigError, match="had some") as error:
        await check_exposure("127.0.0.1", f"sqlite:///{path}")
    (marker,) = path.parent.glob(".*")
    assert str(marker) in str(error.value), "it says how to start afresh"
    async with serving(store_url=f"sqlite:///{path}") as restarted:  # a gateway that was started without that check
        assert (await restarted.client.get("/v1/admin/keys")).status_code == 503
    marker.unlink()
    await check_exposure("127.0.0.1", f"sqlite:///{path}")


async def test_keys_of_an_older_version_are_noted_too(store: tuple[Running, Path]) -> None:
    gateway, path = store
    await gateway.client.post("/v1/admin/tenants", json={"id": "acme"})
    await make_key(gateway)
    (marker,) = path.parent.glob(".*")
    marker.unlink()
    await check_exposure("127.0.0.1", f"sqlite:///{path}")
    assert marker.exists()


async def test_a_damaged_store_stops_paid_work(store: tuple[Running, Path]) -> None:
    gateway, path = store
    assert gateway.parts.database is not None
    await gateway.parts.database.fetch("PRAGMA wal_checkpoint(TRUNCATE)")
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(path.stat().st_size - 4096))
    assert await until(lambda: problem(gateway, "store"), bool) == DAMAGED
    assert (await gateway.chat()).status_code == 503


async def test_a_store_that_is_put_back_is_used_again(store: tuple[Running, Path]) -> None:
    gateway, path = store
    shutil.move(path, path.with_name("elsewhere"))
    assert await until(lambda: problem(gateway, "store"), bool) == GONE
    shutil.move(path.with_name("elsewhere"), path)
    await until(lambda: problem(gateway, "store"), lambda found: found is None)
    assert (await gateway.chat()).status_code == 200


async def test_a_full_ledger(serving: Serving, tmp_path: Path) -> None:
    async with serving(store_url=f"sqlite:///{tmp_path}/store.db", ledger_wait_s=0.1) as gateway:
        database = gateway.parts.database
        assert database is not None
        ((pages,),) = await database.fetch("PRAGMA page_count")
        await database.fetch(f"PRAGMA max_page_count = {pages}")  # a disk without space
        await until(lambda: gateway.chat(user="u" * 256), lambda reply: reply.status_code == 503)
        assert await problem(gateway, "ledger") == "the ledger cannot be written"
        await database.fetch("PRAGMA max_page_count = 1000000")
        await until(lambda: problem(gateway, "ledger"), lambda found: found is None)
        assert (await gateway.chat()).status_code == 200


async def test_limits_that_cannot_be_counted(serving: Serving, tmp_path: Path) -> None:
    options: dict[str, Any] = {"limits": (LimitConfig(per="model", requests_per_minute=5),)}
    options["counters"] = CountersConfig(f"redis://127.0.0.1:{free_port()}", "closed")
    async with serving(**options) as gateway:
        assert (await gateway.chat()).status_code == 503
        assert "Redis" in str(await problem(gateway, "limits"))
    options["counters"] = CountersConfig(options["counters"].url, "open")
    async with serving(**options) as gateway:
        assert (await gateway.chat()).status_code == 200
        assert await problem(gateway, "limits") is None


async def test_a_guardrail_whose_model_does_not_answer(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = GuardrailConfig(name="harm", kind="model", url=f"http://127.0.0.1:{free_port()}/")
    async with serving(guardrails=(rule,)) as gateway:
        assert await problem(gateway, "guardrails") is None
        assert (await gateway.chat()).status_code == 503
        assert "harm" in str(await problem(gateway, "guardrails"))
        monkeypatch.setattr("penstock.gateway.moderation.rule.FAILED_S", 0.0)
        assert await problem(gateway, "guardrails") is None, "only a request can tell whether it works again"
    for lenient in ({"on_error": "allow"}, {"tenants": ("other",)}):
        rule = GuardrailConfig(name="harm", kind="model", url=rule.url, **lenient)  # type: ignore[arg-type]
        async with serving(guardrails=(rule,)) as gateway:
            assert (await gateway.chat()).status_code == 200
            assert await problem(gateway, "guardrails") is None


async def test_every_model_asleep(serving: Serving, text: TextModel) -> None:
    backend = InProcessBackend(ScriptedEngine(text))
    async with serving(backend=backend) as gateway:
        backend._state = "sleeping"
        assert (await gateway.chat()).status_code == 503
        assert "sleep" in str(await problem(gateway, "models"))
        backend._state = "awake"
        assert await problem(gateway, "models") is None
