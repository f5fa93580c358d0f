"""R-OBS-3: every query of the dashboard on the request log runs on ClickHouse's engine and finds what was inserted."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
import yaml

from penstock.metering.clickhouse.schema import Retention
from penstock.metering.log_entries import CHARGES, GRADES, REQUESTS, VOTES
from tests.deploy.prometheus import ROOT
from tests.log_pipeline.clickhouse_server import ClickHouseServer
from tests.log_pipeline.conftest import charge, cleared, grade, request, vote

BOARD = json.loads((ROOT / "deploy/grafana/request-log.json").read_text())
SOURCE = "grafana-clickhouse-datasource"


def queries() -> dict[str, str]:
    return {
        panel["title"]: target["rawSql"]
        for panel in BOARD["panels"]
        for target in panel.get("targets", ())
        if "rawSql" in target
    }


def filled_in(sql: str) -> str:
    """As Grafana sends it, for the last week and all tenants and models."""
    text = re.sub(r"\$__timeFilter\((\w+)\)", r"(\1 >= now() - INTERVAL 7 DAY AND \1 <= now())", sql)
    text = re.sub(r"\$__timeInterval\((\w+)\)", r"toStartOfInterval(toDateTime(\1), INTERVAL 3600 second)", text)
    text = text.replace("${tenant:singlequote}", "'tenant 0','tenant 1','tenant 2'")
    text = text.replace("${model:singlequote}", "'m'")
    assert "$" not in text
    return text


def test_the_data_source_is_provisioned_under_the_type_that_the_panels_name() -> None:
    file = ROOT / "deploy/grafana/provisioning/datasources/clickhouse.yml"
    (source,) = yaml.safe_load(file.read_text())["datasources"]
    assert source["type"] == SOURCE and source["jsonData"]["protocol"] == "http"
    assert {variable["name"] for variable in BOARD["templating"]["list"]} == {
        *("datasource", "clickhouse", "tenant", "model")
    }
    kinds = {panel["datasource"]["type"] for panel in BOARD["panels"] if "datasource" in panel}
    assert kinds == {"prometheus", SOURCE} and len(queries()) >= 15


@pytest.mark.slow
def test_every_query_has_a_result(server: ClickHouseServer) -> None:
    clickhouse = cleared(server)
    clickhouse.migrate(Retention.days(30, 400))
    now = time.time() - 60
    rows = [request(number, timestamp=now - number) for number in range(500)]
    clickhouse.insert(REQUESTS, rows, "requests")
    charges = [_moved(charge(number), now - number) for number in range(500)]
    clickhouse.insert(CHARGES, charges, "charges")
    clickhouse.insert(VOTES, [_moved(vote(n, "up" if n % 4 else "down"), now) for n in range(40)], "votes")
    clickhouse.insert(GRADES, [_moved(grade(n, 0.5), now) for n in range(8)], "grades")
    clickhouse.insert_dead_letters([("request_log", 0, 7, "not JSON", "{")], "letters")
    results: dict[str, Any] = {}
    for title, sql in queries().items():
        results[title] = clickhouse.query(filled_in(sql))
        assert results[title], f"{title}: no rows"
    dollars = sum(entry.cost_nanos for entry in charges) / 1e9
    assert results["Cost in this period"] == [(pytest.approx(dollars),)]
    assert results["Charged requests"] == [(500,)] and results["Tokens charged"] == [(7500,)]
    assert sum(row[-1] for row in results["Cost by tenant over time"]) == pytest.approx(dollars)
    assert sum(row[-1] for row in results["Finish reasons"]) == 500
    assert sum(row[-1] for row in results["Errors by route"]) == 50
    assert {row[-1] for row in results["Share of votes up"]} == {0.75}
    assert {row[-2:] for row in results["Grades of the judge"]} == {(0.75, 0.5)}
    assert all(1 <= p50 <= p95 <= p99 <= 50 for _, p50, p95, p99 in results["First token"])
    assert 55 < results["Newest record"][0][0] < 3600
    for variable in BOARD["templating"]["list"]:
        if variable["type"] == "query":
            assert clickhouse.query(variable["query"])


def _moved(entry: Any, moment: float) -> Any:
    import msgspec

    return msgspec.structs.replace(entry, timestamp=moment)
