"""`penstock bench log-pipeline`."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.bench.options import Json, console


def log_pipeline(
    requests: Annotated[int, typer.Option(min=1, help="Requests; each has a record and a charge.")] = 100_000,
    copies: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of entries that are produced twice.")] = 0.01,
    batch: Annotated[int, typer.Option(min=1, max=20_000, help="Maximum of entries per insert.")] = 10_000,
    kafka: Annotated[
        str, typer.Option(metavar="URL", help="kafka://HOST:PORT/TOPIC, an unused one; by default a broker in memory.")
    ] = "",
    clickhouse: Annotated[
        str,
        typer.Option(metavar="URL", help="An empty database; by default the embedded engine in a temporary folder."),
    ] = "",
    json_file: Json = None,
) -> None:
    """
    The consumer of the log pipeline: entries per second from Kafka into ClickHouse, exactly once.

    Without --kafka and --clickhouse everything runs in this process: librdkafka's broker in memory, and chdb.

    Examples:

        penstock bench log-pipeline

        penstock bench log-pipeline --kafka kafka://broker:9092/bench --clickhouse clickhouse://clickhouse:8123/bench
    """
    from penstock.bench.log_pipeline import LogPipelineBenchSettings, main

    main(LogPipelineBenchSettings(requests, copies, batch, kafka, clickhouse), json_file, console())
