"""The tables of the request log in ClickHouse and the materialised views over them, as versioned migrations.

Every statement can run twice. Views are incremental: an insert into `request_log` or `request_log_charges` also adds to
the summaries. Each summary keeps a deduplication log like its source, so an insert that is repeated under the same
token (`client.py`) adds nothing to any of them, and adds what is missing where the first attempt broke off halfway.

Raw entries are kept for `request_log.retention_days`, summaries for `request_log.summary_days`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.metering.log_entries import CHARGES, GRADES, REQUESTS, STREAMS, TABLE, VOTES, Stream

MIGRATIONS = "penstock_migrations"
DEAD_LETTERS = f"{TABLE}_dead_letters"
COST_BY_HOUR, COST_BY_DAY = f"{TABLE}_cost_by_hour", f"{TABLE}_cost_by_day"
LATENCY = f"{TABLE}_latency_by_5m"
OUTCOMES = f"{TABLE}_outcomes_by_hour"
GRADES_BY_HOUR, VOTES_BY_HOUR = f"{TABLE}_grades_by_hour", f"{TABLE}_votes_by_hour"

DAY_S = 86_400.0
WINDOW = 10_000
"""Inserts that a table remembers to recognise a repeated one."""
QUANTILES = "0.5, 0.9, 0.95, 0.99"
_DIGEST = f"quantilesTDigest({QUANTILES})"

_NAME, _OPTIONAL = "LowCardinality(String)", "LowCardinality(Nullable(String))"
_TYPES = {
    REQUESTS.name: {
        "request_id": "String",
        "user_id": "Nullable(String)",
        "tenant": _NAME,
        "model_version": _OPTIONAL,
        "adapter_id": _OPTIONAL,
        "prompt_tokens": "UInt32",
        "cached_tokens": "UInt32",
        "completion_tokens": "UInt32",
        "ttft_ms": "Nullable(Float64)",
        "total_latency_ms": "Float64",
        "finish_reason": _OPTIONAL,
        "route": _NAME,
        "timestamp": "DateTime64(6, 'UTC')",
    },
    CHARGES.name: {
        "charge_id": "String",
        "request_id": "String",
        "tenant": _NAME,
        "user_id": "String",
        "feature": _NAME,
        "model": _NAME,
        "adapter": _NAME,
        "tier": _NAME,
        "prompt_tokens": "UInt32",
        "cached_tokens": "UInt32",
        "completion_tokens": "UInt32",
        "cost_nanos": "UInt64",
        "finish_reason": _NAME,
        "settled_by": _NAME,
        "timestamp": "DateTime64(6, 'UTC')",
        "reasoning_tokens": "UInt32",
    },
    VOTES.name: {
        "response_id": "String",
        "request_id": "String",
        "tenant": _NAME,
        "user_id": "String",
        "model": _NAME,
        "adapter": _NAME,
        "route": _NAME,
        "via": _NAME,
        "arm": _NAME,
        "rating": _NAME,
        "timestamp": "DateTime64(6, 'UTC')",
    },
    GRADES.name: {
        "grade_id": "String",
        "request_id": "String",
        "tenant": _NAME,
        "model": _NAME,
        "via": _NAME,
        "relevance": "Float64",
        "groundedness": "Nullable(Float64)",
        "timestamp": "DateTime64(6, 'UTC')",
    },
}
"""Columns by stream, in the order of the entry's fields."""
_LATER = {(CHARGES.name, "reasoning_tokens")}
"""Columns that the first version of the tables does not have."""
_COST_KEYS = "tenant, model, adapter, feature, tier"
_COST_SUMS = ("prompt_tokens", "cached_tokens", "completion_tokens", "cost_nanos")
_WITH_THOUGHTS = (*_COST_SUMS, "reasoning_tokens")
_SUM, _FLOAT_SUM = "SimpleAggregateFunction(sum, UInt64)", "SimpleAggregateFunction(sum, Float64)"
_REMEMBERS = f"SETTINGS non_replicated_deduplication_window = {WINDOW}"


