"""How far the consumers of a group are, and what the tables hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.errors import PenstockError
from penstock.metering.clickhouse.client import ClickHouse
from penstock.metering.clickhouse.schema import DEAD_LETTERS
from penstock.metering.kafka import KafkaAddress, Quiet, kafka_driver
from penstock.metering.log_entries import STREAMS

TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class TopicStatus:
    topic: str
    partitions: int
    messages: int
    """In the topic."""
    lag: int
    """Of these, not consumed yet."""
    rows: int
    """In the table of the stream."""
    dead_letters: int


def read_status(kafka_url: str, group: str, clickhouse: ClickHouse) -> list[TopicStatus]:
    kafka, address = kafka_driver("request_log.url"), KafkaAddress.of(kafka_url)
    options = {**address.options, "bootstrap.servers": address.brokers, "group.id": group, "enable.auto.commit": False}
    consumer = kafka.Consumer(options, logger=Quiet())
    try:
        return [_of(kafka, consumer, stream.topic(address.topic), stream.table, clickhouse) for stream in STREAMS]
    except kafka.KafkaException as error:
        raise PenstockError(f"Kafka at {address.brokers}: {error.args[0].str()}") from error
    finally:
        consumer.close()


def _of(kafka: Any, consumer: Any, topic: str, table: str, clickhouse: ClickHouse) -> TopicStatus:
    found = consumer.list_topics(topic, timeout=TIMEOUT_S).topics[topic].partitions
    places = [kafka.TopicPartition(topic, number) for number in found]
    messages = lag = 0
    for place in consumer.committed(places, timeout=TIMEOUT_S) if places else ():
        low, high = consumer.get_watermark_offsets(place, timeout=TIMEOUT_S)
        messages += high - low
        lag += high - max(place.offset, low)
    [(rows,)] = clickhouse.query(f"SELECT count() FROM {table}")
    [(dead,)] = clickhouse.query(f"SELECT count() FROM {DEAD_LETTERS} FINAL WHERE topic = '{topic}'")
    return TopicStatus(topic, len(places), messages, lag, rows, dead)
