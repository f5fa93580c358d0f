"""`penstock bench hostile`."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.bench.options import Json, console


def hostile(
    attack: Annotated[list[str] | None, typer.Option("--attack", "-a", help="May be repeated; by default all.")] = None,
    seconds: Annotated[float, typer.Option(min=1.0, help="How long each attack runs.")] = 20.0,
    bar: Annotated[float, typer.Option(min=1.0, help="p99 may rise to this many times the quiet p99.")] = 2.0,
    threads: Annotated[int, typer.Option(min=1, help="Threads of the engine.")] = 1,
    workers: Annotated[int, typer.Option(min=1, help="Gateway processes.")] = 1,
    model: Annotated[str, typer.Option(help="What the server serves.")] = "smollm2-135m",
    stream_only: Annotated[
        bool, typer.Option("--stream-only", help="The tenant has one stream and nothing else.")
    ] = False,
    json_file: Json = None,
) -> None:
    """
    A well-behaved tenant's p99 while another tenant, or somebody without a key, attacks the same server.

    Each attack runs in turn with a quiet period before it. The tenant's streams, chats, formatted chats and uploads
    must all succeed, and each p99 stay within the bar.

    Examples:

        penstock bench hostile

        penstock bench hostile -a regex-bomb -a long-chat --seconds 60 --json hostile.json

        penstock bench hostile -a long-chat -a long-arguments -a tokenize --stream-only
    """
    from penstock.bench.hostile import run as measured

    settings = measured.HostileBenchSettings(tuple(attack or ()), seconds, bar, threads, workers, model, stream_only)
    if not measured.main(settings, json_file, console()):
        raise typer.Exit(1)
