"""The log pipeline: where `penstock log-pipeline` brings what gateways write to Kafka."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config.fields import setting


@dataclass(frozen=True, slots=True)
class LogPipelineConfig:
    """The request log from Kafka (`request_log.url`) to ClickHouse; used by `penstock log-pipeline`."""

    clickhouse: str = setting(
        "", doc="clickhouse://USER:PASSWORD@HOST:8123/DATABASE, clickhouses:// over TLS, or chdb:///FOLDER for the "
        "embedded engine.", example="clickhouse://penstock:SECRET@clickhouse:8123/penstock",
    )  # fmt: skip
    group: str = setting("penstock", doc="Kafka consumer group; consumers in one group share the partitions.")
    batch: int = setting(10_000, doc="Maximum of entries per insert.", least=1, most=20_000)
    flush_s: float = setting(2.0, doc="Seconds an entry waits for others to be inserted together.", least=0.01)
    host: str = setting("127.0.0.1", doc="Address for the consumer's metrics and health.")
    port: int = setting(9464, doc="Port for them; 0: none.", least=0, most=65535)
