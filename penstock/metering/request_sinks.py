"""Request log sinks by URL: a SQLite or PostgreSQL table, a Kafka topic, a ClickHouse table. Drivers are extras.

The Kafka and ClickHouse drivers block, so they run on a thread; each call has a time limit.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from penstock.errors import ConfigError
from penstock.metering.clickhouse.client import SCHEMES, ClickHouse, ClickHouseError
from penstock.metering.clickhouse.schema import Retention
from penstock.metering.kafka import KafkaAddress, Quiet, kafka_driver
from penstock.metering.log_entries import STREAMS, Entry, by_stream, encode, stream_of
from penstock.metering.request_log import Sink, SinkError
from penstock.metering.request_store import RequestStore
from penstock.storage import open_database
from penstock.storage.database import redacted

TIMEOUT_S = 10.0
EVERYTHING = frozenset(stream.name for stream in STREAMS)


def open_sink(url: str, *, retention: Retention) -> Sink:
    """Creates a sink without connecting; ConfigError for an invalid URL or a missing driver."""
    scheme = urlsplit(url).scheme
    if scheme in ("sqlite", "postgresql", "postgres"):
        return RequestStore(lambda: open_database(url), retention_s=retention.raw_s)
    if scheme == "kafka":
        return KafkaSink(url)
    if scheme in SCHEMES:
        return ClickHouseSink(url, retention=retention)
    raise ConfigError(
        f"request_log.url: {redacted(url)} is not a sink; use sqlite:///PATH, postgresql://..., "
        "kafka://HOST:PORT/TOPIC or clickhouse://USER:PASSWORD@HOST:PORT/DATABASE"
    )


class KafkaSink(Sink):
    """One JSON object per entry, keyed by its id, so that copies of an entry are in the same partition. A batch counts
    as stored when every message was acknowledged by all replicas in sync."""

    streams = EVERYTHING

    def __init__(self, url: str) -> None:
        address = KafkaAddress.of(url)
        self._topic = address.topic
        self._kafka = kafka_driver("request_log.url")
        self._options = {
            "bootstrap.servers": address.brokers,
            "enable.idempotence": True,
            "linger.ms": 5,
            "message.timeout.ms": int(TIMEOUT_S * 1000),
            **address.options,
        }
        self._producer = self._open()

    async def write(self, entries: Sequence[Entry]) -> None:
        await asyncio.to_thread(self.send, entries)

    async def close(self) -> None:
        await asyncio.to_thread(self._producer.flush, 1.0)

    def send(self, entries: Sequence[Entry]) -> None:
        """Blocks until all are acknowledged."""
        problems: list[Any] = []

        def delivered(error: Any, message: Any) -> None:
            if error is not None:
                problems.append(error)

        try:
            for entry in entries:
                stream = stream_of(entry)
                self._producer.produce(
                    stream.topic(self._topic), encode(entry), key=getattr(entry, stream.key), on_delivery=delivered
                )
        except BufferError as error:
            problems.append(error)
        except self._kafka.KafkaException as error:
            problems.append(error.args[0])
        left = self._producer.flush(TIMEOUT_S + 1)
        if problems or left:
            if any(getattr(problem, "fatal", bool)() for problem in problems):
                self._producer = self._open()  # an idempotent producer that lost its place works no more
            raise SinkError(f"Kafka: {problems[0] if problems else 'not acknowledged in time'}")

    def _open(self) -> Any:
        try:
            return self._kafka.Producer(self._options, logger=Quiet())
        except self._kafka.KafkaException as error:
            raise ConfigError(f"request_log.url: {error.args[0].str()}") from error


class ClickHouseSink(Sink):
    """The tables of the database in the URL, created if missing. A batch that is written twice is stored once, in the
    tables and in their views."""

    streams = EVERYTHING

    def __init__(self, url: str, *, retention: Retention) -> None:
        self._retention = retention
        self._clickhouse = ClickHouse(url, timeout_s=TIMEOUT_S)
        self._prepared = False

    async def write(self, entries: Sequence[Entry]) -> None:
        try:
            await asyncio.to_thread(self._write, entries)
        except ClickHouseError as error:
            raise SinkError(str(error)) from error

    async def close(self) -> None:
        await asyncio.to_thread(self._clickhouse.close)

    def _write(self, entries: Sequence[Entry]) -> None:
        if not self._prepared:
            self._clickhouse.migrate(self._retention)
            self._prepared = True
        for together in by_stream(entries).values():
            token = hashlib.sha256(b"\n".join(map(encode, together))).hexdigest()
            self._clickhouse.insert(stream_of(together[0]), together, token)