@dataclass(frozen=True, slots=True)
class Retention:
    """Seconds; None: for ever."""

    raw_s: float | None = None
    summary_s: float | None = None

    @classmethod
    def days(cls, raw: float | None, summary: float | None) -> Retention:
        return cls(*(None if days is None else days * DAY_S for days in (raw, summary)))

    def of(self, table: str) -> str:
        """The table's TTL, as ClickHouse writes it; empty: none."""
        kind, column = _KEPT[table]
        seconds = self.raw_s if kind == "raw" else self.summary_s
        return "" if seconds is None else f"toDateTime({column}) + toIntervalSecond({int(seconds)})"


@dataclass(frozen=True, slots=True)
class Migration:
    version: int
    about: str
    statements: tuple[str, ...]


_KEPT: dict[str, tuple[Literal["raw", "summary"], str]] = {
    REQUESTS.table: ("raw", "timestamp"),
    CHARGES.table: ("raw", "timestamp"),
    VOTES.table: ("summary", "timestamp"),
    GRADES.table: ("raw", "timestamp"),
    DEAD_LETTERS: ("raw", "time"),
    COST_BY_HOUR: ("summary", "hour"),
    COST_BY_DAY: ("summary", "day"),
    LATENCY: ("summary", "time"),
    OUTCOMES: ("summary", "hour"),
    GRADES_BY_HOUR: ("summary", "hour"),
}
"""How long each table keeps its rows, and by which column."""


def column_types(stream: Stream) -> dict[str, str]:
    return _TYPES[stream.name]


def migrations() -> tuple[Migration, ...]:
    """All versions, oldest first. A released one never changes; a change is a new one."""
    return (
        Migration(1, "entries, dead letters, and summaries of cost, latency and quality", (
            *(_entries(stream) for stream in STREAMS),
            # A table that an earlier Penstock made for a gateway that writes to ClickHouse directly.
            f"ALTER TABLE {REQUESTS.table} MODIFY SETTING non_replicated_deduplication_window = {WINDOW}",
            _dead_letters(),
            *_cost(COST_BY_HOUR, "hour", "toStartOfHour(timestamp)"),
            *_cost(COST_BY_DAY, "day", "toStartOfDay(timestamp)"),
            *_latency(),
            *_outcomes(),
            *_grades(),
            _votes(),
        )),
        Migration(2, "reasoning tokens of charges", (
            f"ALTER TABLE {CHARGES.table} ADD COLUMN IF NOT EXISTS reasoning_tokens UInt32 DEFAULT 0",
            *(
                f"ALTER TABLE {table} ADD COLUMN IF NOT EXISTS reasoning_tokens {_SUM}"
                for table in (COST_BY_HOUR, COST_BY_DAY)
            ),
            f"ALTER TABLE {COST_BY_HOUR}_mv MODIFY QUERY {_costs('hour', 'toStartOfHour(timestamp)', _WITH_THOUGHTS)}",
            f"ALTER TABLE {COST_BY_DAY}_mv MODIFY QUERY {_costs('day', 'toStartOfDay(timestamp)', _WITH_THOUGHTS)}",
        )),
    )  # fmt: skip


def statements(retention: Retention) -> list[str]:
    """Everything, for somebody who applies it by hand; `ClickHouse.migrate` does the same."""
    found = [migrations_table()]
    for migration in migrations():
        found += [*migration.statements, applied(migration)]
    kept = ((table, retention.of(table)) for table in _KEPT)
    return [*found, *(set_retention(table, ttl) for table, ttl in kept if ttl)]


def script(wanted: Sequence[str]) -> str:
    """Statements as a file, a clause per line."""
    parts = (
        re.sub(r" (?=(?:ENGINE|AS SELECT|FROM|GROUP BY|ORDER BY|PARTITION BY|SETTINGS|WHERE)\b)", "\n", one)
        for one in wanted
    )
    return "".join(f"{text};\n\n" for text in parts).rstrip("\n") + "\n"


