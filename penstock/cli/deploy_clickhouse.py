"""`penstock deploy clickhouse`: the tables and views of the request log, as SQL."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.deploy_options import Force, Output, emit
from penstock.cli.options import ConfigFile, Settings


def clickhouse(
    kafka_engine: Annotated[
        bool,
        typer.Option(
            "--kafka-engine/--consumer",
            help="ClickHouse reads Kafka itself, at least once; or `penstock log-pipeline consume` does, exactly once.",
        ),
    ] = False,
    config_file: ConfigFile = None,
    output: Output = None,
    force: Force = False,
    settings: Settings = None,
) -> None:
    """
    Write the tables and views of the request log in ClickHouse as SQL, which may run twice.

    `penstock log-pipeline migrate` applies the same statements.

    Examples:

        penstock deploy clickhouse | clickhouse-client --multiquery

        penstock deploy clickhouse -o sql -s request_log.retention_days=90

        penstock deploy clickhouse --kafka-engine -s request_log.url=kafka://broker:9092/request_log
    """
    from penstock.cli.terminal import flags
    from penstock.config import load
    from penstock.errors import ConfigError
    from penstock.metering.clickhouse.kafka_engine import kafka_statements
    from penstock.metering.clickhouse.schema import Retention, script, statements
    from penstock.metering.kafka import KafkaAddress

    config = load(config_file, flags=flags(settings))
    log = config.request_log
    wanted = statements(Retention.days(log.retention_days, log.summary_days))
    if kafka_engine:
        if not log.url.startswith("kafka://"):
            raise ConfigError("--kafka-engine: request_log.url must name the topic: kafka://HOST:PORT/TOPIC")
        wanted += kafka_statements(KafkaAddress.of(log.url), config.log_pipeline.group)
    emit({"request-log.sql": script(wanted)}, output, force)
