"""The request log on real sinks: nothing waits for it, nothing is lost that fits on the disk, order is kept."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.metering.clickhouse.schema import Retention
from penstock.metering.log_entries import FIELDS, Entry
from penstock.metering.request_log import LogCounts, RequestLog, Sink, SinkError, entry_of
from penstock.metering.request_sinks import ClickHouseSink, KafkaSink, open_sink
from penstock.metering.request_store import ROWS_TOGETHER, RequestStore
from penstock.metering.spool import Spool
from penstock.storage import Database, Statement, open_database
from penstock.telemetry.exposition import Value
from penstock.telemetry.logging import RequestRecord


def record(number: int, **more: Any) -> RequestRecord:
    given = {"tenant": "acme", "user_id": "ann", "finish_reason": "stop", **more}
    return RequestRecord(f"req_{number}", "/v1/chat/completions", 1_700_000_000.0 + number, **given)


class Memory(Sink):
    """A sink that can be away, or slow, on demand."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.batches: list[int] = []
        self.away = False
        self.gate = asyncio.Event()
        self.gate.set()

    async def write(self, entries: Sequence[Entry]) -> None:
        await self.gate.wait()
        if self.away:
            raise SinkError("away")
        self.batches.append(len(entries))
        self.ids += [entry.request_id for entry in entries]

    async def close(self) -> None:
        return


@asynccontextmanager
async def logging_to(
    sink: Sink, folder: Path, limit: int = 10**7, spool: type[Spool] = Spool, **more: Any
) -> AsyncIterator[tuple[RequestLog, LogCounts]]:
    counts = LogCounts(Value(), Value(), Value())
    log = RequestLog(sink, spool(folder, limit), counts, **{"flush_s": 0.01, "retry_s": 0.01, **more})
    log.start()
    try:
        yield log, counts
    finally:
        await log.close(within=60.0)


def segments(folder: Path) -> list[Path]:
    return list(folder.rglob("*.jsonl"))


async def until(condition: Callable[[], bool], within: float = 60.0) -> None:
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, "did not become true in time"
        await asyncio.sleep(0.005)


async def test_records_are_written_in_batches_and_in_order(tmp_path: Path) -> None:
    sink = Memory()
    async with logging_to(sink, tmp_path, batch=100, flush_s=5.0) as (log, counts):
        for number in range(250):
            log.add(record(number))
        await until(lambda: counts.written.value == 200)
    assert sink.ids == [f"req_{number}" for number in range(250)]
    assert sink.batches == [100, 100, 50]
    assert (counts.spooled.value, counts.lost.value) == (0, 0)


async def test_while_the_sink_is_away_records_wait_on_disk_and_are_replayed_in_order(tmp_path: Path) -> None:
    sink = Memory()
    sink.away = True
    async with logging_to(sink, tmp_path, batch=10) as (log, counts):
        for number in range(95):
            log.add(record(number))
            await asyncio.sleep(0)
        await until(lambda: counts.spooled.value == 95)
        sink.away = False
        for number in range(95, 120):
            log.add(record(number))
        await until(lambda: counts.written.value == 120)
    assert sink.ids == [f"req_{number}" for number in range(120)]
    assert counts.lost.value == 0
    assert segments(tmp_path) == []


async def test_a_slow_sink_fills_the_disk_and_never_the_queue(tmp_path: Path) -> None:
    sink = Memory()
    sink.gate.clear()
    async with logging_to(sink, tmp_path, batch=10, capacity=100) as (log, counts):
        for number in range(1000):
            log.add(record(number))
            await until(lambda: number - counts.spooled.value < 80)  # noqa: B023
        assert counts.lost.value == 0
        assert counts.spooled.value >= 800
        sink.gate.set()
        await until(lambda: counts.written.value == 1000)
    assert sink.ids == [f"req_{number}" for number in range(1000)]


