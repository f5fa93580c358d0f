"""Writes the dashboards next to this file. Run it after changing a panel; tests compare the files and run every query.

    python deploy/grafana/build.py

A dashboard is a list of rows; the panels of a row share its width of 24.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine import ENGINE
from features import FEATURES
from overview import OVERVIEW
from panels import CLICKHOUSE, PROMETHEUS, Board, Panel
from request_log import REQUEST_LOG
from router import ROUTER
from tenants import TENANTS_AND_COST

FOLDER = Path(__file__).resolve().parent
SOURCES = {
    PROMETHEUS: {"type": PROMETHEUS, "uid": "${datasource}"},
    CLICKHOUSE: {"type": CLICKHOUSE, "uid": "${clickhouse}"},
}
WIDTH = 24
BOARDS = {
    "overview": OVERVIEW,
    "engine": ENGINE,
    "tenants-and-cost": TENANTS_AND_COST,
    "router-and-queue": ROUTER,
    "features": FEATURES,
    "request-log": REQUEST_LOG,
}


def panel(item: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "red" if item.below else "green", "value": None}]
    if item.limit is not None:
        steps.append({"color": "green" if item.below else "red", "value": item.limit})
    custom: dict[str, Any] = {}
    options: dict[str, Any] = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}}
    if item.kind == "timeseries":
        custom = {"lineWidth": 1, "fillOpacity": 20 if item.stack else 5, "showPoints": "never"}
        if item.stack:
            custom["stacking"] = {"mode": "normal", "group": "A"}
        if item.limit is not None:
            custom["thresholdsStyle"] = {"mode": "line"}
        options = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    return {
        "id": number,
        "type": item.kind,
        "title": item.title,
        "description": item.about,
        "datasource": SOURCES[item.source],
        "gridPos": place,
        "fieldConfig": {
            "defaults": {"unit": item.unit, "thresholds": {"mode": "absolute", "steps": steps}, "custom": custom},
            "overrides": [],
        },
        "options": options,
        "targets": [
            {"refId": chr(65 + i), "datasource": SOURCES[item.source], **query(item, legend, text)}
            for i, (legend, text) in enumerate(item.queries.items())
        ],
    }


def query(item: Panel, legend: str, text: str) -> dict[str, Any]:
    if item.source == PROMETHEUS:
        return {"expr": text, "legendFormat": legend}
    over_time = item.kind == "timeseries"
    return {
        "rawSql": text,
        "editorType": "sql",
        "queryType": "timeseries" if over_time else "table",
        "format": 0 if over_time else 1,
    }


def lines(items: list[Panel]) -> list[list[Panel]]:
    """The panels of a row, line by line: up to eight single numbers, or up to four charts."""
    most = 8 if all(item.kind == "stat" for item in items) else 4
    count = -(-len(items) // most)
    each = -(-len(items) // count)
    return [items[start : start + each] for start in range(0, len(items), each)]


def dashboard(board: Board) -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    y = 0
    for name, height, items in board.rows:
        panels.append(
            {"id": len(panels) + 1, "type": "row", "title": name, "collapsed": False, "panels": [],
             "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1}}
        )  # fmt: skip
        y += 1
        for line in lines(items):
            width = WIDTH // len(line)
            for i, item in enumerate(line):
                panels.append(panel(item, len(panels) + 1, {"x": i * width, "y": y, "w": width, "h": height}))
            y += height
    sources = [{"name": "datasource", "type": "datasource", "query": PROMETHEUS, "label": "Prometheus"}]
    if board.source == CLICKHOUSE:
        sources.append({"name": "clickhouse", "type": "datasource", "query": CLICKHOUSE, "label": "ClickHouse"})
    variables = [
        {
            "name": name,
            "type": "query",
            "datasource": SOURCES[board.source],
            "query": {"query": text, "refId": name} if board.source == PROMETHEUS else text,
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            # In a list of SQL, all are all values.
            **({"allValue": ".*"} if board.source == PROMETHEUS else {}),
            "current": {"text": "All", "value": "$__all"},
        }
        for name, text in board.variables.items()
    ]
    return {
        "uid": board.uid,
        "title": board.title,
        "description": board.about,
        "tags": ["penstock"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": board.refresh,
        "time": {"from": board.since, "to": "now"},
        "timezone": "browser",
        "templating": {"list": [*sources, *variables]},
        "links": [
            {"type": "dashboards", "title": "Penstock", "tags": ["penstock"], "asDropdown": False, "keepTime": True}
        ],
        "panels": panels,
    }


def render(board: Board) -> str:
    return json.dumps(dashboard(board), indent=2) + "\n"


def main() -> None:
    for name, board in BOARDS.items():
        (FOLDER / f"{name}.json").write_text(render(board))


if __name__ == "__main__":
    main()
