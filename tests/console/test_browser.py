"""The console in a real browser, over a gateway on a real port."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from playwright.async_api import Page, expect

from penstock.console.app import Console
from penstock.text import TextModel
from tests.gateway.conftest import Serving
from tests.scripted import ScriptedEngine


def store(folder: Path) -> dict[str, str]:
    return {"store_url": f"sqlite:///{folder}/store.db"}


async def test_a_newcomer_chats_and_sees_what_it_took(serving: Serving, page: Page, tmp_path: Path) -> None:
    async with serving(wrap=Console, **store(tmp_path)) as gateway:
        await page.goto(f"http://127.0.0.1:{gateway.port}/")
        await page.get_by_role("button", name="What is the capital of France?").click()
        facts = page.locator("[data-test=facts]")
        await expect(facts).to_contain_text("TTFT")
        await expect(facts).to_contain_text("out")
        await expect(page.locator(".message.assistant .text")).not_to_have_text("…")
        await page.get_by_role("button", name="Code").click()
        await expect(page.locator("pre.code")).to_contain_text("/v1/chat/completions")
        await page.get_by_role("tab", name="Python").click()
        await expect(page.locator("pre.code")).to_contain_text("from openai import OpenAI")


@pytest.mark.slow
async def test_text_of_a_model_is_never_markup(serving: Serving, page: Page, text: TextModel, tmp_path: Path) -> None:
    hostile = "<img src=x onerror=\"document.title='taken'\"> **bold** [a](javascript:alert(1))"
    async with serving(wrap=Console, engine=ScriptedEngine(text, hostile), **store(tmp_path)) as gateway:
        await page.goto(f"http://127.0.0.1:{gateway.port}/console/")
        await page.get_by_label("Message").fill("hi")
        await page.keyboard.press("Enter")
        answer = page.locator(".message.assistant .text")
        await expect(answer.locator("strong")).to_have_text("bold")
        assert await answer.locator("img").count() == 0 and await answer.locator("a").count() == 0
        assert "taken" not in await page.title()


@pytest.mark.slow
async def test_the_live_view_draws_what_happens(serving: Serving, page: Page, tmp_path: Path) -> None:
    async with serving(wrap=Console, **store(tmp_path)) as gateway:
        await page.goto(f"http://127.0.0.1:{gateway.port}/console/#live")
        await expect(page.locator(".chart svg")).to_have_count(6)
        for _ in range(3):
            assert (await gateway.chat()).status_code == 200
        await expect(page.locator(".phases span").first).to_be_attached()
        await expect(page.get_by_role("cell", name="tiny/")).to_be_visible()
        await page.set_viewport_size({"width": 390, "height": 800})
        width = await page.evaluate("document.documentElement.scrollWidth")
        assert width <= 390, f"the page is {width} px wide on a phone"


async def test_a_key_is_made_and_used_and_nobody_else_gets_in(serving: Serving, page: Page, tmp_path: Path) -> None:
    async with serving(wrap=Console, **store(tmp_path)) as gateway:
        root = f"http://127.0.0.1:{gateway.port}"
        await page.goto(f"{root}/console/#keys")
        await page.get_by_label("New tenant").fill("acme")
        await page.get_by_role("button", name="Create tenant").click()
        await expect(page.get_by_role("cell", name="acme", exact=True)).to_be_visible()
        await page.get_by_label("Scopes").click()
        for scope in ("metrics", "admin"):
            await page.get_by_role("option", name=scope).click()
        await page.keyboard.press("Escape")
        await page.get_by_role("button", name="Create key").click()
        key = await page.locator("[data-test=new-key]").inner_text()
        async with httpx.AsyncClient(base_url=root) as client:
            body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 401
            used = await client.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"})
            assert used.status_code == 200

        await page.goto("about:blank")
        await page.goto(f"{root}/console/#usage")
        await expect(page.get_by_label("API key")).to_be_visible()
        assert "acme" not in await page.content(), "a visitor without a key sees nothing"
        await page.get_by_label("API key").fill("psk_wrong_key")
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("alert")).to_contain_text("not valid")
        await page.get_by_label("API key").fill(key)
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("heading", name="Usage and cost")).to_be_visible()
        await expect(page.get_by_role("cell", name="acme", exact=True)).to_be_visible()
        await expect(page.locator(".chart svg")).to_have_count(4)
