"""`penstock log-pipeline`: the request log from Kafka to ClickHouse."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from penstock.cli.options import ConfigFile, LogLevel, Settings

if TYPE_CHECKING:
    from penstock.config import Config
    from penstock.metering.clickhouse.client import ClickHouse
    from penstock.metering.clickhouse.schema import Retention

app = typer.Typer(
    name="log-pipeline",
    help="Bring the request log from Kafka to ClickHouse.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


@app.command()
def consume(
    until_idle: Annotated[
        bool, typer.Option("--until-idle", help="End when everything in the topics is in ClickHouse.")
    ] = False,
    config_file: ConfigFile = None,
    log_level: LogLevel = None,
    settings: Settings = None,
) -> None:
    """
    Consume the topics of `request_log.url` into the tables of `log_pipeline.clickhouse`.

    Every entry is inserted exactly once, also into the summaries, whatever ends this process. Start as many as the
    topics have partitions. SIGTERM finishes the batch under way. Metrics and health are on `log_pipeline.port`.

    Examples:

        penstock log-pipeline consume

        penstock log-pipeline consume -s log_pipeline.clickhouse=clickhouse://penstock:SECRET@clickhouse:8123/logs

        penstock log-pipeline consume --until-idle -s log_pipeline.clickhouse=chdb:///var/lib/penstock/clickhouse
    """
    import logging
    import signal

    from penstock.cli.terminal import flags
    from penstock.config import load
    from penstock.metering.log_pipeline.consumer import Consumer
    from penstock.metering.log_pipeline.metrics import MetricsServer, PipelineMetrics
    from penstock.telemetry.logging import configure

    config = load(config_file, flags=flags(settings, logging__level=log_level))
    _need_kafka(config)
    configure(config.logging.format, config.logging.level)
    for library in ("urllib3", "clickhouse_connect"):  # they log every attempt; the consumer says it once
        logging.getLogger(library).setLevel(logging.CRITICAL)
    wanted, metrics = config.log_pipeline, PipelineMetrics()
    consumer = Consumer(config.request_log.url, _clickhouse(config), _retention(config), wanted, metrics)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: consumer.stop())
    server = MetricsServer(metrics, wanted.host, wanted.port, consumer.problem) if wanted.port else None
    try:
        consumer.run(until_idle=until_idle)
    finally:
        if server is not None:
            server.close()


@app.command()
def migrate(config_file: ConfigFile = None, settings: Settings = None) -> None:
    """
    Create or update the tables and views in ClickHouse, and set how long they keep rows.

    It may run twice, and while consumers run; `consume` does it when it starts. `penstock deploy clickhouse` writes the
    same statements into a file.

    Examples:

        penstock log-pipeline migrate

        penstock log-pipeline migrate -s request_log.retention_days=90 -s request_log.summary_days=null
    """
    from penstock.cli.terminal import flags
    from penstock.config import load

    config = load(config_file, flags=flags(settings))
    clickhouse = _clickhouse(config)
    try:
        changed: list[str] = []
        clickhouse.migrate(_retention(config), changed.append)
    finally:
        clickhouse.close()
    for line in changed or ["Nothing to do: the tables are up to date."]:
        typer.echo(line)


@app.command()
def backfill(
    since: Annotated[str, typer.Option(help="Start of the period: 24h, 30d, or a date.")] = "24h",
    until: Annotated[str | None, typer.Option(help="End of the period; by default now.")] = None,
    config_file: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """
    Send the settled charges of the ledger (`store.url`) to Kafka again.

    Those that ClickHouse has are skipped there. Run it after a gateway was killed: the ledger survives that, the
    charges that were on their way to Kafka do not.

    Examples:

        penstock log-pipeline backfill --since 2h

        penstock log-pipeline backfill --since 2026-11-01 --until 2026-12-01
    """
    import asyncio
    import time

    from penstock.cli.terminal import flags
    from penstock.config import load
    from penstock.metering.ledger import Ledger
    from penstock.metering.reports import moment
    from penstock.metering.request_sinks import KafkaSink
    from penstock.storage import open_database

    config = load(config_file, flags=flags(settings))
    _need_kafka(config)
    begin, end = moment(since), time.time() if until is None else moment(until)

    async def run() -> int:
        database, sink, sent = await open_database(config.store.url), KafkaSink(config.request_log.url), 0
        try:
            async for charges in Ledger(database).settled_since(begin, end):
                await sink.write(charges)
                sent += len(charges)
        finally:
            await sink.close()
            await database.close()
        return sent

    typer.echo(f"{asyncio.run(run())} charges sent; the consumer skips those that ClickHouse has")


@app.command()
def status(
    output: Annotated[
        Literal["table", "json", "csv"], typer.Option("--output", "-o", help="table, json or csv.")
    ] = "table",
    config_file: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """
    Show how far behind the consumers are, by topic, and what the tables hold.

    Examples:

        penstock log-pipeline status

        penstock log-pipeline status -o json
    """
    from penstock.cli.lists import Column, show
    from penstock.cli.terminal import flags
    from penstock.config import load
    from penstock.metering.log_pipeline.status import TopicStatus, read_status

    config = load(config_file, flags=flags(settings))
    _need_kafka(config)
    clickhouse = _clickhouse(config)
    try:
        rows = read_status(config.request_log.url, config.log_pipeline.group, clickhouse)
    finally:
        clickhouse.close()
    columns: list[Column[TopicStatus]] = [
        Column("topic", lambda row: row.topic, rank=0),
        Column("partitions", lambda row: row.partitions, rank=3),
        Column("messages", lambda row: row.messages, rank=2),
        Column("lag", lambda row: row.lag, rank=1),
        Column("rows", lambda row: row.rows, rank=2),
        Column("dead letters", lambda row: row.dead_letters, rank=1),
    ]
    show(columns, rows, output, empty="No topics.")


def _clickhouse(config: Config) -> ClickHouse:
    from penstock.metering.clickhouse.client import ClickHouse

    return ClickHouse(config.log_pipeline.clickhouse, timeout_s=60.0, key="log_pipeline.clickhouse")


def _retention(config: Config) -> Retention:
    from penstock.metering.clickhouse.schema import Retention

    return Retention.days(config.request_log.retention_days, config.request_log.summary_days)


def _need_kafka(config: Config) -> None:
    from penstock.errors import ConfigError

    if not config.request_log.url.startswith("kafka://"):
        raise ConfigError("request_log.url: the log pipeline needs Kafka there: kafka://HOST:PORT/TOPIC")
