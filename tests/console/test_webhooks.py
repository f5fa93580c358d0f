"""The page of webhooks in a real browser: what fails is seen, disabled, and sent again."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.async_api import Page, expect

from penstock.console.app import Console
from tests.gateway.conftest import Serving
from tests.gateway.webhooks.test_operator import registered
from tests.gateway.webhooks.test_webhooks import Receiver, impatient, receiver, settings

__all__ = ["impatient", "receiver"]


@pytest.mark.slow
async def test_an_endpoint_is_tested_disabled_and_deleted(
    serving: Serving, page: Page, tmp_path: Path, receiver: Receiver
) -> None:
    async with serving(wrap=Console, **settings(tmp_path)) as gateway:
        await page.goto(f"http://127.0.0.1:{gateway.port}/console/#webhooks")
        await expect(page.get_by_text("No tenant has registered a webhook endpoint")).to_be_visible()
        await registered(gateway, receiver.url)
        await expect(page.get_by_text(receiver.url)).to_be_visible()
        await page.get_by_role("button", name="Test Hook").click()
        await expect(page.get_by_text("Hook replied with status 200")).to_be_visible()
        receiver.statuses = [503] * 1_000_000
        await page.get_by_role("button", name="Test Hook").click()
        await expect(page.get_by_text("Hook replied with status 503")).to_be_visible()
        body = {"model": "tiny", "input": "hi", "background": True}
        await gateway.client.post(
            f"/v1/webhook_endpoints/{(await gateway.client.get('/v1/webhook_endpoints')).json()['data'][0]['id']}",
            json={"event_types": ["response.completed"]},
        )
        await gateway.client.post("/v1/responses", json=body)
        await expect(page.get_by_text("failing", exact=True)).to_be_visible()
        await expect(page.get_by_text("status 503", exact=True)).to_be_visible()
        await page.get_by_role("button", name="Events of Hook").click()
        await expect(page.get_by_text("What Hook was not told of")).to_be_visible()
        await expect(page.get_by_text("response.completed")).to_be_visible()
        await page.get_by_role("button", name="Close").click()
        await page.get_by_role("button", name="Disable Hook").click()
        await page.get_by_role("dialog").get_by_role("button", name="Disable", exact=True).click()
        await expect(page.get_by_text("disabled", exact=True)).to_be_visible()
        await expect(page.get_by_role("button", name="Resend to Hook")).to_have_count(0)
        await page.get_by_role("button", name="Enable Hook").click()
        await page.get_by_role("button", name="Resend to Hook").click()
        await expect(page.get_by_text("Sent again")).to_be_visible()
        receiver.statuses.clear()
        await expect(page.get_by_text("delivering", exact=True)).to_be_visible()
        await page.get_by_role("button", name="Delete Hook").click()
        await page.get_by_role("dialog").get_by_role("button", name="Delete", exact=True).click()
        await expect(page.get_by_text("No tenant has registered a webhook endpoint")).to_be_visible()
