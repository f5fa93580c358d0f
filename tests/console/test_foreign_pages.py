"""Pages of other origins in a real browser cannot use a server without keys."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from playwright.async_api import Browser, expect

from penstock.console.app import Console
from tests.gateway.conftest import Serving

ATTACKS = """async (server) => {
  const bodies = {
    "/v1/admin/tenants": '{"id": "evil"}',
    "/v1/admin/tools": '{"name": "evil", "kind": "mcp", "url": "http://evil.example/mcp"}',
    "/v1/chat/completions": '{"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}',
  };
  const got = [];
  const attempts = [];
  const attempt = (path, options) => attempts.push(send(path, options));
  const send = async (path, options) => {
    try {
      if ((await fetch(server + path, options)).ok) got.push(path);
    } catch {} // the browser keeps the reply from the page; whether it had an effect is seen at the server
  };
  for (const [path, body] of Object.entries(bodies)) {
    for (const mode of ["no-cors", "cors"]) {
      for (const type of ["text/plain", "application/json"])
        attempt(path, { method: "POST", mode, body, headers: { "content-type": type } });
      attempt(path, { method: "POST", mode, body: new Blob([body]) });
    }
    const headers = { "content-type": "application/json", "x-penstock-console": "1" };
    attempt(path, { method: "POST", body, headers });
    navigator.sendBeacon(server + path, body);
  }
  for (const mode of ["no-cors", "cors"]) {
    const form = new FormData();
    form.append("purpose", "batch");
    form.append("file", new Blob(["{}"]), "a.jsonl");
    attempt("/v1/files", { method: "POST", mode, body: form });
  }
  attempt("/v1/admin/models/tiny/sleep", { method: "POST", mode: "no-cors" });
  attempt("/v1/admin/keys", {});
  for (const sandbox of [null, "allow-scripts allow-forms"]) { // the second sends `Origin: null`
    const frame = document.createElement("iframe");
    if (sandbox) frame.sandbox = sandbox;
    frame.srcdoc = `<form method="post" enctype="text/plain" action="${server}/v1/admin/tenants">
      <input name='{"id": "evil", "name": "' value='"}'></form><script>document.forms[0].submit()</script>`;
    document.body.append(frame);
  }
  await Promise.all(attempts);
  await new Promise((done) => setTimeout(done, 300));
  return got;
}"""


@asynccontextmanager
async def blank_pages() -> AsyncIterator[int]:
    """A web server on a port of its own; every path is an empty page."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        page = b"<!doctype html><title>another site</title><link rel=icon href=data:,><body></body>"
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        writer.write(head % len(page) + page)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


@pytest.mark.slow
async def test_no_other_page_gets_in_and_the_console_does(serving: Serving, browser: Browser, tmp_path: Path) -> None:
    async with (
        serving(wrap=Console, store_url=f"sqlite:///{tmp_path}/store.db") as gateway,
        blank_pages() as port,
    ):
        local, rebound = f"http://127.0.0.1:{gateway.port}", f"http://rebound.example:{gateway.port}"
        for where, server in (
            (f"http://127.0.0.1:{port}/", local),  # another port
            (f"http://evil.example:{port}/", local),  # another host
            (f"{rebound}/health/live", rebound),  # DNS rebinding: to the browser this is one origin
        ):
            page = await browser.new_page()
            await page.goto(where)
            assert await page.evaluate(ATTACKS, server) == [], where
            await page.close()

        get = gateway.client.get
        assert (await get("/v1/admin/keys")).json()["data"] == [], "the owner is not locked out"
        tenants = (await get("/v1/admin/tenants")).json()["data"]
        assert "evil" not in [tenant["id"] for tenant in tenants]
        assert (await get("/v1/files")).json()["data"] == (await get("/v1/admin/tools")).json()["data"] == []
        assert (await get("/v1/usage")).json()["data"] == [], "nothing was asked of a model"
        assert (await gateway.chat()).status_code == 200, "the model was not put to sleep"

        console = await browser.new_page()
        console.set_default_timeout(30_000)
        await console.goto(f"{local}/console/#keys")
        await console.get_by_label("New tenant").fill("acme")
        await console.get_by_role("button", name="Create tenant").click()
        await expect(console.get_by_role("cell", name="acme", exact=True)).to_be_visible()
