"""R-OBS-3: the shipped dashboards show what a real gateway measures, as a real Prometheus has scraped it."""

from __future__ import annotations

import asyncio
import json
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.config.guardrails import GuardrailConfig
from penstock.config.schema import LimitConfig, TelemetryConfig
from penstock.engine.adapters.spec import AdapterLoad
from penstock.engine.request import DeviceLoad, EngineLoad, HandoverLoad
from penstock.gateway.process.settings import ModelSettings
from penstock.routing.replicas import ReplicaSet
from penstock.testing.in_process_backend import InProcessBackend
from penstock.text import TextModel
from tests.deploy.prometheus import ROOT, SCRAPE_S, need_prometheus, scraping
from tests.gateway.conftest import Serving
from tests.scripted import ScriptedEngine

FOLDER = ROOT / "deploy/grafana"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))


@pytest.fixture(scope="module")
def build() -> Iterator[dict[str, Any]]:
    before = sys.path[:]
    sys.path.insert(0, str(FOLDER))
    yield runpy.run_path(str(FOLDER / "build.py"))
    sys.path[:] = before


def board(name: str) -> dict[str, Any]:
    return dict(json.loads((FOLDER / f"{name}.json").read_text()))


def expressions() -> dict[str, str]:
    """Every query, by dashboard, panel and legend, with Grafana's variables filled in."""
    found = {}
    for name in NAMES:
        for panel in board(name)["panels"]:
            for target in panel.get("targets", ()):
                if "expr" not in target:  # on ClickHouse: tests/log_pipeline/test_dashboard.py
                    continue
                text = target["expr"].replace("$__rate_interval", f"{8 * SCRAPE_S:g}s").replace("24h", "1m")
                text = re.sub(r"\$(model|tenant)", ".*", text)
                assert "$" not in text
                found[f"{name}: {panel['title']}: {target['legendFormat']}"] = text
    return found


def test_the_files_are_what_the_script_writes(build: dict[str, Any]) -> None:
    shipped = ["engine", "features", "overview", "request-log", "router-and-queue", "tenants-and-cost"]
    assert sorted(build["BOARDS"]) == NAMES == shipped
    for name, written in build["BOARDS"].items():
        assert (FOLDER / f"{name}.json").read_text() == build["render"](written), "run deploy/grafana/build.py"


@pytest.mark.parametrize("name", NAMES)
def test_a_dashboard_is_one_that_grafana_takes(name: str) -> None:
    found = board(name)
    panels = found["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells), "panels overlap"
    assert max(x for x, _ in cells) < 24
    sdk = pytest.importorskip("grafana_foundation_sdk.models.dashboard", reason="pip install grafana-foundation-sdk")
    decoded = sdk.Dashboard.from_json(found)
    assert (decoded.uid, decoded.title) == (found["uid"], found["title"])
    assert [panel.title for panel in decoded.panels] == [panel["title"] for panel in panels]


def test_every_panel_is_explained() -> None:
    page = " ".join((ROOT / "docs/operations.md").read_text().split())
    for name in NAMES:
        found = board(name)
        assert found["title"] in page
        missing = [panel["title"] for panel in found["panels"] if panel["type"] != "row" and panel["title"] not in page]
        assert not missing


class Busy(ScriptedEngine):
    """Says that it has everything a dashboard could show."""

    def load_snapshot(self) -> EngineLoad:
        load = super().load_snapshot()
        n = load.generation_tokens
        load.prefix_query_tokens, load.prefix_hit_tokens = 2 * n, n
        load.drafts, load.draft_tokens, load.accepted_tokens = n, 4 * n, 3 * n
        load.devices = [DeviceLoad(0, 30 * 2**30, 80 * 2**30, 0.75)]
        load.adapters = AdapterLoad(slots=4, on_device=1, on_host=2, loading=0, loads=n, load_seconds=n / 10)
        load.handover = HandoverLoad(waiting=1, handovers=n, fallbacks=n, seconds=n / 10, bytes_in=n, bytes_out=n)
        return load


@pytest.mark.slow
@need_prometheus
async def test_every_expression_has_a_result(
    serving: Serving, text: TextModel, tmp_path: Path, build: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.telemetry.tracing.CLOSE_S", 0.1)
    boards = build["BOARDS"].values()
    optional = {item.title for found in boards for _, _, items in found.rows for item in items if item.optional}
    settings = {
        "store_url": f"sqlite:///{tmp_path / 'ledger.db'}",
        "models": (ModelSettings("tiny", "", input_price=1.0, output_price=2.0),),
        "guardrails": (GuardrailConfig(name="secret", stage="input", action="refuse", words=("bluebird",)),),
        "limits": (LimitConfig(per="user", requests_per_minute=1),),
        "telemetry": TelemetryConfig(otlp_endpoint="http://127.0.0.1:9"),
    }
    engines = [Busy(text, step_s=0.002) for _ in range(2)]
    replicas = ReplicaSet("tiny", [InProcessBackend(engine, name=str(i)) for i, engine in enumerate(engines)])
    async with serving(engines[0], backend=replicas, **settings) as gateway:
        for model in gateway.parts.registry:
            model.cost_per_hour = 3.6

        admission = gateway.parts.admissions._admission
        assert admission is not None

        async def traffic() -> None:
            for i in range(1000):
                admission.metrics.shed("tiny", "standard", "queue_full")
                admission.metrics.downgraded("tiny")
                await gateway.chat(n=2, stream=True, metadata={"feature": "search"})
                await gateway.chat(model="nope")
                await gateway.chat(messages=[{"role": "user", "content": "bluebird"}])
                await gateway.chat(user="ann", response_format={"type": "json_schema", "json_schema": schema(i)})

        async with scraping(gateway.port, tmp_path) as prometheus:
            load = asyncio.create_task(traffic())
            try:
                await prometheus.until("rate(penstock_rejections_total[2s]) > 0")
                for where, expression in expressions().items():
                    if where.split(": ")[1] in optional:
                        await prometheus.query(expression)
                    else:
                        await prometheus.until(expression, within=5)
                exemplars = await prometheus.exemplars("vllm:time_to_first_token_seconds_bucket")
                assert exemplars and all(len(found["labels"]["trace_id"]) == 32 for found in exemplars)
            finally:
                load.cancel()
                await asyncio.gather(load, return_exceptions=True)


def schema(i: int) -> dict[str, Any]:
    return {"name": "s", "schema": {"type": "object", "properties": {f"p{i}": {"type": "string"}}}}


def test_provisioning_names_what_is_shipped() -> None:
    folder = FOLDER / "provisioning"
    (source,) = yaml.safe_load((folder / "datasources/prometheus.yml").read_text())["datasources"]
    (provider,) = yaml.safe_load((folder / "dashboards/penstock.yml").read_text())["providers"]
    assert source["type"] == "prometheus" and source["url"].startswith("http://")
    scrape = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == scrape
    assert provider["type"] == "file" and provider["options"]["path"]
