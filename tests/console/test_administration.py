"""Administration in a real browser: the buttons are pressed, and the server has what they should have changed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page, expect

from penstock.config.schema import DEFAULT_TIERS, RequestLogConfig
from penstock.console.app import Console
from penstock.gateway.process.settings import ModelSettings
from tests.gateway.conftest import Running, Serving
from tests.gateway.rag.test_collections import encoders

PRICED = (ModelSettings("tiny", "", input_price=1000.0, output_price=2000.0),)
HANDBOOK = "# Handbook\n\n## Leave\n\nParents receive twelve weeks of paid leave after the birth of a child.\n"
PHONE = 390


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    store = {"store_url": f"sqlite:///{folder}/store.db", "request_log": RequestLogConfig(flush_s=0.01)}
    return {
        **store,
        "wrap": Console,
        "default_tier": "standard",
        "tiers": DEFAULT_TIERS,
        "models": PRICED,
        "key_fresh_s": 0.05,
        **more,
    }


async def go(page: Page, name: str, heading: str) -> None:
    await page.evaluate(f"location.hash = '#{name}'")
    await expect(page.get_by_role("heading", name=heading, exact=True)).to_be_visible()


async def sign_in(page: Page, port: int, key: str, name: str) -> None:
    await page.goto("about:blank")
    await page.goto(f"http://127.0.0.1:{port}/console/#{name}")
    await page.get_by_label("API key").fill(key)
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("button", name="Sign out")).to_be_visible()


async def two_tenants(gateway: Running) -> dict[str, str]:
    """Keys of an administrator and of two tenants, each of which has sent a request."""
    client, keys, headers = gateway.client, dict[str, str](), dict[str, str]()
    for tenant in ("acme", "globex"):
        await client.post("/v1/admin/tenants", json={"id": tenant}, headers=headers)
        if not keys:
            made = await client.post("/v1/admin/keys", json={"tenant": "acme", "scopes": ["admin"], "name": "ops"})
            keys["admin"] = made.json()["key"]
            headers = {"x-api-key": keys["admin"]}
        body = {"tenant": tenant, "name": f"{tenant} app", "limits": {"daily_budget": 5, "requests_per_minute": 60}}
        keys[tenant] = (await client.post("/v1/admin/keys", json=body, headers=headers)).json()["key"]
        sent = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "user": f"user-of-{tenant}"}
        reply = await client.post("/v1/chat/completions", json=sent, headers={"x-api-key": keys[tenant]})
        assert reply.status_code == 200, reply.text
        keys[f"{tenant} request"] = reply.headers["x-request-id"]
    return keys


@pytest.mark.slow
async def test_an_administrator_at_work(serving: Serving, page: Page, encoder_endpoint: str, tmp_path: Path) -> None:
    async with serving(encoders=encoders(encoder_endpoint), **settings(tmp_path)) as gateway:
        client = gateway.client
        await page.goto(f"http://127.0.0.1:{gateway.port}/console/#collections")

        # A collection: a file in, a search with the button, the chunk with its score and source.
        await page.get_by_label("New collection").fill("handbook")
        await page.get_by_role("button", name="Create").click()
        await page.get_by_label("Files").set_input_files(
            {"name": "handbook.md", "mimeType": "text/markdown", "buffer": HANDBOOK.encode()}
        )
        await expect(page.locator("[data-test=ready]")).to_have_text("1", timeout=90_000)
        await page.get_by_label("Search this collection").fill("How long is parental leave?")
        await page.get_by_role("button", name="Search").click()
        hit = page.locator("[data-test=hit]").first
        await expect(hit).to_contain_text("twelve weeks of paid leave")
        await expect(hit).to_contain_text(re.compile(r"handbook\.md.*score 0?\.?\d", re.S))

        # A request: from the list to its timeline, tokens, money and replica.
        sent = await gateway.chat(user="ann")
        await go(page, "requests", "Requests")
        await page.get_by_role("row").filter(has_text="ann").click()
        await expect(page.locator("[data-test=timeline]")).to_contain_text("prefill")
        await expect(page.locator("[data-test=timeline]")).to_contain_text("decode")
        await expect(page.locator("[data-test=cost]")).to_contain_text("$")
        await expect(page.locator("[data-test=replica]")).to_have_text("0")
        await expect(page.locator("[data-test=end]")).to_have_text("stop")
        await expect(page.locator(".id code").first).to_have_text(sent.headers["x-request-id"])
        assert page.url.endswith(f"#requests/{sent.headers['x-request-id']}"), "it can be sent to a colleague"

        # A tenant, a key that is shown once, a budget with its bar, and the end of the key.
        await client.post("/v1/admin/tenants", json={"id": "acme"})
        await go(page, "keys", "Tenants and keys")
        row = page.get_by_role("table", name="Tenants").get_by_role("row").filter(has_text="acme")
        await row.get_by_role("button", name="Limits").click()
        await page.get_by_role("dialog").get_by_label("Budget a month").fill("12.5")
        await page.get_by_role("dialog").get_by_role("button", name="Save").click()
        await expect(row.get_by_role("meter", name="Budget a month")).to_contain_text("$0 of $12.50")
        assert (await client.get("/v1/admin/tenants/acme")).json()["limits"] == {"monthly_budget": 12.5}
        await page.get_by_label("Scopes").click()
        await page.get_by_role("option", name="admin").click()
        await page.keyboard.press("Escape")
        await page.get_by_role("button", name="Create key").click()
        key = await page.locator("[data-test=new-key]").inner_text()
        client.headers["x-api-key"] = key
        victim = (await client.post("/v1/admin/keys", json={"tenant": "acme", "name": "of a contractor"})).json()["id"]
        await page.get_by_role("button", name="I have stored it").click()
        await page.get_by_label("API key").fill(key)
        await page.keyboard.press("Enter")
        row = page.get_by_role("table", name="Keys").get_by_role("row").filter(has_text="of a contractor")
        await row.get_by_role("button", name="Revoke").click()
        await page.get_by_role("dialog").get_by_role("button", name="Revoke").click()
        await expect(row).to_have_count(0)
        listed = {one["id"]: one for one in (await client.get("/v1/admin/keys")).json()["data"]}
        assert listed[victim]["revoked_at"] is not None


@pytest.mark.slow
async def test_lists_longer_than_a_page(serving: Serving, page: Page, encoder_endpoint: str, tmp_path: Path) -> None:
    async with serving(encoders=encoders(encoder_endpoint), **settings(tmp_path)) as gateway:
        client = gateway.client
        for number in range(101):
            made = await client.post("/v1/collections", json={"name": f"c{number:03}"})
            assert made.status_code == 200, made.text
            sent = await client.post(
                f"/v1/collections/c000/documents?name=d{number:03}.txt",
                content=f"The room {number} is on floor {number // 10}.",
                headers={"content-type": "text/plain"},
            )
            assert sent.status_code < 300, sent.text
        await page.goto(f"http://127.0.0.1:{gateway.port}/console/#collections")
        await expect(page.get_by_role("tab")).to_have_count(101)
        await page.get_by_role("tab", name="c000").click()
        rows = page.get_by_role("table", name="Documents").get_by_role("row")
        await expect(rows).to_have_count(101)  # one of them is the head
        await page.get_by_role("button", name="More documents").click()
        await expect(rows).to_have_count(102)
        await expect(page.get_by_role("button", name="More documents")).to_have_count(0)


@pytest.mark.slow
async def test_access_of_tenants_and_keys(serving: Serving, page: Page, tmp_path: Path) -> None:
    async with serving(**settings(tmp_path)) as gateway:
        keys = await two_tenants(gateway)
        gateway.client.headers["x-api-key"] = keys["admin"]
        await sign_in(page, gateway.port, keys["admin"], "keys")
        row = page.get_by_role("table", name="Tenants").get_by_role("row").filter(has_text="globex")
        await row.get_by_role("button", name="Access").click()
        dialog = page.get_by_role("dialog")
        await dialog.get_by_label("Only some models").click()
        await dialog.get_by_label("Models", exact=True).fill("other, gl*")
        await dialog.get_by_label("Only some tools").click()
        await dialog.get_by_role("button", name="Save").click()
        await expect(row).to_contain_text("models: other, gl*; tools: nothing")
        allowed = (await gateway.client.get("/v1/admin/tenants/globex")).json()["allow"]
        assert allowed == {"models": ["other", "gl*"], "tools": []}
        mine = {"x-api-key": keys["globex"]}
        assert (await gateway.client.get("/v1/models", headers=mine)).json()["data"] == []
        theirs = await gateway.client.get("/v1/models", headers={"x-api-key": keys["acme"]})
        assert "tiny" in theirs.text
        row = page.get_by_role("table", name="Keys").get_by_role("row").filter(has_text="acme app")
        await row.get_by_role("button", name="Access").click()
        await dialog.get_by_label("Only some models").click()
        await dialog.get_by_role("button", name="Save").click()
        await expect(row).to_contain_text("models: nothing")
        await row.get_by_role("button", name="Access").click()
        await dialog.get_by_label("Only some models").click()
        await dialog.get_by_role("button", name="Save").click()
        await expect(row).not_to_contain_text("models: nothing")


@pytest.mark.slow
async def test_a_tenant_sees_its_own_and_nothing_of_another(serving: Serving, page: Page, tmp_path: Path) -> None:
    async with serving(**settings(tmp_path)) as gateway:
        keys = await two_tenants(gateway)
        await sign_in(page, gateway.port, keys["acme"], "requests")
        menu = page.get_by_role("navigation", name="Pages")
        await expect(menu).to_contain_text("Limits and keys")
        for hidden in ("Live", "Plan", "Adapters", "Routes", "Feedback", "Tools", "Tenants and keys"):
            await expect(menu.get_by_text(hidden, exact=True)).to_have_count(0)
        seen = ""
        await expect(page.get_by_role("table", name="Requests").get_by_role("row")).to_have_count(2)
        seen += await page.content()
        await page.get_by_role("row").nth(1).click()
        await expect(page.locator("[data-test=cost]")).to_contain_text("$")
        seen += await page.content()
        await go(page, "account", "Limits and keys")
        await expect(page.get_by_role("meter", name="Budget a day")).to_contain_text("of $5.00")
        await expect(page.get_by_role("table", name="Keys")).to_contain_text("acme app")
        seen += await page.content()
        await go(page, "usage", "Usage and cost")
        await expect(page.get_by_role("table", name="Usage").get_by_role("row")).to_have_count(2)
        seen += await page.content()
        assert "globex" not in seen and keys["globex"].rpartition("_")[0] not in seen
        await page.evaluate(f"location.hash = '#requests/{keys['globex request']}'")
        await expect(page.get_by_text("There is no request with this id")).to_be_visible()
        await page.evaluate("location.hash = '#keys'")
        await expect(menu.locator("[aria-current=page]")).to_have_text(re.compile("Playground"))

        # A server that is away: one clear state, no toasts, and the page goes on by itself.
        await go(page, "account", "Limits and keys")
        await page.context.set_offline(True)
        await page.evaluate("location.hash = '#batches'")
        away = page.get_by_role("alert").filter(has_text="The server has not answered since")
        await expect(away).to_be_visible(timeout=90_000)
        await expect(page.get_by_text("Waiting for the server")).to_be_visible()
        await expect(page.locator(".q-notification")).to_have_count(0)
        await page.context.set_offline(False)
        await expect(away).to_have_count(0, timeout=90_000)
        await expect(page.get_by_text("No batches yet")).to_be_visible()
