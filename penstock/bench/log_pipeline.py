"""`penstock bench log-pipeline`: how fast the consumer brings entries from Kafka to ClickHouse, each exactly once.

All entries are in Kafka before the consumer starts, so it is never short of work. The time runs from its first message
to its last commit. On a busy machine look at the processor time, which is that of this process: with the defaults, of
the consumer, the broker in memory and the embedded engine. What it does not show: a network, a broker with disks, and
merges of a table that is already large.
"""

from __future__ import annotations

import dataclasses
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from penstock.bench import report
from penstock.config.log_pipeline import LogPipelineConfig
from penstock.errors import PenstockError
from penstock.metering.clickhouse.client import ClickHouse
from penstock.metering.clickhouse.schema import COST_BY_DAY, OUTCOMES, Retention
from penstock.metering.kafka import Quiet, kafka_driver
from penstock.metering.log_entries import CHARGES, REQUESTS, ChargeEntry, Entry, LogEntry
from penstock.metering.log_pipeline.consumer import Consumer
from penstock.metering.log_pipeline.metrics import PipelineMetrics
from penstock.metering.request_sinks import KafkaSink

TOPIC = "bench"
TOGETHER = 2_000
ROUTE = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class LogPipelineBenchSettings:
    requests: int = 100_000
    copies: float = 0.01
    batch: int = 10_000
    kafka: str = ""
    clickhouse: str = ""


def entries_of(requests: int, copies: float) -> Iterator[Entry]:
    """Records and charges of some tenants and models over the last hours, and copies of some."""
    chance = random.Random(7)
    start = time.time() - 3600
    for number in range(requests):
        id, at = f"req_{chance.getrandbits(128):032x}", start + number * 3600 / requests
        tenant, model = f"tenant-{number % 50}", f"model-{number % 4}"
        tokens = chance.randrange(50, 4000), chance.randrange(0, 50), chance.randrange(1, 800)
        record = LogEntry(
            id, f"user-{number % 1000}", tenant, model, None, *tokens, chance.uniform(20, 900),
            chance.uniform(900, 20_000), "stop" if number % 20 else "error", ROUTE, at,
        )  # fmt: skip
        charge = ChargeEntry(
            f"{chance.getrandbits(128):032x}", id, tenant, f"user-{number % 1000}", "search", model, "", "standard",
            *tokens, tokens[0] * 150 + tokens[2] * 600, "stop", "end", at,
        )  # fmt: skip
        yield record
        yield charge
        if chance.random() < copies:
            yield record
            yield charge


class TimedConsumer(Consumer):
    """Notes when the first message came and when the last batch was committed."""

    first: tuple[float, float] | None = None
    last = (0.0, 0.0)
    """By the clock, and by the processor time of this process."""

    def _take(self, message: Any) -> bool:
        self.first = self.first or _moment()
        return super()._take(message)

    def _flush(self, keys: Sequence[tuple[str, int]]) -> None:
        super()._flush(keys)
        if keys:
            self.last = _moment()


def _moment() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def measure(settings: LogPipelineBenchSettings) -> dict[str, Any]:
    with _broker(settings.kafka) as kafka_url, _clickhouse(settings.clickhouse) as clickhouse:
        sink, sent = KafkaSink(f"{kafka_url}{'&' if '?' in kafka_url else '?'}compression.type=zstd"), 0
        began, waiting = time.perf_counter(), list[Entry]()
        for entry in entries_of(settings.requests, settings.copies):
            waiting.append(entry)
            if len(waiting) == TOGETHER:
                sink.send(waiting)
                sent, waiting = sent + len(waiting), []
        sink.send(waiting)
        sent, produced_s = sent + len(waiting), time.perf_counter() - began
        clickhouse.migrate(Retention(), lambda line: None)
        metrics, wanted = PipelineMetrics(), LogPipelineConfig(group="bench", batch=settings.batch)
        consumer = TimedConsumer(kafka_url, clickhouse, Retention(), wanted, metrics)
        consumer.run(until_idle=True)
        assert consumer.first is not None
        consumed_s, cpu_s = (last - first for first, last in zip(consumer.first, consumer.last, strict=True))
        cost = sum(entry.cost_nanos for entry in entries_of(settings.requests, 0.0) if isinstance(entry, ChargeEntry))
        return {
            "messages": sent,
            "produced_s": produced_s,
            "consumed_s": consumed_s,
            "consumer_cpu_s": cpu_s,
            "inserted": settings.requests * 2,
            "per_second": sent / consumed_s,
            "exact": _exact(clickhouse, settings, cost),
        }


def _exact(clickhouse: ClickHouse, settings: LogPipelineBenchSettings, cost: int) -> bool:
    """Whether tables and summaries have every entry once."""
    counts = [clickhouse.query(f"SELECT count() FROM {stream.table}")[0][0] for stream in (REQUESTS, CHARGES)]
    [(requests,)] = clickhouse.query(f"SELECT sum(requests) FROM {OUTCOMES}")
    [(charges, charged)] = clickhouse.query(f"SELECT sum(requests), sum(cost_nanos) FROM {COST_BY_DAY}")
    return [*counts, requests, charges] == [settings.requests] * 4 and charged == cost


@contextmanager
def _broker(url: str) -> Iterator[str]:
    if url:
        yield url
        return
    kafka = kafka_driver("--kafka")
    producer = kafka.Producer({"bootstrap.servers": "", "test.mock.num.brokers": 1}, logger=Quiet())
    [found] = producer.list_topics(timeout=30).brokers.values()
    yield f"kafka://{found.host}:{found.port}/{TOPIC}"
    producer.flush(1)


@contextmanager
def _clickhouse(url: str) -> Iterator[ClickHouse]:
    with tempfile.TemporaryDirectory(prefix="penstock-clickhouse-") as folder:
        clickhouse = ClickHouse(url or f"chdb://{folder}", timeout_s=60, key="--clickhouse")
        try:
            there = "SELECT 1 FROM system.tables WHERE name = 'request_log' AND database = currentDatabase()"
            if clickhouse.query(there):
                raise PenstockError("--clickhouse: an empty database is needed; this one has a request log")
            yield clickhouse
        finally:
            clickhouse.close()


def main(settings: LogPipelineBenchSettings, json_file: Path | None, console: Console) -> None:
    results = measure(settings)
    console.print(report.machine_line(), highlight=False)
    table = report.table("Log pipeline: Kafka to ClickHouse", "", "entries", "seconds", "entries per second")
    for name, seconds in (("produced", results["produced_s"]), ("consumed", results["consumed_s"])):
        rate = results["messages"] / seconds
        table.add_row(name, f"{results['messages']:,}", report.number(seconds, 2), report.number(rate, 0))
    cpu_s = results["consumer_cpu_s"]
    table.add_row("per second of CPU", "", report.number(cpu_s, 2), report.number(results["messages"] / cpu_s, 0))
    console.print(table)
    told = "every entry once, in the tables and in the summaries" if results["exact"] else "NOT every entry once"
    console.print(f"{settings.copies:.0%} of the entries were produced twice; {told}")
    if json_file is not None:
        report.write_json(json_file, "log-pipeline", dataclasses.asdict(settings), results)
    if not results["exact"]:
        raise PenstockError("the tables do not have every entry once")
