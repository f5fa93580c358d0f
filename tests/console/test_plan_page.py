"""The page Plan in a real browser: figures of the running server, and the what-if form."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from playwright.async_api import Page, expect

from penstock.console.app import Console
from penstock.gateway.workers.group import SingleWorker
from penstock.telemetry.load_history import FAMILIES
from penstock.text import TextModel
from tests.console.test_browser import store
from tests.gateway.conftest import Running, Serving, eventually
from tests.scripted import ScriptedEngine


def pass_minutes(gateway: Running, count: int) -> None:
    """The server's history sees `count` minutes pass."""
    workers = gateway.parts.workers
    assert isinstance(workers, SingleWorker)
    now = time.time()
    for minute in range(count):
        workers.history.record(now + 60 * (minute + 1), gateway.parts.metrics.registry.readings(FAMILIES))


@pytest.mark.slow
async def test_headroom_cost_and_charts_of_the_running_server(
    serving: Serving, page: Page, text: TextModel, tmp_path: Path
) -> None:
    engine = ScriptedEngine(text, "x" * 40, step_s=0.001)
    async with serving(engine, wrap=Console, served={"cost_per_hour": 3.6}, **store(tmp_path)) as gateway:
        await page.goto(f"http://127.0.0.1:{gateway.port}/console/#plan")
        await expect(page.locator("[data-test=headroom]")).to_contain_text("Unknown until requests")
        await expect(page.locator("[data-test=next]")).to_contain_text("$3.60 per hour")
        for _ in range(3):
            assert (await gateway.chat()).status_code == 200
        await eventually(lambda: gateway.parts.registry.route("tiny").model.backend.load.generation_tokens >= 123)
        pass_minutes(gateway, 3)
        headroom = page.locator("[data-test=headroom] .value")
        await expect(headroom).to_have_text(re.compile(r"^[\d,.]+ requests/s$"))
        await expect(page.locator("[data-test=cost] .value")).to_have_text(re.compile(r"^\$[\d.]+$"))
        shown = (await gateway.client.get("/v1/admin/plan")).json()["data"][0]
        assert shown["mix"]["output_tokens"] == 41
        await expect(page.get_by_role("row", name="A request")).to_contain_text("41 output tokens")
        await expect(page.get_by_role("row", name="Automatic scaling (off) would want")).to_contain_text("1 replica")
        await expect(page.locator(".chart svg")).to_have_count(2)
        await page.set_viewport_size({"width": 390, "height": 800})
        await page.wait_for_function("document.documentElement.scrollWidth <= 390")  # charts follow a moment later


@pytest.mark.slow
async def test_what_if_form_plans_as_the_command_does(serving: Serving, page: Page, tmp_path: Path) -> None:
    async with serving(wrap=Console, **store(tmp_path)) as gateway:
        await page.goto(f"http://127.0.0.1:{gateway.port}/console/#plan")
        await page.get_by_label("Model", exact=True).fill("llama-3-8b")
        await page.get_by_label("Hardware").click()
        await page.get_by_role("option", name=re.compile("H100")).click()
        for label, value in (("Users a day", "100000"), ("Prompt tokens", "2000"), ("Output tokens", "500")):
            await page.get_by_label(label).fill(value)
        await page.get_by_role("button", name="Calculate").click()
        best = page.locator("[data-test=best]")
        await expect(best).to_contain_text("The cheapest:")
        body = {
            "model": "llama-3-8b", "devices": ["h100"], "users": 100_000, "requests_per_user": 10,
            "input_tokens": 2000, "output_tokens": 500,
        }  # fmt: skip
        plan = (await gateway.client.post("/v1/admin/plan", json=body)).json()
        await expect(best).to_contain_text(plan["best"]["deployment"])
        await expect(best).to_contain_text(f"${round(plan['best']['monthly']):,} per month")
        await expect(page.get_by_role("row", name=plan["best"]["deployment"]).first).to_be_visible()

        await page.get_by_label("Model", exact=True).fill("lama-3-8b")
        await page.get_by_role("button", name="Calculate").click()
        await expect(page.get_by_role("alert")).to_contain_text("unknown model 'lama-3-8b'; the nearest are llama-3")
        assert await best.count() == 0
