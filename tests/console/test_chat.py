"""The playground in a real browser: a chat from question to answer, and everything that can go wrong on the way."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Locator, Page, expect

from penstock.backends.native import NativeBackend
from penstock.console.app import Console
from penstock.engine.request import Request
from penstock.gateway.process.settings import ModelSettings
from penstock.routing.replicas import ReplicaSet
from penstock.text import TextModel
from tests.backends.test_native import RunningEngine
from tests.gateway.accounting.test_quotas import sign_in
from tests.gateway.conftest import Running, Serving
from tests.gateway.rag.test_collections import encoders, say
from tests.scripted import ScriptedEngine, make_text

PRICED = (ModelSettings("tiny", "", input_price=1.0, output_price=2.0),)
LONG = "word " * 600
ANSWERS = {
    "think": "<think>Let me *see*.</think>It is **4**.",
    "code": "Here:\n\n```python\nprint('hi')\n```\n",
    "long": LONG,
    "second": "The second answer.",
}


@pytest.fixture(scope="session")
def wide_text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return make_text(tmp_path_factory.mktemp("wide"), context_length=16_384)


@asynccontextmanager
async def chat(serving: Serving, text: TextModel, page: Page, folder: Path, **settings: Any) -> AsyncIterator[Running]:
    """A gateway whose model answers by what is asked, with its console open in the page."""

    def script(request: Request) -> list[int]:
        asked = text.decode(request.prompt, skip_special=False).rpartition("<|user|>")[2]
        answer = next((answer for word, answer in ANSWERS.items() if word in asked), "Hello, world!")
        return [*text.encode(answer), text.eos_token_ids[0]]

    options = {"store_url": f"sqlite:///{folder}/store.db", "models": PRICED, **settings}
    engine = ScriptedEngine(text, script, max_model_len=16_384)
    async with serving(engine, text=text, wrap=Console, **options) as gateway:
        await page.goto(f"http://127.0.0.1:{gateway.port}/console/")
        await expect(composer(page)).to_be_visible()
        yield gateway


def composer(page: Page) -> Locator:
    return page.get_by_role("textbox", name="Message", exact=True)


def answers(page: Page) -> Locator:
    return page.locator(".message.assistant")


async def ask(page: Page, text: str) -> Locator:
    """Sends a message with Enter and waits for the whole answer."""
    before = await answers(page).count()
    await composer(page).fill(text)
    await page.keyboard.press("Enter")
    answer = answers(page).nth(before)
    await expect(answer.get_by_role("button", name="Regenerate")).to_be_enabled()
    return answer


async def inside(page: Page, part: Locator) -> None:
    """The whole element is in the window."""
    box, window = await part.bounding_box(), page.viewport_size
    assert box is not None and window is not None
    assert box["x"] >= 0 and box["x"] + box["width"] <= window["width"], box
    assert box["y"] >= 0 and box["y"] + box["height"] <= window["height"], box


async def test_ask_regenerate_edit_and_stop(serving: Serving, page: Page, wide_text: TextModel, tmp_path: Path) -> None:
    async with chat(serving, wide_text, page, tmp_path) as gateway:
        first = await ask(page, "Hi")
        await expect(first.locator(".rich")).to_have_text("Hello, world!")
        sent = gateway.engine.seen[-1].params

        # Only what was set is sent.
        assert sent.max_tokens > 1000, "no limit of the console's own"

        # Cost: what the ledger says, with cached tokens at their price.
        shown = await first.locator("[data-test=cost]").inner_text()
        (row,) = (await gateway.client.get("/v1/usage?by=model")).json()["data"]
        assert row["cached_tokens"] == 3 and float(row["cost"]) == pytest.approx(float(shown[1:]), rel=0.05)

        await first.get_by_role("button", name="Regenerate").click()
        await expect(first.get_by_text("2 / 2")).to_be_visible()
        await first.get_by_role("button", name="Previous version").click()
        await expect(first.get_by_text("1 / 2")).to_be_visible()

        # Up edits the last message; both versions stay.
        await composer(page).focus()
        await page.keyboard.press("ArrowUp")
        edited = page.get_by_label("Edited text")
        await expect(edited).to_be_focused()
        await edited.fill("the second question")
        await page.keyboard.press("Enter")
        await expect(answers(page).locator(".rich")).to_have_text("The second answer.")
        await expect(page.locator(".message.user").get_by_text("2 / 2")).to_be_visible()

        # Shift+Enter is a new line; Esc stops, and the part has tokens.
        gateway.engine.step_s = 0.002
        await composer(page).fill("long")
        await page.keyboard.press("Shift+Enter")
        await page.keyboard.type("story")
        assert await composer(page).input_value() == "long\nstory"
        await page.keyboard.press("Enter")
        part = answers(page).nth(1)
        await expect(part.locator(".rich")).to_contain_text("word word")
        await page.keyboard.press("Escape")
        await expect(part.locator(".end")).to_have_text("stopped")
        await expect(part.locator("[data-test=facts]")).to_contain_text(re.compile(r"\d cached\), \d+ out"))
        await expect(part.locator("[data-test=cost]")).to_be_visible()
        gateway.engine.step_s = 0.0

        # It goes on from there as another version.
        await part.get_by_role("button", name="Continue").click()
        await expect(part.get_by_text("2 / 2")).to_be_visible()
        prompt = wide_text.decode(gateway.engine.seen[-1].prompt, skip_special=False)
        assert re.search(r"long\nstory<\|end\|><\|assistant\|>[word ]+$", prompt), prompt

        thought = await ask(page, "think")
        await expect(thought.locator(".rich").last).to_have_text("It is 4.")
        await expect(thought.get_by_text("Let me see.")).to_be_hidden()
        await thought.locator("summary").click()
        await expect(thought.get_by_text("Let me see.")).to_be_visible()
        await ask(page, "And now?")
        prompt = wide_text.decode(gateway.engine.seen[-1].prompt, skip_special=False)
        assert "<|assistant|>It is **4**.<|end|><|user|>And now?" in prompt, "reasoning is not sent back"

        rated = thought.get_by_role("button", name="Good answer")
        await rated.click()
        await expect(rated).to_have_attribute("aria-pressed", "true")
        (vote,) = (await gateway.client.get("/v1/admin/feedback")).json()["data"]
        assert vote["rating"] == "up"


@pytest.mark.slow
async def test_what_is_refused_keeps_the_draft_and_says_why_beside_it(
    serving: Serving, page: Page, wide_text: TextModel, tmp_path: Path
) -> None:
    async with chat(serving, wide_text, page, tmp_path) as gateway:
        await ask(page, "long")
        await page.get_by_role("button", name="Settings").click()
        await page.get_by_label("Temperature").fill("9")
        await composer(page).fill("my careful words")
        await page.keyboard.press("Enter")
        problem = page.get_by_role("alert")
        await expect(problem).to_contain_text("temperature")
        await inside(page, problem)
        await expect(composer(page)).to_have_value("my careful words")
        assert await answers(page).count() == 1, "nothing is left of the attempt"

        # Not even JSON: not sent at all.
        await page.get_by_role("button", name="Reset").click()
        await page.get_by_label("JSON schema of the answer").fill("{")
        sent = len(gateway.engine.seen)
        await page.get_by_role("button", name="Try again").click()
        await expect(problem).to_contain_text("not JSON")
        await expect(composer(page)).to_have_value("my careful words")
        assert len(gateway.engine.seen) == sent

        await page.get_by_role("button", name="Reset").click()
        await page.get_by_role("button", name="Try again").click()
        await expect(answers(page).nth(1).locator(".rich")).to_have_text("Hello, world!")
        await expect(problem).to_be_hidden()
        await expect(composer(page)).to_have_value("")


@pytest.mark.slow
async def test_conversations_are_kept_found_renamed_and_deleted(
    serving: Serving, page: Page, wide_text: TextModel, tmp_path: Path
) -> None:
    async with chat(serving, wide_text, page, tmp_path):
        await ask(page, "About rivers")
        history = page.get_by_role("navigation", name="Conversations")
        await history.get_by_role("button", name="New chat").click()
        await expect(answers(page)).to_have_count(0)
        await ask(page, "second: about mountains")
        await expect(history.locator(".entry")).to_have_count(2)

        await page.reload()
        await expect(answers(page).locator(".rich")).to_have_text("The second answer.")
        await history.get_by_role("textbox", name="Search conversations").fill("hello, WORLD")
        await expect(history.locator(".entry")).to_have_count(1)
        await history.get_by_role("button", name="About rivers", exact=True).click()
        await expect(answers(page).locator(".rich")).to_have_text("Hello, world!")

        await history.get_by_role("button", name="Actions of About rivers").click()
        await page.get_by_text("Rename", exact=True).click()
        await page.get_by_label("Title").fill("Waters")
        await page.get_by_role("button", name="OK").click()
        await expect(page.locator(".top .title")).to_have_text("Waters")

        await history.get_by_role("button", name="Actions of Waters").click()
        await page.get_by_text("Delete", exact=True).click()
        await page.get_by_role("button", name="Delete", exact=True).click()
        await history.get_by_role("textbox", name="Search conversations").fill("")
        await expect(history.locator(".entry")).to_have_count(1)
        await expect(answers(page)).to_have_count(0)


@pytest.mark.slow
async def test_on_a_phone_composer_and_sheets_fit(
    serving: Serving, page: Page, wide_text: TextModel, tmp_path: Path
) -> None:
    await page.set_viewport_size({"width": 390, "height": 780})
    async with chat(serving, wide_text, page, tmp_path):
        answer = await ask(page, "code")
        await expect(answer.locator(".hl-call")).to_have_text("print")
        await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        await answer.get_by_role("button", name="Copy this block").click()
        await expect(answer.get_by_role("button", name="Copy this block")).to_have_text("Copied")
        assert await page.evaluate("navigator.clipboard.readText()") == "print('hi')"
        await inside(page, composer(page))
        assert await page.evaluate("document.documentElement.scrollWidth") <= 390
        await page.get_by_role("button", name="Settings").click()
        system = page.get_by_label("System prompt")
        await expect(system).to_be_visible()
        await page.wait_for_function(
            "document.querySelector('.chat-sheet').getBoundingClientRect().bottom <= innerHeight + 1"
        )
        await inside(page, system)
        await page.get_by_role("button", name="Close settings").click()
        await expect(system).to_be_hidden()
        await inside(page, page.get_by_role("button", name="Send"))
        await inside(page, page.get_by_role("button", name="Attach files"))


@pytest.mark.slow
async def test_a_server_that_is_away_costs_nothing_and_the_page_recovers_by_itself(
    serving: Serving, page: Page, wide_text: TextModel, tmp_path: Path
) -> None:
    async with chat(serving, wide_text, page, tmp_path):
        await ask(page, "Hi")
        await page.context.set_offline(True)
        await composer(page).fill("are you there?")
        await page.keyboard.press("Enter")
        problem = page.locator(".composer").get_by_role("alert")
        await expect(problem).to_contain_text("does not answer")
        await expect(composer(page)).to_have_value("are you there?")
        await expect(answers(page)).to_have_count(1)
        await page.context.set_offline(False)
        await expect(problem).to_be_hidden(timeout=90_000)
        await page.get_by_role("button", name="Send").click()
        await expect(answers(page).nth(1).locator(".rich")).to_have_text("Hello, world!")


HANDBOOK = """# Handbook

