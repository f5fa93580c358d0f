"""R-RT-10 in a real browser: the arms side by side, a canary promoted and rolled back; on a phone too."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from playwright.async_api import Page, expect

from penstock.config.experiments import ExperimentConfig
from penstock.text import TextModel
from tests.console.test_administration import settings
from tests.gateway.conftest import Serving
from tests.gateway.generation.test_experiments import PRICES, other

pytestmark = pytest.mark.slow

PHONE = {"width": 390, "height": 844}


async def shot(page: Page, name: str) -> None:
    if folder := os.environ.get("PENSTOCK_SCREENSHOTS"):
        await page.screenshot(path=str(Path(folder) / f"{name}.png"), full_page=True)


async def test_a_canary_is_promoted_and_rolled_back(
    serving: Serving, page: Page, text: TextModel, tmp_path: Path
) -> None:
    config = ExperimentConfig(
        name="assistant",
        control="tiny",
        canary={"v2": 0.3},
        shadow={"v3": 0.5},
        sticky="request",
        stages=(0.3, 0.6, 1.0),
    )
    models = [other(text), other(text, "v3", "From the shadow.")]
    more = {"more": models, "experiments": (config,), "prices": PRICES}
    async with serving(**settings(tmp_path, **more)) as gateway:
        for _ in range(60):
            reply = await gateway.chat(model="assistant")
            assert reply.status_code == 200
        vote = {"response_id": reply.json()["id"], "rating": "up"}
        assert (await gateway.client.post("/v1/feedback", json=vote)).status_code == 200
        await page.goto(f"http://127.0.0.1:{gateway.port}/console/#experiments")
        table = page.get_by_role("table", name="Arms of assistant")
        rows = table.get_by_role("row")
        await expect(rows.filter(has_text="control")).to_contain_text("70%")
        canary = rows.filter(has_text="v2")
        await expect(canary).to_contain_text("30%")
        await expect(rows.filter(has_text="shadow")).to_contain_text("v3")
        await expect(page.get_by_text("running")).to_be_visible()
        await shot(page, "experiments")

        await page.get_by_role("button", name="Promote v2").click()
        dialog = page.get_by_role("dialog")
        await expect(dialog).to_contain_text("60%")
        await dialog.get_by_label("Why (optional)").fill("does well")
        await shot(page, "experiments-promote")
        await dialog.get_by_role("button", name="Give it 60%").click()
        await expect(canary).to_contain_text("60%")
        shown = (await gateway.client.get("/v1/admin/experiments/assistant")).json()
        assert shown["events"][0]["what"] == "v2 gets 60%" and shown["events"][0]["why"] == "does well"

        await page.get_by_role("button", name="Roll back v2").click()
        await page.get_by_role("dialog").get_by_role("button", name="Roll back now").click()
        await expect(page.get_by_text("rolled back", exact=True)).to_be_visible()
        await expect(canary).to_contain_text("0%")
        await expect(page.get_by_role("button", name="Roll back v2")).to_be_disabled()
        assert (await gateway.chat(model="assistant")).headers["x-penstock-experiment"] == "assistant; arm=control"
        await page.get_by_text("Changes (3)").click()
        await expect(page.get_by_text("does well")).to_be_visible()
        await shot(page, "experiments-rolled-back")
        await page.set_viewport_size(PHONE)  # type: ignore[arg-type]
        await expect(page.get_by_role("heading", name="Experiments", exact=True)).to_be_visible()
        wider = await page.evaluate("document.documentElement.scrollWidth > window.innerWidth + 1")
        assert not wider, "nothing has to be scrolled sideways"
        await shot(page, "experiments-phone")


async def test_without_experiments_the_page_says_how_to_get_one(serving: Serving, page: Page, tmp_path: Path) -> None:
    async with serving(**settings(tmp_path)) as gateway:
        await page.goto(f"http://127.0.0.1:{gateway.port}/console/#experiments")
        await expect(page.get_by_text("No experiments are configured")).to_be_visible()
