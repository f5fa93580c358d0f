"""`penstock requests`: the newest entries of the request log, when it is stored in a database."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from penstock.cli.options import ConfigFile, Settings

if TYPE_CHECKING:
    from penstock.metering.request_log import LogEntry


def requests(
    since: Annotated[str, typer.Option(help="Start of the period: 1h, 7d, or a date.")] = "1h",
    tenant: Annotated[str | None, typer.Option(help="Only this tenant.")] = None,
    finish_reason: Annotated[str | None, typer.Option(help="Only this finish reason: stop, length, error, ...")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of entries; the newest are shown.")] = 100,
    output: Annotated[Literal["table", "jsonl"], typer.Option("--output", "-o", help="table or jsonl.")] = "table",
    config_file: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """
    Show the newest requests from the request log.

    Examples:

        penstock requests

        penstock requests --since 24h --tenant acme --finish-reason error

        penstock requests --since 7d --limit 100000 -o jsonl > requests.jsonl
    """
    import asyncio

    from penstock.cli.terminal import flags
    from penstock.config import load
    from penstock.errors import ConfigError
    from penstock.metering.reports import moment
    from penstock.metering.request_store import RequestStore
    from penstock.storage import open_database

    config = load(config_file, flags=flags(settings))
    url = config.request_log.url or config.store.url
    if url.startswith(("kafka:", "clickhouse", "off")):
        raise ConfigError(
            "the request log is not in a SQLite or PostgreSQL database (request_log.url); query its own destination"
        )

    async def run() -> list[LogEntry]:
        store = RequestStore(lambda: open_database(url))
        try:
            return await store.read(since=moment(since), tenant=tenant, finish_reason=finish_reason, limit=limit)
        finally:
            await store.close()

    entries = asyncio.run(run())
    if output == "jsonl":
        from penstock.metering.request_log import encode
        from penstock.telemetry.printable import printable_json

        for entry in entries:
            typer.echo(printable_json(encode(entry).decode()))
    else:
        _table(entries)


def _table(entries: list[LogEntry]) -> None:
    import datetime

    from rich.table import Table

    from penstock.cli.terminal import stdout

    if not entries:
        typer.echo("No requests in this period.")
        return
    table = Table(box=None, pad_edge=False)
    for name in ("time", "request", "tenant", "user", "model", "route", "finish"):
        table.add_column(name, no_wrap=True)
    for name in ("prompt", "cached", "completion", "ttft ms", "total ms"):
        table.add_column(name, justify="right")
    for entry in entries:
        when = datetime.datetime.fromtimestamp(entry.timestamp, datetime.UTC).strftime("%m-%d %H:%M:%S")
        names = (entry.request_id, entry.tenant, entry.user_id, entry.adapter_id or entry.model_version, entry.route)
        tokens = (entry.prompt_tokens, entry.cached_tokens, entry.completion_tokens)
        times = (entry.ttft_ms, entry.total_latency_ms)
        table.add_row(
            when,
            *(name or "-" for name in (*names, entry.finish_reason)),
            *map(str, tokens),
            *("-" if time is None else f"{time:.1f}" for time in times),
        )
    stdout().print(table)
