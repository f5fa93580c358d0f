"""Tables with which ClickHouse itself reads the topics: no consumer to run, and a weaker guarantee.

ClickHouse commits offsets after an insert and does not know the ids of entries: a message that is read again, or that a
gateway sent twice, is a second row, and counts twice in the summaries. `penstock log-pipeline consume` is exact.
"""

from __future__ import annotations

from penstock.metering.clickhouse.schema import DEAD_LETTERS, column_types
from penstock.metering.kafka import KafkaAddress
from penstock.metering.log_entries import STREAMS, Stream

VIRTUAL = "_topic String, _partition UInt64, _offset UInt64, _error String, _raw_message String"
"""What a Kafka table has beside its columns."""


def kafka_statements(address: KafkaAddress, group: str) -> list[str]:
    return [statement for stream in STREAMS for statement in _reader(stream, address, group)]


def _reader(stream: Stream, address: KafkaAddress, group: str) -> list[str]:
    queue, types = f"{stream.table}_queue", column_types(stream)
    columns = ", ".join(
        f"{name} {'Float64' if name == 'timestamp' else type.replace('LowCardinality(String)', 'String')}"
        for name, type in types.items()
    )
    settings = {
        "kafka_broker_list": address.brokers,
        "kafka_topic_list": stream.topic(address.topic),
        "kafka_group_name": group,
        "kafka_format": "JSONEachRow",
        "kafka_handle_error_mode": "stream",
    }
    given = ", ".join(f"{name} = '{value}'" for name, value in settings.items())
    moment = "fromUnixTimestamp64Micro(toInt64(round(queue.timestamp * 1e6)), 'UTC') AS timestamp"
    values = ", ".join(moment if name == "timestamp" else f"queue.{name} AS {name}" for name in types)
    return [
        f"CREATE TABLE IF NOT EXISTS {queue} ({columns}) ENGINE = Kafka SETTINGS {given}",
        f"CREATE MATERIALIZED VIEW IF NOT EXISTS {queue}_mv TO {stream.table} AS SELECT {values} FROM {queue} AS queue "
        "WHERE length(queue._error) = 0",
        f"CREATE MATERIALIZED VIEW IF NOT EXISTS {queue}_dead_mv TO {DEAD_LETTERS} AS SELECT now64(3) AS time, "
        "queue._topic AS topic, toUInt32(queue._partition) AS partition, queue._offset AS offset, "
        f"queue._error AS reason, queue._raw_message AS value FROM {queue} AS queue WHERE length(queue._error) > 0",
    ]
