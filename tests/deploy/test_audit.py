"""The dependency audit: a vulnerable pin is found, a machine without the database says so, our own pins are sound."""

from __future__ import annotations

import json
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from deploy import audit

ADVISORY: dict[str, Any] = {
    "id": "PYSEC-1",
    "summary": "Sandbox escape",
    "affected": [
        {
            "package": {"name": "Ex.Ample", "ecosystem": "PyPI"},
            "versions": ["1.0"],
            "ranges": [
                {
                    "type": "ECOSYSTEM",
                    "events": [{"introduced": "0"}, {"fixed": "1.2"}, {"introduced": "2.0"}, {"last_affected": "2.3"}],
                },
                {"type": "GIT", "events": [{"introduced": "0"}]},
            ],
        }
    ],
}


def constraints(folder: Path, *lines: str) -> Path:
    path = folder / "constraints.txt"
    path.write_text("\n".join(["# exact versions", *lines]))
    return path


def export(folder: Path, *advisories: dict[str, Any]) -> Path:
    path = folder / "all.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for number, advisory in enumerate(advisories):
            archive.writestr(f"{number}.json", json.dumps(advisory))
    return path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr("sys.argv", ["audit", *map(str, arguments)])
    return audit.main()


def test_pins_are_read_under_their_canonical_names(tmp_path: Path) -> None:
    path = constraints(tmp_path, "Ex_Ample==1.0  # why", "", "grafana==17!10.1")
    assert audit.pins(path) == {"ex-ample": "1.0", "grafana": "17!10.1"}


@pytest.mark.parametrize(
    ("version", "found"),
    [
        ("0.1", True),
        ("1.0", True),
        ("1.1.9", True),
        ("1.2", False),
        ("1.9", False),
        ("2.0", True),
        ("2.3", True),
        ("2.4", False),
    ],
)
def test_a_version_is_affected_between_introduced_and_fixed(tmp_path: Path, version: str, found: bool) -> None:
    findings = audit.search_export({"ex-ample": version, "other": "1.0"}, export(tmp_path, ADVISORY))
    assert [(finding.package, finding.advisory, finding.fixed) for finding in findings] == (
        [("ex-ample", "PYSEC-1", "1.2")] if found else []
    )


def test_withdrawn_advisories_do_not_count(tmp_path: Path) -> None:
    assert audit.search_export({"ex-ample": "1.0"}, export(tmp_path, {**ADVISORY, "withdrawn": "2026-01-01"})) == []


@pytest.fixture
def osv() -> Iterator[str]:
    """As OSV answers."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            queries = json.loads(self.rfile.read(int(self.headers["content-length"])))["queries"]
            hit = {"vulns": [{"id": "PYSEC-1"}]}
            bad = {"package": {"name": "ex-ample", "ecosystem": "PyPI"}, "version": "1.0"}
            self.answer({"results": [hit if query == bad else {} for query in queries]})

        def do_GET(self) -> None:
            assert self.path == "/v1/vulns/PYSEC-1"
            self.answer(ADVISORY)

        def answer(self, body: object) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()


def test_a_vulnerable_pin_fails_the_audit(
    osv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = constraints(tmp_path, *(f"{name}=={version}" for name, version in audit.pins(OURS).items()), "ex.ample==1.0")
    assert run(monkeypatch, "--constraints", path, "--osv", osv) == 1
    said = capsys.readouterr().out
    assert "ex-ample 1.0: PYSEC-1 Sandbox escape (mended in: 1.2)" in said
    assert "ex-ample==1.0 is pinned, and nothing needs it" in said


OURS = audit.ROOT / "constraints.txt"


def test_our_own_pins_are_needed_and_their_licences_fit(
    osv: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    status = run(monkeypatch, "--osv", osv, "--json", tmp_path / "audit.json")
    document = json.loads((tmp_path / "audit.json").read_text())
    assert status == 0, document["problems"]
    assert document["advisories_checked"] and document["licences"]["msgspec"].startswith("BSD")


def test_a_machine_that_cannot_ask_says_so_with_a_status_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--osv", "http://127.0.0.1:9/v1") == 3
    assert "NOT CHECKED for vulnerabilities" in capsys.readouterr().out


def test_what_nothing_imports_is_named() -> None:
    assert audit.unused({"msgspec", "ruff", "pyyaml"}, {"msgspec"}) == ["pyyaml"]
    assert {"msgspec", "httpcore", "h11"} <= audit.needed([Requirement("httpx"), Requirement("msgspec")])
