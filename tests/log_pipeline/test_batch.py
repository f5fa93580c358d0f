"""Plans of batches, and the four streams of entries: what needs no broker and no ClickHouse."""

from __future__ import annotations

from pathlib import Path

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from penstock.cli.app import app
from penstock.errors import ConfigError
from penstock.metering.clickhouse.client import identity
from penstock.metering.clickhouse.schema import Retention, column_types, statements
from penstock.metering.log_entries import REQUESTS, STREAMS, Entry, decode, encode, from_line, to_line
from penstock.metering.log_pipeline.batch import MOST_ROWS, Batch, Message, Plan
from penstock.metering.log_pipeline.metrics import MetricsServer, PipelineMetrics
from penstock.metering.request_log import LogCounts, RequestLog, Sink
from penstock.metering.spool import Spool
from penstock.telemetry.exposition import Value
from tests.log_pipeline.conftest import charge, grade, request, vote
from tests.parts import ROOT
from tests.ports import free_port

KAFKA_METADATA = 4096
"""What brokers keep beside an offset by default."""


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**62), st.frozensets(st.integers(0, MOST_ROWS - 1), max_size=200))
def test_a_plan_survives_being_written_beside_an_offset(end: int, skips: frozenset[int]) -> None:
    assert Plan.decode(Plan(end, skips).encode()) == Plan(end, skips)


def test_the_largest_plan_fits_beside_an_offset() -> None:
    import random

    skips = frozenset(random.Random(1).sample(range(MOST_ROWS), MOST_ROWS // 2))
    assert len(Plan(2**62, skips).encode()) < KAFKA_METADATA


@pytest.mark.parametrize("text", [None, "", "of another program", "2:5:", "1:x:", "1:5:%%%", "1:5:AAAA"])
def test_metadata_that_is_no_plan_is_none(text: str | None) -> None:
    assert Plan.decode(text) is None


def test_a_batch_skips_copies_what_the_table_has_and_what_cannot_be_read() -> None:
    values = [encode(request(1)), b"{", encode(request(2)), encode(request(1)), None, encode(request(3))]
    batch = Batch(REQUESTS, "log", 0, 40, [Message(40 + 2 * i, value) for i, value in enumerate(values)])
    batch.read()
    plan = batch.plan({identity(REQUESTS, request(2))})
    assert plan == Plan(51, frozenset({1, 2, 3, 4}))
    assert batch.inserted(plan) == [request(1), request(3)]
    assert [letter.offset for letter in batch.letters] == [42, 48]
    again = Batch(REQUESTS, "log", 0, 40, batch.messages)
    again.read()  # by whoever finds the plan: the table has 1 and 3 by now, which changes nothing
    assert again.inserted(plan) == [request(1), request(3)] and again.token(plan) == batch.token(plan)
    assert batch.token(plan).startswith("log/0/40-51/")


def test_every_stream_goes_through_the_spool() -> None:
    for entry in (request(1), charge(1), vote(1, "up"), grade(1)):
        assert from_line(to_line(entry)) == entry
    assert to_line(request(1)) == encode(request(1))  # as earlier versions wrote it


def test_an_entry_that_decodes_fits_its_columns() -> None:
    for entry in (request(1, ttft_ms=-1.0), request(1, prompt_tokens=2**32), request(1, timestamp=1e11)):
        with pytest.raises(msgspec.ValidationError):
            decode(REQUESTS, encode(entry))


def test_tables_have_exactly_the_fields_of_their_entries() -> None:
    for stream in STREAMS:
        assert tuple(column_types(stream)) == stream.fields
    made = statements(Retention.days(30, None))
    assert len(set(made)) == len(made)
    assert sum("MODIFY TTL" in statement for statement in made) == 4


class OnlyRequests(Sink):
    def __init__(self) -> None:
        self.entries: list[Entry] = []

    async def write(self, entries: list[Entry]) -> None:  # type: ignore[override]
        self.entries += entries

    async def close(self) -> None:
        return


async def test_a_sink_gets_only_what_it_stores_also_from_an_older_spool(tmp_path: Path) -> None:
    spool, sink = Spool(tmp_path, 10**6), OnlyRequests()
    spool.append([to_line(charge(1)), to_line(request(1))])
    log = RequestLog(sink, spool, LogCounts(Value(), Value(), Value()), flush_s=0.01)
    log.start()
    for entry in (request(2), charge(2), vote(2, "up")):
        log.put(entry)
    await log.close()
    assert sink.entries == [request(1), request(2)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["consume"], "request_log.url: the log pipeline needs Kafka"),
        (
            ["consume", "-s", "request_log.url=kafka://h/t"],
            "log_pipeline.clickhouse: the address of ClickHouse is needed",
        ),
        (["backfill"], "request_log.url: the log pipeline needs Kafka"),
        (["migrate", "-s", "log_pipeline.clickhouse=mysql://h/d"], "the address of ClickHouse is needed"),
    ],
)
def test_a_command_says_what_is_missing(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["log-pipeline", *arguments])
    assert result.exit_code != 0 and said in f"{result.output}{result.exception}"


def test_metrics_and_health_of_the_consumer() -> None:
    metrics, problem, port = PipelineMetrics(), ["ClickHouse is not available"], free_port()
    metrics.counted("requests", "inserted", 3)
    metrics.lag("request_log", 2, 17)
    server = MetricsServer(metrics, "127.0.0.1", port, lambda: problem[0])
    try:
        text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
        assert 'penstock_log_pipeline_entries_total{stream="requests",outcome="inserted"} 3' in text
        assert 'penstock_log_pipeline_lag{topic="request_log",partition="2"} 17' in text
        page = (ROOT / "docs/request-log.md").read_text()
        assert not [name for name in metrics.registry.names() if name not in page]
        assert httpx.get(f"http://127.0.0.1:{port}/health/ready").status_code == 503
        problem[0] = ""
        assert {httpx.get(f"http://127.0.0.1:{port}/health/{kind}").status_code for kind in ("ready", "live")} == {200}
        with pytest.raises(ConfigError, match="cannot listen"):
            MetricsServer(metrics, "127.0.0.1", port, lambda: "")
    finally:
        server.close()