async def test_what_fits_nowhere_is_counted(tmp_path: Path) -> None:
    sink = Memory()
    sink.away = True
    async with logging_to(sink, tmp_path, limit=2000, batch=10) as (log, counts):
        for number in range(100):
            log.add(record(number))
        await until(lambda: counts.spooled.value + counts.lost.value == 100)
        kept = int(counts.spooled.value)
        assert 0 < kept < 100
        sink.away = False
        await until(lambda: counts.written.value == kept)
    assert sink.ids == [f"req_{number}" for number in range(kept)]


async def test_the_next_start_delivers_what_the_last_one_could_not(tmp_path: Path) -> None:
    sink = Memory()
    sink.away = True
    async with logging_to(sink, tmp_path, flush_s=60.0) as (log, _):
        log.add(record(1))
        log.add(record(2))
    [segment] = segments(tmp_path)
    segment.write_bytes(segment.read_bytes() + b'{"request_id": "half a li')
    other = Spool(tmp_path, 1000)  # another process beside it has its own slot
    sink.away = False
    async with logging_to(sink, tmp_path) as (_, counts):
        await asyncio.sleep(0.1)
        assert sink.ids == []  # the slot is taken by `other`
    other.close()
    async with logging_to(sink, tmp_path) as (_, counts):
        await until(lambda: counts.written.value == 2)
    assert sink.ids == ["req_1", "req_2"]
    assert counts.lost.value == 1


class SlowDisk(Spool):
    """So slow that the log is closed while it writes."""

    def put_back(self, lines: Sequence[bytes]) -> int:
        time.sleep(0.3)
        return super().put_back(lines)


async def test_what_is_on_its_way_to_the_disk_at_the_end_is_kept_once(tmp_path: Path) -> None:
    sink = Memory()
    sink.away = True
    async with logging_to(sink, tmp_path, spool=SlowDisk, flush_s=60.0) as (log, counts):
        log.add(record(1))
        log.add(record(2))
    [segment] = segments(tmp_path)
    assert [json.loads(line)["request_id"] for line in segment.read_text().splitlines()] == ["req_1", "req_2"]
    assert (counts.spooled.value, counts.lost.value) == (2, 0)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'log.db'}" if request.param == "sqlite" else request.getfixturevalue("postgres_url")


async def test_a_database_holds_exactly_the_fields_once_and_forgets(url: str, tmp_path: Path) -> None:
    database = await open_database(url)
    await database.execute("DROP TABLE IF EXISTS request_log")
    await database.create("CREATE TABLE IF NOT EXISTS schema_versions (component TEXT PRIMARY KEY, version INTEGER)")
    await database.execute("DELETE FROM schema_versions WHERE component = 'request_log'")
    sink = open_sink(url, retention=Retention())
    assert isinstance(sink, RequestStore)
    one = record(1, adapter_id="legal", model_version="m", prompt_tokens=7, ttft_ms=1.5, user_id="nul\0l" + "x" * 999)
    async with logging_to(sink, tmp_path / "spool") as (log, counts):
        for item in (one, record(2, finish_reason="error", tenant=None), one):
            log.add(item)
        await until(lambda: counts.written.value == 3)
        entries = await sink.read()
        assert [entry.request_id for entry in entries] == ["req_2", "req_1"]
        assert [entry.request_id for entry in await sink.read(finish_reason="error")] == ["req_2"]
        assert [entry.request_id for entry in await sink.read(tenant="acme")] == ["req_1"]
        assert [entry.request_id for entry in await sink.read(since=1_700_000_001.5, limit=5)] == ["req_2"]
        first = entries[1]
        assert (first.adapter_id, first.prompt_tokens, first.ttft_ms) == ("legal", 7, 1.5)
        assert first.user_id is not None and first.user_id.startswith("null") and len(first.user_id) == 256
    forgetting = RequestStore(lambda: open_database(url), retention_s=10.0, clock=lambda: 1_700_000_011.5)
    await forgetting.write([entries[0]])
    assert [entry.request_id for entry in await forgetting.read()] == ["req_2"]
    await forgetting.close()
    await database.close()


