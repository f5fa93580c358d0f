"""The rest of administration in a real browser: batches, models, routes, feedback, caches, tools; on a phone too."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from playwright.async_api import Page, expect

from penstock.config.cache import CacheConfig
from penstock.config.context import ToolsConfig
from penstock.config.schema import RouteConfig
from penstock.text import TextModel
from tests.console.test_administration import go, settings, sign_in, two_tenants
from tests.e2e.conftest import MODEL, Server, server
from tests.gateway.conftest import Serving
from tests.scripted import ScriptedEngine
from tests.tools.execution.parts import LOOPBACK, WEATHER_API, weather

pytestmark = pytest.mark.slow
__all__ = ["server"]

PHONE = {"width": 390, "height": 844}
ROUTE = RouteConfig(name="auto", small="tiny", large="small")


def lines(count: int, **body: object) -> bytes:
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **body}
    line = {"method": "POST", "url": "/v1/chat/completions", "body": asked}
    return "\n".join(json.dumps({"custom_id": str(number), **line}) for number in range(count)).encode()


async def test_a_batch_from_a_file_to_its_output(serving: Serving, page: Page, text: TextModel, tmp_path: Path) -> None:
    engine = ScriptedEngine(text)
    async with serving(engine, **settings(tmp_path)) as gateway:
        await page.goto(f"http://127.0.0.1:{gateway.port}/console/#batches")
        await expect(page.get_by_text("No batches yet")).to_be_visible()
        await page.get_by_label("File of requests").set_input_files(
            {"name": "bad.jsonl", "mimeType": "text/plain", "buffer": b"{not json"}
        )
        await expect(page.get_by_role("alert")).to_contain_text("is not JSON")
        content = lines(3) + b"\n" + lines(1, temperature=99).replace(b'"0"', b'"bad"')
        await page.get_by_label("File of requests").set_input_files(
            {"name": "night.jsonl", "mimeType": "text/plain", "buffer": content}
        )
        await expect(page.get_by_text("4 requests")).to_be_visible()
        await page.get_by_role("button", name="Create batch").click()
        row = page.get_by_role("table", name="Batches").get_by_role("row").nth(1)
        await expect(row).to_contain_text("completed", timeout=90_000)
        await expect(row).to_contain_text("3 of 4 done, 1 failed")
        async with page.expect_download() as fetched:
            await row.get_by_role("button", name="Output").click()
        await (await fetched.value).save_as(tmp_path / "output")
        output = (tmp_path / "output").read_text().splitlines()
        assert {json.loads(line)["custom_id"] for line in output} == {"0", "1", "2"}
        async with page.expect_download() as fetched:
            await row.get_by_role("button", name="Errors").click()
        await (await fetched.value).save_as(tmp_path / "errors")
        assert "temperature" in (tmp_path / "errors").read_text()

        engine.hold = True
        await page.get_by_label("File of requests").set_input_files(
            {"name": "long.jsonl", "mimeType": "text/plain", "buffer": lines(2)}
        )
        await page.get_by_role("button", name="Create batch").click()
        await row.get_by_role("button", name="Cancel").click()
        await page.get_by_role("dialog").get_by_role("button", name="Cancel the batch").click()
        await expect(row).to_contain_text(re.compile("cancell"))
        engine.hold = False
        await expect(row).to_contain_text("cancelled", timeout=90_000)


async def test_routes_votes_caches_and_tools(serving: Serving, page: Page, tmp_path: Path) -> None:
    more = {"routes": (ROUTE,), "cache": CacheConfig(exact="on"), "tools": ToolsConfig(networks=LOOPBACK)}
    with weather() as api:
        async with serving(**settings(tmp_path, **more)) as gateway:
            client = gateway.client
            await page.goto(f"http://127.0.0.1:{gateway.port}/console/#routes")
            route = page.locator("[data-test='route auto']")
            await route.get_by_role("switch", name="Route auto").click()
            await expect(route).to_contain_text("off")
            assert (await client.get("/v1/admin/routes")).json()["data"][0]["enabled"] is False

            answer = (await gateway.chat(temperature=0)).json()["id"]
            vote = {"response_id": answer, "rating": "down", "comment": "not what I asked"}
            assert (await client.post("/v1/feedback", json=vote)).status_code == 200
            await go(page, "feedback", "Feedback")
            await expect(page.get_by_role("table", name="Votes")).to_contain_text("not what I asked")
            await expect(page.get_by_role("table", name="Totals")).to_contain_text("0%")

            await go(page, "caches", "Response cache")
            await expect(page.locator("[data-test=answers]")).to_have_text("1")
            await page.get_by_role("button", name="Forget answers").click()
            await page.get_by_role("dialog").get_by_role("button", name="Forget").click()
            await expect(page.locator("[data-test=answers]")).to_have_text("0")

            await go(page, "tools", "Tool servers")
            await page.get_by_label("Name").fill("weather")
            await page.get_by_label("Kind").click()
            await page.get_by_role("option", name="HTTP API").click()
            await page.get_by_label("Base URL").fill(api.url)
            await page.get_by_label("OpenAPI document").fill("{")
            await page.get_by_role("button", name="Register").click()
            await expect(page.get_by_role("alert").first).to_contain_text("JSON")
            await page.get_by_label("OpenAPI document").fill(json.dumps(WEATHER_API))
            await page.get_by_label("Headers").fill("Authorization Bearer 1")
            await page.get_by_role("button", name="Register").click()
            await expect(page.get_by_role("alert").first).to_contain_text('A header is "Name: value"')
            await page.get_by_label("Headers").fill("Authorization: Bearer 1\n")
            await page.get_by_role("button", name="Register").click()
            row = page.get_by_role("table", name="Tool servers").get_by_role("row").filter(has_text="weather")
            await expect(row).to_contain_text("get_weather")
            await row.get_by_role("button", name="Remove").click()
            await page.get_by_role("dialog").get_by_role("button", name="Remove").click()
            await expect(page.get_by_text("No tool servers.")).to_be_visible()


async def test_a_model_is_loaded_put_to_sleep_woken_and_unloaded(
    server: Server, page: Page, default_model: Path
) -> None:
    await page.goto(f"{server.url}/console/#models")
    first = page.locator(f"[data-test='model {MODEL}']")
    await expect(first).to_contain_text(re.compile(r"[\d.]+ [MG]iB weights, [\d.]+ [MG]iB KV cache"))
    await page.get_by_role("button", name="Load a model").click()
    await page.get_by_label("Source").fill("/nowhere")
    await page.get_by_role("button", name="Load", exact=True).click()
    await expect(page.get_by_role("alert")).to_contain_text("neither an alias nor a path")
    await page.get_by_role("button", name="Dismiss").click()
    await page.get_by_label("Source").fill(str(default_model))
    await page.get_by_label("Name (optional)").fill("second")
    await page.get_by_label("Options").fill('{"max_model_len": 256, "kv_memory": "16MiB"}')
    await page.get_by_role("button", name="Load", exact=True).click()
    await expect(page.locator("[data-test=loading]")).to_contain_text("second")
    second = page.locator("[data-test='model second']")
    await expect(second).to_contain_text("awake", timeout=120_000)
    await expect(second).to_contain_text(re.compile(r"16(\.\d)? MiB KV cache"))
    await second.get_by_role("button", name="Sleep").click()
    await expect(second).to_contain_text("sleeping", timeout=120_000)
    await second.get_by_role("button", name="Wake").click()
    await expect(second.get_by_role("button", name="Sleep")).to_be_visible(timeout=120_000)
    await second.get_by_role("button", name="Unload").click()
    await page.get_by_role("dialog").get_by_role("button", name="Unload").click()
    await expect(second).to_have_count(0, timeout=120_000)


@pytest.mark.parametrize("colours", ["light", "dark"])
async def test_every_page_fits_a_phone(serving: Serving, page: Page, colours: str, tmp_path: Path) -> None:
    async with serving(**settings(tmp_path, routes=(ROUTE,))) as gateway:
        keys = await two_tenants(gateway)
        scopes = {"tenant": "acme", "scopes": ["admin", "inference", "metrics"]}
        headers = {"x-api-key": keys["admin"]}
        everything = (await gateway.client.post("/v1/admin/keys", json=scopes, headers=headers)).json()["key"]
        await page.emulate_media(color_scheme="dark" if colours == "dark" else "light")
        await page.set_viewport_size(PHONE)
        await sign_in(page, gateway.port, everything, "requests")
        pages = {
            "collections": "Collections", "batches": "Batches", "requests": "Requests", "usage": "Usage and cost",
            "account": "Limits and keys", "live": "Live", "plan": "Plan", "models": "Models", "adapters": "Adapters",
            "routes": "Routes", "experiments": "Experiments", "feedback": "Feedback", "caches": "Response cache",
            "tools": "Tool servers", "keys": "Tenants and keys", f"requests/{keys['acme request']}": "Request",
        }  # fmt: skip
        for name, heading in pages.items():
            await go(page, name, heading)
            await expect(page.locator(".waiting")).to_have_count(0)
            width = await page.evaluate("document.documentElement.scrollWidth")
            assert width <= PHONE["width"], f"{name} is {width} px wide"