def migrations_table() -> str:
    return (
        f"CREATE TABLE IF NOT EXISTS {MIGRATIONS} (version UInt32, about String, applied_at DateTime DEFAULT now()) "
        "ENGINE = ReplacingMergeTree ORDER BY version"
    )


def applied(migration: Migration) -> str:
    return f"INSERT INTO {MIGRATIONS} (version, about) VALUES ({migration.version}, '{migration.about}')"


def set_retention(table: str, ttl: str) -> str:
    """Files are rewritten as they merge, not at once."""
    return f"ALTER TABLE {table} MODIFY TTL {ttl} SETTINGS materialize_ttl_after_modify = 0"


def tables() -> Sequence[str]:
    """Tables that keep rows for a time."""
    return tuple(_KEPT)


def _entries(stream: Stream) -> str:
    first = (name for name in stream.fields if (stream.name, name) not in _LATER)
    columns = ", ".join(f"{name} {_TYPES[stream.name][name]}" for name in first)
    if stream is VOTES:  # the last vote on an answer counts, in whichever month it was given
        engine = "ReplacingMergeTree(timestamp) ORDER BY (tenant, response_id)"
        return f"CREATE TABLE IF NOT EXISTS {stream.table} ({columns}) ENGINE = {engine} {_REMEMBERS}"
    order = "ORDER BY (tenant, timestamp) PARTITION BY toYYYYMM(timestamp)"
    index = f"INDEX by_{stream.key} {stream.key} TYPE bloom_filter GRANULARITY 4"
    return f"CREATE TABLE IF NOT EXISTS {stream.table} ({columns}, {index}) ENGINE = MergeTree {order} {_REMEMBERS}"


def _dead_letters() -> str:
    return (
        f"CREATE TABLE IF NOT EXISTS {DEAD_LETTERS} (time DateTime64(3, 'UTC'), topic LowCardinality(String), "
        "partition UInt32, offset UInt64, reason String, value String) "
        f"ENGINE = ReplacingMergeTree ORDER BY (topic, partition, offset) {_REMEMBERS}"
    )


def _view(table: str, source: str, select: str) -> str:
    return f"CREATE MATERIALIZED VIEW IF NOT EXISTS {table}_mv TO {table} AS SELECT {select} FROM {source}"


def _cost(table: str, bucket: str, start: str) -> list[str]:
    columns = ", ".join(
        [f"{bucket} DateTime('UTC')", *(f"{name} {_NAME}" for name in _COST_KEYS.split(", ")), f"requests {_SUM}"]
        + [f"{name} {_SUM}" for name in _COST_SUMS]
    )
    return [
        f"CREATE TABLE IF NOT EXISTS {table} ({columns}) ENGINE = AggregatingMergeTree "
        f"ORDER BY ({bucket}, {_COST_KEYS}) PARTITION BY toYYYYMM({bucket}) {_REMEMBERS}",
        f"CREATE MATERIALIZED VIEW IF NOT EXISTS {table}_mv TO {table} AS {_costs(bucket, start, _COST_SUMS)}",
    ]


def _costs(bucket: str, start: str, sums: Sequence[str]) -> str:
    added = ", ".join(f"sum(toUInt64({name})) AS {name}" for name in sums)
    return (
        f"SELECT toDateTime({start}, 'UTC') AS {bucket}, {_COST_KEYS}, count() AS requests, {added} "
        f"FROM {CHARGES.table} GROUP BY {bucket}, {_COST_KEYS}"
    )


