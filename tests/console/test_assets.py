"""The console's files: all there, nothing else reachable, none of them from another host."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.console.app import Console
from penstock.console.assets import Assets
from tests.gateway.conftest import Serving

STATIC = Path(__file__).resolve().parents[2] / "penstock" / "console" / "static"


def test_every_file_that_one_refers_to_exists() -> None:
    names = set(Assets().names)
    for file in STATIC.rglob("*.js"):
        folder = file.parent.relative_to(STATIC)
        for name in re.findall(r'(?:from|import\()\s*"(\.[^"$]+)"', file.read_text()):
            assert str((STATIC / folder / name).resolve().relative_to(STATIC)) in names, f"{file.name}: {name}"
    for name in re.findall(r'(?:href|src)="(?!/)([^"]+)"', (STATIC / "index.html").read_text()):
        assert name in names, name


def test_nothing_comes_from_another_host() -> None:
    for file in [*STATIC.rglob("*.js"), STATIC / "index.html", STATIC / "console.css"]:
        assert not re.findall(r"(?:src|href|url\(|from|import)\W{1,3}https?://", file.read_text()), file.name


async def test_pages_are_served_and_only_they(serving: Serving) -> None:
    async with serving(wrap=Console) as gateway:
        client = gateway.client
        assert (await client.get("/", headers={"accept": "text/html,*/*"})).headers["location"] == "/console/"
        assert (await client.get("/")).status_code != 307, "programs get the API's own answer"
        page = await client.get("/console/")
        assert page.status_code == 200 and "frame-ancestors 'none'" in page.headers["content-security-policy"]
        again = await client.get("/console/", headers={"if-none-match": page.headers["etag"]})
        assert again.status_code == 304 and not again.content
        library = await client.get("/console/lib/quasar.js", headers={"accept-encoding": "gzip"})
        assert library.headers["content-encoding"] == "gzip"
        for name in ("../app.py", "%2e%2e/app.py", "lib/../../app.py", "pages", "nothing.js"):
            assert (await client.get(f"/console/{name}")).status_code == 404, name
        assert (await client.post("/console/")).status_code in (404, 405)
        assert (await client.get("/v1/models")).status_code == 200, "the rest passes through"


async def test_without_the_library_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    from penstock.errors import ConfigError

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"server\.console: false"):
        Assets()
