from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, async_playwright, expect

from tests.gateway.conftest import serving, text

__all__ = ["serving", "text"]

expect.set_options(timeout=90_000)  # a loaded machine is slow

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--host-resolver-rules=MAP *.example 127.0.0.1",  # for pages of other hosts
]


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of one Chromium for all tests: it takes seconds to start."""
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine (Debian: apt install chromium)")
    profile = tmp_path_factory.mktemp("chromium")
    command = [CHROMIUM, "--headless", "--remote-debugging-port=0", f"--user-data-dir={profile}", *FLAGS]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        chosen, deadline = profile / "DevToolsActivePort", time.monotonic() + 180
        while not (chosen.exists() and len(lines := chosen.read_text().split()) == 2):
            assert process.poll() is None and time.monotonic() < deadline, "Chromium does not start"
            time.sleep(0.05)
        yield f"http://127.0.0.1:{lines[0]}"
    finally:
        process.terminate()
        process.wait(30)


@pytest_asyncio.fixture
async def browser(chromium: str) -> AsyncIterator[Browser]:
    """Every page that is opened in it has a profile of its own."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.connect_over_cdp(chromium)
        yield browser
        for context in browser.contexts[1:]:
            await context.close()
        await browser.close()


@pytest_asyncio.fixture
async def page(browser: Browser) -> AsyncIterator[Page]:
    """A tab; whatever goes wrong inside it fails the test."""
    page = await browser.new_page(viewport={"width": 1280, "height": 800})
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    expected = re.compile("status of 40|net::ERR_")  # what a server refuses, and one that is away on purpose
    page.on("console", lambda said: said.type == "error" and not expected.search(said.text) and wrong.append(said.text))
    page.set_default_timeout(90_000)
    yield page
    assert not wrong, wrong
