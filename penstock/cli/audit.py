"""`penstock audit`: the newest decisions by data rules, from the store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from penstock.cli.lists import Column, show
from penstock.cli.options import ConfigFile, Entries, Records, Settings

if TYPE_CHECKING:
    from penstock.metering.audit import AuditEntry


def audit(
    since: Annotated[str, typer.Option(help="Start of the period: 1h, 7d, or a date.")] = "24h",
    tenant: Annotated[str | None, typer.Option(help="Only this tenant.")] = None,
    key: Annotated[str | None, typer.Option(help="Only this key, by its prefix.")] = None,
    outcome: Annotated[
        Literal["permitted", "refused", "withheld", "marked", "changed"] | None, typer.Option(help="Only this outcome.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Only about this model, tool server or guardrail.")] = None,
    request: Annotated[str | None, typer.Option(help="Only this request, by its id.")] = None,
    limit: Entries = 100,
    output: Records = "table",
    config_file: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """
    Show what data rules decided: who asked, what was decided about, by which rule, with which outcome. Never text.

    Examples:

        penstock audit

        penstock audit --outcome refused --since 7d

        penstock audit --tenant acme --limit 100000 -o jsonl > audit.jsonl
    """
    import asyncio

    from penstock.cli.terminal import flags
    from penstock.config import load
    from penstock.metering.audit import AuditStore
    from penstock.metering.reports import moment
    from penstock.storage import open_database

    config = load(config_file, flags=flags(settings))

    async def run() -> list[AuditEntry]:
        database = await open_database(config.store.url)
        try:
            store = AuditStore(database)
            await store.prepare()
            return await store.read(
                since=moment(since),
                tenant=tenant,
                key=key,
                outcome=outcome,
                name=name,
                request_id=request,
                limit=limit,
            )
        finally:
            await database.close()

    entries = asyncio.run(run())
    if output == "jsonl":
        import msgspec

        from penstock.telemetry.printable import printable_json

        for entry in entries:
            typer.echo(printable_json(msgspec.json.encode(entry).decode()))
    else:
        show(_columns(), entries, output, empty="No decisions in this period.")


def _columns() -> list[Column[AuditEntry]]:
    return [
        Column("time", lambda entry: entry.timestamp, _when, rank=2),
        Column("outcome", lambda entry: entry.outcome, rank=0),
        Column("kind", lambda entry: entry.kind, rank=1),
        Column("name", lambda entry: entry.name, rank=0),
        Column("tenant", lambda entry: entry.tenant, rank=1),
        Column("key", lambda entry: entry.key_id, rank=3),
        Column("user", lambda entry: entry.user_id, rank=5),
        Column("rule", lambda entry: entry.rule, rank=1, fold=True),
        Column("demand", lambda entry: entry.demand, rank=4, fold=True),
        Column("endpoint", lambda entry: entry.path, rank=6),
        Column("request", lambda entry: entry.request_id, rank=2),
    ]


def _when(entry: AuditEntry) -> str:
    import datetime

    return datetime.datetime.fromtimestamp(entry.timestamp, datetime.UTC).strftime("%m-%d %H:%M:%S")
