"""The console's files: all there, nothing else reachable, none of them from another host."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.console import libraries
from penstock.console.app import Console
from penstock.console.assets import Assets
from penstock.errors import ConfigError
from tests.gateway.conftest import Serving

STATIC = Path(__file__).resolve().parents[2] / "penstock" / "console" / "static"
DOCS = Path(__file__).resolve().parents[2] / "docs"


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


def test_pages_and_metrics_that_the_console_names_are_documented() -> None:
    documented = "".join((DOCS / name).read_text() for name in ("operations.md", "routing.md"))
    for file in STATIC.rglob("*.js"):
        for name in re.findall(r"\b(?:penstock_[a-z_]+|vllm:[a-z_]+)", file.read_text()):
            assert name in documented, f"{file.name}: {name}"
    page = (DOCS / "console.md").read_text()
    labels = re.findall(r'name: "\w+", label: "([^"]+)"', (STATIC / "main.js").read_text())
    assert len(labels) > 15 and not [label for label in labels if not re.search(rf"^\| \[?{label}\b", page, re.M)]


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


def test_without_a_package_index_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(libraries, "PACKAGED", tmp_path / "none")
    pip = tmp_path / "pip"
    pip.write_text("#!/bin/sh\necho 'ERROR: No matching distribution found' >&2; exit 1\n")
    pip.chmod(0o755)
    monkeypatch.setattr(libraries, "_pip", lambda: [str(pip)])
    with pytest.raises(ConfigError, match=r"No matching distribution found.*server\.console: false"):
        Assets()
    assert not [path for path in (tmp_path / "penstock" / "console").iterdir() if path.name != ".lock"]


def test_another_wheel_than_the_pinned_one_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pip = tmp_path / "pip"
    pip.write_text(
        '#!/bin/sh\nfor word; do case $word in --dest=*) echo forged >"${word#--dest=}/a.whl";; esac; done\n'
    )
    pip.chmod(0o755)
    monkeypatch.setattr(libraries, "_pip", lambda: [str(pip)])
    with pytest.raises(ConfigError, match="served another"):
        libraries.fetch(tmp_path / "lib")
    assert not (tmp_path / "lib").exists()


def test_only_the_fonts_that_are_used_are_kept() -> None:
    styles = (libraries.folder() / "fonts.css").read_text()
    assert ".material-icons {" in styles and "Roboto" in styles and "Symbols" not in styles
    assert set(re.findall(r"url\(fonts/([^)]+)\)", styles)) == {
        path.name for path in (libraries.folder() / "fonts").iterdir()
    }
