"""`penstock bench http-servers`."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.bench.options import Json, console


def http_servers(
    server: Annotated[
        list[str] | None, typer.Option(help="penstock, uvicorn or granian; repeat for several. All by default.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of each measurement.")] = 5.0,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each server; medians are shown.")] = 3,
    at_once: Annotated[int, typer.Option(min=1, help="Connections.")] = 32,
    json_file: Json = None,
) -> None:
    """
    Our HTTP/1.1 listener beside uvicorn and granian with the same application: short answers and streams of events.

    Examples:

        penstock bench http-servers

        penstock bench http-servers --server penstock --server granian --seconds 10 --json servers.json
    """
    from penstock.bench.libraries import http_servers as measured
    from penstock.bench.libraries.http_server import SERVERS

    chosen = tuple(server or SERVERS)
    measured.main(measured.HttpServersBenchSettings(chosen, seconds, rounds, at_once), json_file, console())