async def test_much_that_is_too_old_goes_a_little_at_a_time(tmp_path: Path) -> None:
    """Charges wait for the same thread: an hour's worth of old rows in one statement took as long as a minute."""
    database = await open_database(f"sqlite:///{tmp_path / 'old.db'}")
    removed: list[int] = []
    transact = database.transact

    async def counting(statements: Sequence[Statement], **options: Any) -> list[int]:
        counts = await transact(statements, **options)
        removed.extend(count for (sql, _), count in zip(statements, counts, strict=False) if sql.startswith("DELETE"))
        return counts

    database.transact = counting  # type: ignore[method-assign]

    async def opened() -> Database:
        return database

    store = RequestStore(opened, owned=False)
    await store.write([entry_of(record(number)) for number in range(3000)])
    store = RequestStore(opened, owned=False, retention_s=10.0, clock=lambda: 1_700_003_011.5)
    for number in range(3002, 3007):
        await store.write([entry_of(record(number))])
    assert sum(removed) == 3000 and max(removed) <= ROWS_TOGETHER
    assert len(await store.read()) == 5
    await database.close()


async def test_a_database_that_is_away_at_the_start_is_no_reason_to_lose_records(tmp_path: Path) -> None:
    (tmp_path / "place").write_text("a file where the folder of the database should be")
    sink = open_sink(f"sqlite:///{tmp_path / 'place' / 'log.db'}", retention=Retention())
    assert isinstance(sink, RequestStore)
    async with logging_to(sink, tmp_path / "spool") as (log, counts):
        log.add(record(1))
        await until(lambda: counts.spooled.value == 1)
        (tmp_path / "place").unlink()
        await until(lambda: counts.written.value == 1)
        assert len(await sink.read()) == 1


async def test_kafka_gets_one_json_object_per_request(tmp_path: Path) -> None:
    kafka = pytest.importorskip("confluent_kafka", reason="pip install confluent-kafka to test the request log")
    admin = kafka.Producer({"bootstrap.servers": "", "test.mock.num.brokers": 1})
    [broker] = admin.list_topics(timeout=10).brokers.values()
    topic = f"requests-{uuid.uuid4().hex[:8]}"
    sink = KafkaSink(f"kafka://{broker.host}:{broker.port}/{topic}")
    async with logging_to(sink, tmp_path) as (log, counts):
        for number in range(20):
            log.add(record(number))
        await until(lambda: counts.written.value == 20)
    consumer = kafka.Consumer(
        {"bootstrap.servers": f"{broker.host}:{broker.port}", "group.id": "test", "auto.offset.reset": "earliest"}
    )
    partitions = consumer.list_topics(topic, timeout=10).topics[topic].partitions
    consumer.assign([kafka.TopicPartition(topic, number, 0) for number in partitions])
    values = []
    deadline = time.monotonic() + 60
    while len(values) < 20 and time.monotonic() < deadline:
        values += [json.loads(message.value()) for message in consumer.consume(20, 0.5) if message.error() is None]
    consumer.close()
    assert sorted(value["request_id"] for value in values) == sorted(f"req_{number}" for number in range(20))
    assert {tuple(value) for value in values} == {FIELDS}


async def test_kafka_that_is_away_means_the_disk(tmp_path: Path) -> None:
    pytest.importorskip("confluent_kafka", reason="pip install confluent-kafka to test the request log")
    sink = KafkaSink("kafka://127.0.0.1:9/requests?message.timeout.ms=300")
    async with logging_to(sink, tmp_path) as (log, counts):
        log.add(record(1))
        await until(lambda: counts.spooled.value == 1)
    assert counts.written.value == 0


async def test_clickhouse_that_is_away_is_a_sink_error() -> None:
    pytest.importorskip("clickhouse_connect", reason="pip install clickhouse-connect to test the request log")
    sink = ClickHouseSink("clickhouse://127.0.0.1:9/default", retention=Retention())
    with pytest.raises(SinkError, match="ClickHouse"):
        await sink.write([])


def test_a_url_that_names_no_sink_is_refused_without_its_password() -> None:
    with pytest.raises(ConfigError, match="not a sink") as refused:
        open_sink("mysql://me:secret@host/db", retention=Retention())
    assert "secret" not in str(refused.value)
