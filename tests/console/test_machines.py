"""The machines of a fleet in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.async_api import Page, expect

from penstock.fleet.status import fleet_state
from tests.console.test_administration import settings
from tests.fleet.test_admin_api import FLEET, supervisor
from tests.gateway.conftest import Serving, eventually


@pytest.mark.slow
async def test_machines_are_shown_and_drained(serving: Serving, page: Page, tmp_path: Path) -> None:
    async with supervisor(tmp_path) as (path, control, commands):
        control.tell_fleet(fleet_state("ours", FLEET))
        async with serving(control=path, **settings(tmp_path)) as gateway:
            await page.goto(f"http://127.0.0.1:{gateway.port}/console/#machines")
            await expect(page.get_by_role("heading", name="Machines", exact=True)).to_be_visible()
            await expect(page.locator("[data-test=controller]")).to_have_text("The controller is a.")
            machines = page.get_by_role("table", name="Machines", exact=True).get_by_role("row")
            await expect(machines).to_have_count(3)
            await expect(machines.nth(1)).to_contain_text("1 of 4")
            await expect(machines.nth(2)).to_contain_text("large: out of memory")
            await expect(page.get_by_role("table", name="Engines of the fleet").get_by_role("row")).to_have_count(3)
            await expect(page.get_by_role("table", name="Gateways of the fleet")).to_contain_text(
                "http://10.0.0.1:8000"
            )
            await page.screenshot(path=tmp_path / "machines.png", full_page=True)
            await page.get_by_role("button", name="Drain b").click()
            await page.get_by_role("dialog").get_by_role("button", name="Drain").click()
            await eventually(lambda: commands.left == [("b", None)])


@pytest.mark.slow
async def test_a_server_on_its_own_has_no_such_page(serving: Serving, page: Page, tmp_path: Path) -> None:
    async with serving(**settings(tmp_path)) as gateway:
        await page.goto(f"http://127.0.0.1:{gateway.port}/console/")
        await expect(page.get_by_text("Models", exact=True).first).to_be_visible()
        await expect(page.get_by_text("Machines", exact=True)).to_have_count(0)
