"""Addresses of Kafka: `kafka://HOST:PORT[,HOST:PORT]/TOPIC?option=value`. Options are those of librdkafka."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from penstock.errors import ConfigError, needs_extra
from penstock.metering.log_entries import TABLE


@dataclass(frozen=True, slots=True)
class KafkaAddress:
    """Brokers, and the topic of the requests; other streams have the topics TOPIC.charges and so on."""

    brokers: str
    topic: str
    options: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, url: str) -> KafkaAddress:
        parts = urlsplit(url)
        return cls(parts.netloc, parts.path.strip("/") or TABLE, dict(parse_qsl(parts.query)))


def kafka_driver(key: str) -> Any:
    try:
        return importlib.import_module("confluent_kafka")
    except ImportError as error:
        raise ConfigError(f"{key} {needs_extra('kafka')}") from error


class Quiet:
    """Silences librdkafka, which logs every attempt to connect; what matters is logged once by whoever uses it."""

    def log(self, *args: Any) -> None:
        return