## Opening hours

The office opens at eight in the morning and closes at six in the evening.
"""


@pytest.mark.slow
async def test_an_attached_file_is_read_cited_and_removed_with_its_chat(
    serving: Serving, page: Page, wide_text: TextModel, tmp_path: Path, encoder_endpoint: str
) -> None:
    async with chat(serving, wide_text, page, tmp_path, encoders=encoders(encoder_endpoint)) as gateway:
        say(gateway, wide_text, "It opens at eight [1].")
        async with page.expect_file_chooser() as chooser:
            await page.get_by_role("button", name="Attach files").click()
        file = {"name": "handbook.md", "mimeType": "text/markdown", "buffer": HANDBOOK.encode()}
        await (await chooser.value).set_files(file)
        await expect(page.locator(".file.ready")).to_contain_text("handbook.md", timeout=60_000)
        answer = await ask(page, "When does the office open?")
        assert "eight in the morning" in wide_text.decode(gateway.engine.seen[-1].prompt)

        await answer.locator(".cite").click()
        source = page.get_by_role("dialog", name="Source")
        await expect(source.locator(".passage")).to_contain_text("closes at six in the evening")
        await expect(source).to_contain_text("handbook.md")
        await source.get_by_role("button", name="Close").click()
        await expect(source).to_be_hidden()
        await answer.locator(".sources button").click()
        await expect(source.locator(".passage")).to_be_visible()
        await page.keyboard.press("Escape")

        (collection,) = (await gateway.client.get("/v1/collections")).json()["data"]
        assert collection["name"].startswith("chat-")
        await page.get_by_role("button", name="Actions of When does the office open?").click()
        await page.get_by_text("Delete", exact=True).click()
        await page.get_by_role("button", name="Delete", exact=True).click()
        await expect(page.locator(".history .entry")).to_have_count(0)
        assert (await gateway.client.get("/v1/collections")).json()["data"] == []


@pytest.mark.slow
async def test_each_key_has_conversations_of_its_own(
    serving: Serving, page: Page, wide_text: TextModel, tmp_path: Path
) -> None:
    async with chat(serving, wide_text, page, tmp_path) as gateway:
        await sign_in(gateway, "acme")
        acme = gateway.client.headers["authorization"].removeprefix("Bearer ")
        made = await gateway.client.post("/v1/admin/keys", json={"tenant": "acme", "scopes": ["inference"]})
        other = made.json()["key"]
        for key, seen in ((acme, 0), (other, 0), (acme, 1)):
            await page.evaluate("sessionStorage.clear()")
            await page.goto("about:blank")
            await page.goto(f"http://127.0.0.1:{gateway.port}/console/")
            await page.get_by_label("API key").fill(key)
            await page.keyboard.press("Enter")
            await expect(composer(page)).to_be_visible()
            await expect(page.locator(".history .entry")).to_have_count(seen)
            await ask(page, "Hi")
            await expect(page.locator(".history .entry")).to_have_count(seen + 1)


@pytest.mark.slow
async def test_a_page_that_could_not_load_whole_begins_again(
    serving: Serving, page: Page, wide_text: TextModel, tmp_path: Path
) -> None:
    async with chat(serving, wide_text, page, tmp_path):
        await page.route("**/main.js", lambda route: route.abort())
        await page.reload()
        await expect(page.get_by_role("alert")).to_contain_text("Trying again")
        await page.unroute("**/main.js")
        await expect(composer(page)).to_be_visible()


class Wire:
    """A port that leads to another one, and whose connections can be cut."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._ends: set[asyncio.StreamWriter] = set()

    async def join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._to)
        self._ends |= {writer, far_writer}
        await asyncio.gather(self._pass(reader, far_writer), self._pass(far_reader, writer))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.transport.abort()

    def cut(self) -> None:
        for end in self._ends:
            end.transport.abort()
        self._ends.clear()


