"""Real parts for the log pipeline: a broker and a ClickHouse server, for all tests of a module."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.metering.clickhouse.client import ClickHouse
from penstock.metering.log_entries import ChargeEntry, Entry, GradeEntry, LogEntry, VoteEntry
from tests.log_pipeline.broker import Broker, broker
from tests.log_pipeline.clickhouse_server import ClickHouseServer, clickhouse_server

NOW = time.time() // 3600 * 3600 - 5400
"""Two hours ago, in the middle of an hour."""
ROUTE = "/v1/chat/completions"


@pytest.fixture(scope="module")
def kafka() -> Iterator[Broker]:
    pytest.importorskip("confluent_kafka", reason="pip install confluent-kafka to test the log pipeline")
    with broker() as running:
        yield running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClickHouseServer]:
    pytest.importorskip("clickhouse_connect", reason="pip install clickhouse-connect to test the log pipeline")
    with clickhouse_server(tmp_path_factory.mktemp("clickhouse")) as running:
        yield running


def request(number: int, **more: Any) -> LogEntry:
    given: dict[str, Any] = {
        "request_id": f"req_{number}", "user_id": None, "tenant": f"tenant {number % 3}", "model_version": "m",
        "adapter_id": None, "prompt_tokens": 10, "cached_tokens": 4, "completion_tokens": 5,
        "ttft_ms": 1.0 + number % 50, "total_latency_ms": 20.0 + number % 100,
        "finish_reason": "stop" if number % 10 else "error", "route": ROUTE, "timestamp": NOW + number / 1000,
    }  # fmt: skip
    return LogEntry(**given | more)


def charge(number: int) -> ChargeEntry:
    return ChargeEntry(
        f"charge_{number}", f"req_{number}", f"tenant {number % 3}", "ann", "search", "m", "", "free", 10, 4, 5,
        1000 + number, "stop", "end", NOW + number / 1000,
    )  # fmt: skip


def vote(number: int, rating: Any, at: float = NOW) -> VoteEntry:
    return VoteEntry(
        f"chatcmpl-{number}", f"req_{number}", "tenant 0", "ann", "m", "", ROUTE, "auto", "routed", rating, at
    )


def grade(number: int, groundedness: float | None = None) -> GradeEntry:
    return GradeEntry(f"grade_{number}", f"req_{number}", "tenant 0", "m", "auto", 0.75, groundedness, NOW)


def both(first: int, last: int) -> list[Entry]:
    return [make(number) for number in range(first, last) for make in (request, charge)]


def until(condition: Any, within: float = 120.0, what: str = "") -> None:
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, what or "it did not happen in time"
        time.sleep(0.1)


def sums(clickhouse: ClickHouse) -> dict[str, Any]:
    """What the tables and every summary say."""
    (rows, ids), *_ = clickhouse.query("SELECT count(), uniqExact(request_id, route, timestamp) FROM request_log")
    found: dict[str, Any] = {"requests": rows, "different": ids}
    [(found["charges"], found["cost"])] = clickhouse.query("SELECT count(), sum(cost_nanos) FROM request_log_charges")
    for period in ("hour", "day"):
        [(count, cost)] = clickhouse.query(f"SELECT sum(requests), sum(cost_nanos) FROM request_log_cost_by_{period}")
        found[f"charges by {period}"], found[f"cost by {period}"] = count, cost
    [(found["outcomes"],)] = clickhouse.query("SELECT sum(requests) FROM request_log_outcomes_by_hour")
    [(found["latencies"],)] = clickhouse.query("SELECT sum(requests) FROM request_log_latency_by_5m")
    return found


def expected(requests: int, cost: int, charges: int | None = None, latencies: int | None = None) -> dict[str, Any]:
    charges = requests if charges is None else charges
    return {
        "requests": requests, "different": requests, "outcomes": requests,
        "latencies": requests if latencies is None else latencies,
        "charges": charges, "charges by hour": charges, "charges by day": charges,
        "cost": cost, "cost by hour": cost, "cost by day": cost,
    }  # fmt: skip


def cleared(server: ClickHouseServer) -> ClickHouse:
    """A client of a database without tables."""
    clickhouse = ClickHouse(server.url, timeout_s=60)
    for name, *_ in clickhouse.query("SELECT name FROM system.tables WHERE database = 'default' ORDER BY name DESC"):
        clickhouse._command(f"DROP TABLE IF EXISTS {name} SYNC")
    return clickhouse


def folder_of(path: Path, name: str) -> Path:
    (path / name).mkdir()
    return path / name
