"""Request log sinks by URL: a SQLite or PostgreSQL table, a Kafka topic, a ClickHouse table. Drivers are extras.

The Kafka and ClickHouse drivers block, so they run on a thread; each call has a time limit.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from penstock.errors import ConfigError, needs_extra
from penstock.metering.request_log import FIELDS, LogEntry, Sink, SinkError, encode
from penstock.metering.request_store import RequestStore
from penstock.storage import open_database
from penstock.storage.database import redacted

TIMEOUT_S = 10.0
DEFAULT_NAME = "request_log"


def open_sink(url: str, *, retention_s: float | None) -> Sink:
    """Creates a sink without connecting; ConfigError for an invalid URL or a missing driver."""
    scheme = urlsplit(url).scheme
    if scheme in ("sqlite", "postgresql", "postgres"):
        return RequestStore(lambda: open_database(url), retention_s=retention_s)
    if scheme == "kafka":
        return KafkaSink(url)
    if scheme in ("clickhouse", "clickhouses"):
        return ClickHouseSink(url, retention_s=retention_s)
    raise ConfigError(
        f"request_log.url: {redacted(url)} is not a sink; use sqlite:///PATH, postgresql://..., "
        "kafka://HOST:PORT/TOPIC or clickhouse://USER:PASSWORD@HOST:PORT/DATABASE"
    )


def _driver(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"request_log.url {needs_extra(extra)}") from error


class KafkaSink(Sink):
    """One JSON object per request, keyed by tenant. `kafka://HOST:PORT[,HOST:PORT]/TOPIC?option=value`: options are
    those of librdkafka. A batch counts as stored when every message was acknowledged by all replicas in sync."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._topic = parts.path.strip("/") or DEFAULT_NAME
        self._kafka = _driver("confluent_kafka", "kafka")
        options = {
            "bootstrap.servers": parts.netloc,
            "enable.idempotence": True,
            "linger.ms": 5,
            "message.timeout.ms": int(TIMEOUT_S * 1000),
            **dict(parse_qsl(parts.query)),
        }
        try:
            self._producer = self._kafka.Producer(options, logger=_Quiet())
        except self._kafka.KafkaException as error:
            raise ConfigError(f"request_log.url: {error.args[0].str()}") from error

    async def write(self, entries: Sequence[LogEntry]) -> None:
        await asyncio.to_thread(self._write, entries)

    async def close(self) -> None:
        await asyncio.to_thread(self._producer.flush, 1.0)

    def _write(self, entries: Sequence[LogEntry]) -> None:
        problems: list[str] = []

        def delivered(error: Any, message: Any) -> None:
            if error is not None:
                problems.append(error.str())

        try:
            for entry in entries:
                self._producer.produce(self._topic, encode(entry), key=entry.tenant or "", on_delivery=delivered)
        except (BufferError, self._kafka.KafkaException) as error:
            self._producer.flush(TIMEOUT_S)
            raise SinkError(f"Kafka: {error}") from error
        left = self._producer.flush(TIMEOUT_S + 1)
        if problems or left:
            raise SinkError(f"Kafka: {problems[0] if problems else 'not acknowledged in time'}")


class _Quiet:
    """Silences librdkafka, which logs every attempt to connect; the request log reports an unavailable sink once."""

    def log(self, *args: Any) -> None:
        return


_TYPES = {
    "request_id": "String",
    "user_id": "Nullable(String)",
    "tenant": "LowCardinality(String)",
    "model_version": "LowCardinality(Nullable(String))",
    "adapter_id": "LowCardinality(Nullable(String))",
    "prompt_tokens": "UInt32",
    "cached_tokens": "UInt32",
    "completion_tokens": "UInt32",
    "ttft_ms": "Nullable(Float64)",
    "total_latency_ms": "Float64",
    "finish_reason": "LowCardinality(Nullable(String))",
    "route": "LowCardinality(String)",
    "timestamp": "DateTime64(6, 'UTC')",
}


def clickhouse_schema(retention_s: float | None) -> str:
    """The table. A block that is inserted twice, after a lost acknowledgement, is deduplicated."""
    columns = ", ".join(f"{name} {_TYPES[name]}" for name in FIELDS)
    ttl = "" if retention_s is None else f" TTL toDateTime(timestamp) + INTERVAL {int(retention_s)} SECOND"
    return (
        f"CREATE TABLE IF NOT EXISTS {DEFAULT_NAME} ({columns}) ENGINE = MergeTree ORDER BY (tenant, timestamp)"
        f" PARTITION BY toYYYYMM(timestamp){ttl} SETTINGS non_replicated_deduplication_window = 1000"
    )


class ClickHouseSink(Sink):
    """The table `request_log` of the database in the URL, created if missing. `clickhouses://` uses TLS."""

    def __init__(self, url: str, *, retention_s: float | None, client: Any = None) -> None:
        parts = urlsplit(url)
        self._retention_s = retention_s
        self._module = _driver("clickhouse_connect", "clickhouse")
        self._options = {
            "host": parts.hostname or "localhost",
            "port": parts.port,
            "username": parts.username,
            "password": parts.password or "",
            "database": parts.path.strip("/") or "default",
            "secure": parts.scheme == "clickhouses",
        }
        self._client: Any = client
        self._prepared = False

    async def write(self, entries: Sequence[LogEntry]) -> None:
        try:
            await asyncio.to_thread(self._write, entries)
        except (self._module.driver.exceptions.Error, OSError) as error:
            raise SinkError(f"ClickHouse: {error}") from error

    async def close(self) -> None:
        if self._client is not None:
            await asyncio.to_thread(self._client.close)

    def _write(self, entries: Sequence[LogEntry]) -> None:
        if self._client is None:
            self._client = self._module.get_client(
                **self._options, connect_timeout=TIMEOUT_S, send_receive_timeout=TIMEOUT_S
            )
        if not self._prepared:
            self._client.command(clickhouse_schema(self._retention_s))
            self._prepared = True
        self._client.insert(DEFAULT_NAME, [_row(entry) for entry in entries], column_names=list(FIELDS))


def _row(entry: LogEntry) -> list[Any]:
    values = {name: getattr(entry, name) for name in FIELDS}
    values["tenant"] = entry.tenant or ""
    # The driver accepts integer microseconds as they are; it would truncate a float to seconds.
    values["timestamp"] = round(entry.timestamp * 1e6)
    return list(values.values())
