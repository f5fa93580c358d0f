"""R-GW-6: from Kafka to ClickHouse exactly once, in the tables and in every summary, whatever dies when.

A real broker (librdkafka's mock cluster), a real ClickHouse engine behind HTTP.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from penstock.cli.app import app
from penstock.config.log_pipeline import LogPipelineConfig
from penstock.metering.clickhouse.client import ClickHouse
from penstock.metering.clickhouse.kafka_engine import VIRTUAL
from penstock.metering.clickhouse.schema import COST_BY_DAY, COST_BY_HOUR, LATENCY, OUTCOMES, Retention, migrations
from penstock.metering.log_entries import CHARGES, REQUESTS, Entry, Stream, encode, stream_of
from penstock.metering.log_pipeline.batch import Batch, Message
from penstock.metering.log_pipeline.consumer import Consumer
from penstock.metering.log_pipeline.metrics import PipelineMetrics
from penstock.metering.request_sinks import ClickHouseSink, KafkaSink
from tests.log_pipeline.broker import Broker
from tests.log_pipeline.clickhouse_server import ClickHouseServer
from tests.log_pipeline.conftest import both, charge, cleared, expected, grade, request, sums, vote

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
RETENTION = Retention.days(3650, 3650)
numbers = itertools.count()


class Crash(BaseException):
    """The process is gone: nothing is committed any more."""


class Fragile(ClickHouse):
    """Dies at a chosen moment of the `dies_at`th insert."""

    def __init__(self, server: ClickHouseServer, moment: str = "", dies_at: int = 1) -> None:
        super().__init__(server.url, timeout_s=60)
        self._moment, self._left = moment, dies_at

    def insert(self, stream: Stream, entries: Sequence[Entry], token: str) -> None:
        self._left -= 1
        if self._left == 0 and self._moment == "before":
            raise Crash
        if self._left == 0 and self._moment == "halfway":  # the table has the rows, these summaries do not
            views = [f"{name}_mv" for name in (COST_BY_HOUR, OUTCOMES, LATENCY)]
            for view in views:
                self._command(f"DROP TABLE {view} SYNC")
            super().insert(stream, entries, token)
            for statement in migrations()[0].statements:
                if any(f"EXISTS {view} " in statement for view in views):
                    self._command(statement)
            raise Crash
        super().insert(stream, entries, token)
        if self._left == 0 and self._moment == "after":
            raise Crash


def consume(kafka: Broker, topic: str, clickhouse: ClickHouse, metrics: PipelineMetrics | None = None) -> None:
    settings = LogPipelineConfig(group="test", batch=200, flush_s=0.2)
    Consumer(kafka.url(topic), clickhouse, RETENTION, settings, metrics or PipelineMetrics()).run(until_idle=True)


def counted(metrics: PipelineMetrics, stream: str, outcome: str) -> float:
    return metrics._entries.child(stream, outcome).value


@pytest.mark.parametrize("moment", ["before", "halfway", "after"])
def test_a_consumer_that_dies_leaves_a_batch_that_the_next_one_completes(
    kafka: Broker, server: ClickHouseServer, moment: str
) -> None:
    topic, clickhouse = f"log{next(numbers)}", cleared(server)
    sink = KafkaSink(kafka.url(topic))
    sink.send(both(0, 500))
    for dies_at in (1, 3):
        with pytest.raises(Crash):
            consume(kafka, topic, Fragile(server, moment, dies_at))
        sink.send(both(500, 900))  # a batch put together anew would end elsewhere
    sink.send(both(0, 50))
    metrics = PipelineMetrics()
    consume(kafka, topic, ClickHouse(server.url, timeout_s=60), metrics)
    assert sums(clickhouse) == expected(900, sum(1000 + number for number in range(900)))
    assert metrics._repeated.value > 0
    consume(kafka, topic, ClickHouse(server.url, timeout_s=60))
    assert sums(clickhouse)["requests"] == 900


def test_copies_are_skipped_and_what_cannot_be_read_is_kept_with_the_reason(
    kafka: Broker, server: ClickHouseServer
) -> None:
    topic, clickhouse, metrics = f"log{next(numbers)}", cleared(server), PipelineMetrics()
    sink = KafkaSink(kafka.url(topic))
    call = request(1, route="tool:search", timestamp=request(1).timestamp + 0.5)  # under the id of its request
    sink.send([*both(0, 100), *both(0, 100), call])
    sink.send([vote(1, "up"), vote(2, "down"), vote(1, "down", vote(1, "up").timestamp + 60), grade(1), grade(2, 0.5)])
    for value in (b"{", b"\xff\xfe", b'{"request_id": "x"}', None):
        sink._producer.produce(topic, value, key="bad")
    huge = request(7, request_id="huge", prompt_tokens=2**33)
    sink.send([huge])
    consume(kafka, topic, ClickHouse(server.url, timeout_s=60), metrics)
    assert sums(clickhouse) == expected(101, sum(1000 + number for number in range(100)), charges=100)
    letters = clickhouse.query("SELECT reason, value FROM request_log_dead_letters FINAL ORDER BY offset")
    assert len(letters) == 5
    assert {"`int` <= 4294967295" in reason for reason, value in letters if "huge" in value} == {True}
    assert [counted(metrics, "requests", name) for name in ("inserted", "copy", "dead")] == [101, 100, 5]
    [(up, down)] = clickhouse.query("SELECT sum(up), sum(down) FROM request_log_votes_by_hour")
    assert (up, down) == (0, 2)  # a later vote on the same answer replaces the earlier
    [grades] = clickhouse.query(
        "SELECT sum(answers), sum(relevance), sum(with_sources), sum(groundedness) FROM request_log_grades_by_hour"
    )
    assert grades == (2, 1.5, 1, 0.5)


def test_a_topic_that_is_made_anew_is_not_taken_for_the_old_one(kafka: Broker, server: ClickHouseServer) -> None:
    """Its offsets are the same again; the batches are not."""
    clickhouse = cleared(server)
    clickhouse.migrate(RETENTION)
    one, other = [request(number) for number in range(10)], [request(number) for number in range(10, 20)]
    for entries in (one, other, other):
        messages = [Message(offset, encode(entry)) for offset, entry in enumerate(entries)]
        batch = Batch(REQUESTS, "log", 0, 0, messages)
        batch.read()
        plan = batch.plan(set())
        clickhouse.insert(REQUESTS, batch.inserted(plan), batch.token(plan))
    assert sums(clickhouse)["requests"] == sums(clickhouse)["outcomes"] == 20


def test_migrations_run_twice_and_retention_follows_the_configuration(server: ClickHouseServer) -> None:
    clickhouse = cleared(server)
    # What an earlier version made, with rows in it.
    clickhouse._command(
        "CREATE TABLE request_log (request_id String, user_id Nullable(String), tenant LowCardinality(String), "
        "model_version LowCardinality(Nullable(String)), adapter_id LowCardinality(Nullable(String)), prompt_tokens "
        "UInt32, cached_tokens UInt32, completion_tokens UInt32, ttft_ms Nullable(Float64), total_latency_ms Float64, "
        "finish_reason LowCardinality(Nullable(String)), route LowCardinality(String), timestamp DateTime64(6, 'UTC')) "
        "ENGINE = MergeTree ORDER BY (tenant, timestamp) PARTITION BY toYYYYMM(timestamp) "
        "SETTINGS non_replicated_deduplication_window = 1000"
    )
    clickhouse.insert(REQUESTS, [request(1)], "before")
    said: list[str] = []
    assert clickhouse.migrate(Retention.days(300, 400), said.append) == [1, 2] and len(said) == 12
    said.clear()
    assert clickhouse.migrate(Retention.days(300, 400), said.append) == [] and said == []
    clickhouse.migrate(Retention.days(200, None), said.append)
    assert "request_log: keeps rows until toDateTime(timestamp) + toIntervalSecond(17280000)" in said
    assert "request_log_cost_by_day: keeps rows for ever" in said
    clickhouse.insert(REQUESTS, [request(2)], "after")
    assert sums(clickhouse)["requests"] == 1 + sums(clickhouse)["outcomes"] == 2
    clickhouse.insert(CHARGES, [charge(1), msgspec.structs.replace(charge(2), reasoning_tokens=3)], "charges")
    for table in (CHARGES.table, COST_BY_HOUR, COST_BY_DAY):
        [(count, thought)] = clickhouse.query(f"SELECT sum(completion_tokens), sum(reasoning_tokens) FROM {table}")
        assert (count, thought) == (10, 3), table
    clickhouse._command("INSERT INTO penstock_migrations (version, about) VALUES (99, 'of a later version')")
    with pytest.raises(Exception, match="upgrade Penstock"):
        clickhouse.migrate(Retention())


async def test_a_gateway_may_write_to_clickhouse_directly(server: ClickHouseServer) -> None:
    clickhouse = cleared(server)
    sink = ClickHouseSink(server.url, retention=RETENTION)
    entries: list[Any] = [*both(0, 40), vote(1, "up"), grade(1)]
    await sink.write(entries)
    await sink.write(entries)  # the acknowledgement got lost
    assert sums(clickhouse) == expected(40, sum(1000 + number for number in range(40)))
    [row] = clickhouse.query(f"SELECT {', '.join(REQUESTS.fields)} FROM request_log WHERE request_id = 'req_7'")
    assert row[:12] == tuple(getattr(request(7), name) for name in REQUESTS.fields[:12])
    await sink.close()


def test_the_written_sql_may_run_twice_and_with_the_kafka_engine(server: ClickHouseServer) -> None:
    """The embedded engine does not start Kafka tables: their statements are parsed, and their views fed from tables."""
    clickhouse = cleared(server)
    arguments = ["deploy", "clickhouse", "--kafka-engine", "-s", "request_log.url=kafka://b1:9092,b2:9092/log"]
    arguments += ["-s", "request_log.retention_days=3650"]
    written = CliRunner().invoke(app, arguments).output
    wanted = [statement.strip() for statement in written.split(";\n") if statement.strip()]
    queues = [statement for statement in wanted if "ENGINE = Kafka" in statement]
    assert len(queues) == 4 and "kafka_topic_list = 'log.charges'" in written
    for _ in range(2):
        for statement in wanted:
            if statement in queues:
                assert clickhouse.query(f"EXPLAIN AST {statement}")
                columns = statement.partition("\nENGINE")[0].removesuffix(")")
                statement = f"{columns}, {VIRTUAL}) ENGINE = Memory"
            clickhouse._command(statement)
    for entry in (request(1), charge(1), vote(1, "up"), grade(1)):
        table = f"{stream_of(entry).table}_queue"
        clickhouse._command(f"INSERT INTO {table} FORMAT JSONEachRow {encode(entry).decode()}")
    clickhouse._command(
        "INSERT INTO request_log_queue (_topic, _partition, _offset, _error, _raw_message) "
        "VALUES ('log', 0, 7, 'not JSON', '{')"
    )
    assert sums(clickhouse) == expected(1, 1001)
    [row] = clickhouse.query(f"SELECT {', '.join(REQUESTS.fields)} FROM request_log")
    assert row[:12] == tuple(getattr(request(1), name) for name in REQUESTS.fields[:12])
    [(micros,)] = clickhouse.query("SELECT toUnixTimestamp64Micro(timestamp) FROM request_log")
    assert micros == round(request(1).timestamp * 1e6)
    assert clickhouse.query("SELECT topic, offset, reason FROM request_log_dead_letters") == [("log", 7, "not JSON")]
