"""`penstock requests`: the newest entries of the request log, when it is stored in a database."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.lists import Column, show
from penstock.cli.options import ConfigFile, Entries, Records, Settings

if TYPE_CHECKING:
    from penstock.metering.log_entries import LogEntry


def requests(
    since: Annotated[str, typer.Option(help="Start of the period: 1h, 7d, or a date.")] = "1h",
    tenant: Annotated[str | None, typer.Option(help="Only this tenant.")] = None,
    finish_reason: Annotated[str | None, typer.Option(help="Only this finish reason: stop, length, error, ...")] = None,
    limit: Entries = 100,
    output: Records = "table",
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
    if url.startswith(("kafka:", "clickhouse", "chdb:", "off")):
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
        from penstock.metering.log_entries import encode
        from penstock.telemetry.printable import printable_json

        for entry in entries:
            typer.echo(printable_json(encode(entry).decode()))
    else:
        show(_columns(), entries, output, empty="No requests in this period.")


def _columns() -> list[Column[LogEntry]]:
    return [
        Column("time", lambda entry: entry.timestamp, _when, rank=2),
        Column("request", lambda entry: entry.request_id, rank=0),
        Column("tenant", lambda entry: entry.tenant, rank=3),
        Column("user", lambda entry: entry.user_id, rank=6),
        Column("model", lambda entry: entry.adapter_id or entry.model_version, rank=1),
        Column("route", lambda entry: entry.route, rank=7),
        Column("finish", lambda entry: entry.finish_reason, rank=1),
        Column("prompt", lambda entry: entry.prompt_tokens, rank=2),
        Column("cached", lambda entry: entry.cached_tokens, rank=5),
        Column("completion", lambda entry: entry.completion_tokens, rank=2),
        Column("ttft ms", lambda entry: entry.ttft_ms, lambda entry: _ms(entry.ttft_ms), rank=4),
        Column("total ms", lambda entry: entry.total_latency_ms, lambda entry: _ms(entry.total_latency_ms), rank=2),
    ]


def _when(entry: LogEntry) -> str:
    import datetime

    return datetime.datetime.fromtimestamp(entry.timestamp, datetime.UTC).strftime("%m-%d %H:%M:%S")


def _ms(milliseconds: float | None) -> str:
    return "-" if milliseconds is None else f"{milliseconds:.1f}"
