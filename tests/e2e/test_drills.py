"""`penstock drill` as a person would run it: all on a throw-away fleet, some on a running server, a short soak."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from playwright.async_api import async_playwright

from penstock.fleet.drills.faults import FAULTS
from penstock.fleet.drills.model import write_model
from tests.console.conftest import CHROMIUM, FLAGS
from tests.e2e.test_supervisor import Server

pytestmark = pytest.mark.slow


def drill(*words: str, within: float, code: int = 0) -> str:
    command = [sys.executable, "-m", "penstock", "drill", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=within)
    assert done.returncode == code, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


async def look_at(page: Path, picture: Path) -> str:
    """The words of a report page in a real browser."""
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine (Debian: apt install chromium)")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        tab = await browser.new_page(viewport={"width": 1280, "height": 900})
        wrong: list[str] = []
        tab.on("request", lambda request: request.url.startswith("file:") or wrong.append(request.url))
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        await tab.goto(page.as_uri())
        await tab.screenshot(path=str(picture), full_page=True)
        overflow = await tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        words = await tab.inner_text("body")
        await browser.close()
    assert not wrong and overflow <= 0, (wrong, overflow)
    return words


@pytest.mark.timeout(2400)
async def test_all_drills_lose_nothing(tmp_path: Path) -> None:
    report = tmp_path / "drills.html"
    results = json.loads(drill("all", "--report", str(report), "-o", "json", within=2300))
    assert {result["name"] for result in results} == FAULTS.keys()
    for result in results:
        assert result["passed"] and result["full_s"] is not None, result
        assert result["ledger"]["exact"] >= result["streams"] > 10
    by_name = {result["name"]: result for result in results}
    assert by_name["engine"]["restarted"] == 0
    assert "damaged or incomplete" in str(by_name["weights"]["notes"])
    assert by_name["network-cut"]["detected_s"] is not None
    words = await look_at(report, tmp_path / "drills.png")
    assert "nothing was lost" in words and all(name in words for name in FAULTS)


@pytest.mark.timeout(900)
def test_a_running_server_is_broken_only_when_that_is_wanted(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    settings = {
        "models.0.name": "tiny",
        "models.0.replicas": "2",
        "models.0.deterministic": "true",
        "models.0.threads": "1",
        "models.0.kv_memory": "64MiB",
        "encoders": "[]",
        "store.url": f"sqlite:///{tmp_path / 'penstock.db'}",
        "store.gateway_timeout_s": "3",
    }
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    create = [sys.executable, "-m", "penstock", "keys", "create", "--scope", "admin", "--scope", "metrics"]
    create += ["--scope", "inference", "--set", f"store.url=sqlite:///{tmp_path / 'penstock.db'}"]
    key = subprocess.run(create, capture_output=True, text=True, check=True).stdout.split()[0]
    server = Server(str(tmp_path / "model"), *words, defaults=False)
    try:
        server.wait_for("curl http")
        drill("engine", "--url", server.url, "--key", key, within=60, code=2)
        found = drill(
            "engine", "gateway", "--url", server.url, "--key", key, "--yes", "-o", "json", "--tokens", "100", within=800
        )
        results = json.loads(found)
        assert [result["name"] for result in results] == ["engine", "gateway"]
        assert all(result["passed"] and result["ledger"]["exact"] > 10 for result in results)
        assert server.said("died (killed by SIGKILL)") >= 2
        left = subprocess.run(
            [sys.executable, "-m", "penstock", "keys", "list", "-o", "json", *create[-2:]],
            capture_output=True,
            text=True,
        )
        drilled = [entry for entry in json.loads(left.stdout) if entry["tenant"] == "penstock-drill"]
        assert drilled and all(entry["state"] == "revoked" for entry in drilled), "it cleans up"
    finally:
        server.close()


@pytest.mark.timeout(1200)
async def test_a_soak_of_five_minutes_leaks_nothing(tmp_path: Path) -> None:
    report = tmp_path / "soak.html"
    minutes = os.environ.get("PENSTOCK_SOAK_MINUTES", "5")
    found = json.loads(
        drill("soak", "--minutes", minutes, "--report", str(report), "-o", "json", within=60 * float(minutes) + 800)
    )
    assert found["passed"] and not found["leaks"] and found["streams"] > 20
    kinds = {"clients that left", "bad requests", "slow readers", "batches", "embeddings"}
    assert kinds <= found["counts"].keys() and all(found["counts"][kind] > 0 for kind in kinds)
    names = " ".join(verdict["name"] for verdict in found["verdicts"])
    assert all(role in names for role in ("supervisor", "gateway", "engine tiny", "engine minilm"))
    assert "nothing was lost, and nothing grows" in await look_at(report, tmp_path / "soak.png")
