"""`penstock top`: live metrics of a running server in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.admin import DEFAULT_URL, Url

if TYPE_CHECKING:
    from penstock.telemetry.scrapes import Scrape

Key = Annotated[
    str | None,
    typer.Option(envvar="PENSTOCK_API_KEY", help="API key with the scope `metrics`.", show_envvar=True),
]


def top(
    url: Url = DEFAULT_URL,
    key: Key = None,
    interval: Annotated[float, typer.Option("--interval", "-i", min=0.1, help="Seconds between two readings.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame after one interval, and exit.")] = False,
) -> None:
    """
    Watch a running server: throughput, latency, queue, KV cache, replicas. Ctrl-C quits.

    Examples:

        penstock top

        penstock top --url http://gpu1:8000 --key $METRICS_KEY --interval 2

        penstock top --once
    """
    import time

    from rich.console import Console
    from rich.live import Live

    from penstock.cli.terminal import harmless
    from penstock.cli.top_screen import Screen
    from penstock.errors import PenstockError
    from penstock.telemetry.scrapes import Interval

    console = Console(markup=False)
    before = _scrape(url, key)
    screen = Screen(url)
    if once:
        time.sleep(interval)
        console.print(harmless(screen.frame(Interval(before, _scrape(url, key)))))
        return
    try:
        with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                try:
                    after = _scrape(url, key)
                except PenstockError as error:
                    live.update(harmless(screen.trouble(str(error))), refresh=True)
                    continue
                live.update(harmless(screen.frame(Interval(before, after))), refresh=True)
                before = after
    except KeyboardInterrupt:
        return


def _scrape(url: str, key: str | None) -> Scrape:
    import time

    import httpx

    from penstock.cli.admin import fetch
    from penstock.telemetry.scrapes import Scrape

    answer: httpx.Response = fetch("GET", url, key, "/metrics", under="", timeout=httpx.Timeout(10.0))
    return Scrape(answer.text, time.monotonic())
