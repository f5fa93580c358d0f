"""`penstock serve --cluster ray`: the same server with its processes on the nodes of a Ray cluster."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from penstock.cli.terminal import stderr
from penstock.cli.terminal_reporter import TerminalReporter
from penstock.identity.exposure import check_exposure
from penstock.protocol.address import is_loopback

if TYPE_CHECKING:
    from penstock.config import Config


def serve_ray(config: Config, *, detach: bool) -> None:
    """Serves until Ctrl-C, which drains and removes everything; `detach`: returns when the server is ready."""
    from penstock.fleet.ray.driver import Driver

    console = stderr()

    def note(text: str) -> None:
        console.print(text, style="yellow", markup=False, soft_wrap=True)

    with Driver(config, note) as driver:
        found = driver.find()
        if not found:
            driver.check()
        keys = False
        server = config.server
        # A loopback address means the node's own.
        for host in [node.address for node in driver.nodes] if is_loopback(server.host) else [server.host]:
            keys = asyncio.run(check_exposure(host, config.store.url))
        if found:
            note(f"the server {config.fleet.name} runs on this cluster already, as it was started; following it")
        else:
            driver.start(detach=detach)
        reporter = TerminalReporter(console, config, keys=keys)

        def ready(urls: list[str]) -> None:
            where = urlsplit(urls[0])
            reachable = dataclasses.replace(server, host=where.hostname or server.host, port=where.port or server.port)
            reporter.show_at(dataclasses.replace(config, server=reachable))

        driver.follow(reporter, ready, until_ready=detach)
        if detach:
            again = "penstock serve --cluster ray"
            note(f"the server stays when this command ends; `{again}` follows it, and Ctrl-C there stops it")
