"""`penstock health`: whether a server is ready, as an exit status, for health checks of containers and scripts."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.admin import DEFAULT_URL, Url


def health(
    url: Url = DEFAULT_URL,
    live: Annotated[
        bool, typer.Option("--live", help="Whether the process answers at all, models ready or not.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for the answer.")] = 5.0,
) -> None:
    """
    Exit 0 if a server is ready, 1 if it is not.

    Examples:

        penstock health

        penstock health --live --url http://127.0.0.1:9000
    """
    import httpx

    from penstock.cli.terminal import show_error

    path = "/health/live" if live else "/health/ready"
    try:
        with httpx.Client(trust_env=False, timeout=timeout) as client:  # not through a proxy
            answer = client.get(url.rstrip("/") + path)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        show_error(f"{url} does not answer: {error}")
        raise typer.Exit(1) from error
    if answer.status_code != 200:
        show_error(f"{url}{path} answers {answer.status_code}: {answer.text.strip()[:300]}")
        raise typer.Exit(1)
    typer.echo("live" if live else "ready")