def _latency() -> list[str]:
    """Of requests that an engine answered: those with a first token, whatever ended them."""
    state = f"AggregateFunction({_DIGEST}, Float64)"
    keys = "time, model_version, route"
    return [
        f"CREATE TABLE IF NOT EXISTS {LATENCY} (time DateTime('UTC'), model_version {_NAME}, route {_NAME}, "
        f"requests {_SUM}, ttft_ms {state}, total_latency_ms {state}) ENGINE = AggregatingMergeTree "
        f"ORDER BY ({keys}) PARTITION BY toYYYYMM(time) {_REMEMBERS}",
        _view(
            LATENCY,
            f"{REQUESTS.table} AS log WHERE log.ttft_ms IS NOT NULL GROUP BY {keys}",
            "toDateTime(toStartOfFiveMinutes(log.timestamp), 'UTC') AS time, "
            "ifNull(log.model_version, '') AS model_version, log.route AS route, count() AS requests, "
            f"quantilesTDigestState({QUANTILES})(assumeNotNull(log.ttft_ms)) AS ttft_ms, "
            f"quantilesTDigestState({QUANTILES})(log.total_latency_ms) AS total_latency_ms",
        ),
    ]


def _outcomes() -> list[str]:
    keys = "hour, tenant, model_version, adapter_id, route, finish_reason"
    sums = ("prompt_tokens", "cached_tokens", "completion_tokens")
    columns = ", ".join(f"{name} {_NAME}" for name in keys.split(", ")[1:])
    return [
        f"CREATE TABLE IF NOT EXISTS {OUTCOMES} (hour DateTime('UTC'), {columns}, requests {_SUM}, "
        f"{', '.join(f'{name} {_SUM}' for name in sums)}) ENGINE = AggregatingMergeTree "
        f"ORDER BY ({keys}) PARTITION BY toYYYYMM(hour) {_REMEMBERS}",
        _view(
            OUTCOMES,
            f"{REQUESTS.table} AS log GROUP BY {keys}",
            "toDateTime(toStartOfHour(log.timestamp), 'UTC') AS hour, log.tenant AS tenant, "
            "ifNull(log.model_version, '') AS model_version, ifNull(log.adapter_id, '') AS adapter_id, "
            "log.route AS route, ifNull(log.finish_reason, '') AS finish_reason, count() AS requests, "
            + ", ".join(f"sum(toUInt64(log.{name})) AS {name}" for name in sums),
        ),
    ]


def _grades() -> list[str]:
    keys = "hour, tenant, model, via"
    return [
        f"CREATE TABLE IF NOT EXISTS {GRADES_BY_HOUR} (hour DateTime('UTC'), tenant {_NAME}, model {_NAME}, "
        f"via {_NAME}, answers {_SUM}, relevance {_FLOAT_SUM}, with_sources {_SUM}, groundedness {_FLOAT_SUM}) "
        f"ENGINE = AggregatingMergeTree ORDER BY ({keys}) PARTITION BY toYYYYMM(hour) {_REMEMBERS}",
        _view(
            GRADES_BY_HOUR,
            f"{GRADES.table} AS log GROUP BY {keys}",
            "toDateTime(toStartOfHour(log.timestamp), 'UTC') AS hour, log.tenant AS tenant, log.model AS model, "
            "log.via AS via, count() AS answers, sum(log.relevance) AS relevance, "
            "countIf(log.groundedness IS NOT NULL) AS with_sources, "
            "sum(ifNull(log.groundedness, 0)) AS groundedness",
        ),
    ]


def _votes() -> str:
    """Computed when it is read: votes are few, and a vote may replace another, which no sum could take back."""
    keys = "hour, tenant, model, adapter, route, via, arm"
    return (
        f"CREATE VIEW IF NOT EXISTS {VOTES_BY_HOUR} AS SELECT toDateTime(toStartOfHour(timestamp), 'UTC') AS hour, "
        f"tenant, model, adapter, route, via, arm, countIf(rating = 'up') AS up, countIf(rating = 'down') AS down "
        f"FROM {VOTES.table} FINAL GROUP BY {keys}"
    )