@pytest.mark.slow
async def test_an_answer_goes_on_after_its_connection_broke(
    serving: Serving, page: Page, wide_text: TextModel, tmp_path: Path
) -> None:
    said = " ".join(map(str, range(500)))
    scripted = ScriptedEngine(wide_text, said, step_s=0.003, max_model_len=16_384)
    engine = RunningEngine(scripted, f"ipc://{tmp_path}/engine")
    backend = ReplicaSet("tiny", [NativeBackend(engine.listener.endpoint)])
    try:
        async with chat(serving, wide_text, page, tmp_path, backend=backend) as gateway:
            wire = Wire(gateway.port)
            async with await asyncio.start_server(wire.join, "127.0.0.1", 0) as proxy:
                await page.goto(f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}/console/")
                await composer(page).fill("Count")
                await page.keyboard.press("Enter")
                answer = answers(page).first
                for seen in ("20 21 22", "120 121 122"):
                    await expect(answer.locator(".rich")).to_contain_text(seen)
                    wire.cut()
                await expect(answer.get_by_role("button", name="Regenerate")).to_be_enabled()
                await expect(answer.locator(".rich")).to_have_text(said)
                assert await answer.get_by_role("alert").count() == 0 and len(scripted.aborted) == 2
                wire.cut()
    finally:
        engine.close()


@pytest.mark.slow
async def test_notices_never_cover_the_composer(
    serving: Serving, page: Page, wide_text: TextModel, tmp_path: Path
) -> None:
    async with chat(serving, wide_text, page, tmp_path):
        await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        await page.get_by_role("button", name="Code").click()
        await page.get_by_role("button", name="Copy").click()
        notice = await page.locator(".q-notification").bounding_box()
        field = await page.locator(".composer").bounding_box()
        assert notice is not None and field is not None and notice["y"] + notice["height"] < field["y"]


@pytest.mark.slow
async def test_the_view_follows_the_answer_until_the_reader_scrolls_up(
    serving: Serving, page: Page, wide_text: TextModel, tmp_path: Path
) -> None:
    async with chat(serving, wide_text, page, tmp_path) as gateway:
        gateway.engine.step_s = 0.001
        say(gateway, wide_text, "line\n\n" * 1500)
        await composer(page).fill("Go on")
        await page.keyboard.press("Enter")
        log = page.get_by_role("log")
        await page.wait_for_function("document.querySelector('.messages').scrollTop > 600")
        # It follows; text that came a moment ago may not be in view yet.
        rest = "(e) => e.scrollHeight - e.scrollTop - e.clientHeight < 200"
        await page.wait_for_function(f"({rest})(document.querySelector('.messages'))")
        await log.hover()
        await page.mouse.wheel(0, -400)
        down = page.get_by_role("button", name="Go to the end")
        await expect(down).to_be_visible()
        seen = await log.evaluate("(e) => e.scrollTop")
        height = await log.evaluate("(e) => e.scrollHeight")
        await page.wait_for_function(f"document.querySelector('.messages').scrollHeight > {height + 300}")
        assert await log.evaluate("(e) => e.scrollTop") <= seen, "the reader stays where it is"
        await down.click()
        await expect(down).to_be_hidden()
        await page.get_by_role("button", name="Stop").click()
        await expect(answers(page).locator(".end")).to_have_text("stopped")


@pytest.mark.slow
async def test_an_answer_that_a_limit_or_the_server_ended_says_so(
    serving: Serving, page: Page, wide_text: TextModel, tmp_path: Path
) -> None:
    async with chat(serving, wide_text, page, tmp_path, time_limit_s=1.0) as gateway:
        gateway.engine.step_s = 0.02
        await composer(page).fill("long")
        await page.keyboard.press("Enter")
        await expect(answers(page).locator(".end")).to_have_text("stopped by the server's time limit")

        await composer(page).fill("long again")
        await page.keyboard.press("Enter")
        part = answers(page).nth(1)
        await expect(part.locator(".rich")).to_contain_text("word")
        gateway.stop.set()
        await expect(part.get_by_role("alert")).to_contain_text("The answer broke off")
        await expect(part.locator(".rich")).to_contain_text("word")
        await expect(page.locator(".composer").get_by_role("alert")).to_be_visible()
