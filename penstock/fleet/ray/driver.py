"""`penstock serve --cluster ray` on the machine where it is typed: finds or starts the controller and follows it.

The driver holds nothing that the server needs. In the foreground the server ends with it, also when it is killed: Ray
ends the controller with the job that made it. A detached server stays.
"""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from penstock.config import Config
from penstock.errors import ConfigError, PenstockError
from penstock.fleet.ray import cluster
from penstock.fleet.ray.bundle import Node, problems, without_room
from penstock.fleet.ray.controller import Controller
from penstock.fleet.ray.journal import show
from penstock.fleet.ray.messages import Journal, Order, Ready, ServerState, Stopped, decode, encode
from penstock.protocol.fleet_secret import FleetSecret, generate
from penstock.supervisor.reporter import Reporter


class Driver:
    """A connection to the cluster; a context manager."""

    def __init__(self, config: Config, note: Callable[[str], None]) -> None:
        """`note` shows a sentence to the operator."""
        self._config = config
        self._note = note
        self._controller: Any = None

    def __enter__(self) -> Driver:
        cluster.connect(self._config.cluster.address)
        return self

    def __exit__(self, *error: object) -> None:
        cluster.disconnect()

    @property
    def nodes(self) -> list[Node]:
        return cluster.nodes()

    def check(self) -> None:
        """ConfigError when the configuration cannot be had on this cluster."""
        nodes = self.nodes
        if found := problems(self._config, nodes):
            raise ConfigError("\n".join(found))
        for sentence in without_room(self._config, nodes):
            self._note(f"{sentence}; it starts when a node that has is added")

    def find(self) -> bool:
        """Whether a detached server of this name runs already; a second one in the foreground is refused."""
        name = self._config.fleet.name
        self._controller = cluster.find_controller(name)
        if self._controller is None:
            return False
        state = decode(ServerState, self._get(self._controller.state.remote()))
        if not state.detached:
            raise ConfigError(
                f"a server named {name} already runs on this cluster in the foreground; choose another name with "
                "--set fleet.name=NAME"
            )
        return True

    def start(self, *, detach: bool) -> None:
        """Starts the server; `follow` shows how it goes."""
        config = self._config
        secret = FleetSecret.find(config.fleet.secret_file)
        # Without one the server has its own, which nobody else needs to know.
        secrets = [generate()] if secret is None else list(secret.secrets)
        self._controller = cluster.make_controller(config.fleet.name, Controller, detached=detach)
        order = Order(dataclasses.asdict(config), secrets)
        self._get(self._controller.start.remote(encode(order), detach))

    def follow(self, reporter: Reporter, on_ready: Callable[[list[str]], None], *, until_ready: bool = False) -> None:
        """Shows the server's events until it has stopped. SIGINT and SIGTERM drain it; a second one ends it at once.
        `until_ready`: only until it is ready. `on_ready` is told the URLs of the gateways before that is shown."""
        number, asked = 0, 0
        with _signals() as received:
            while True:
                if len(received) > asked:
                    self._get(self._controller.stop.remote(asked > 0))
                    asked = min(len(received), asked + 1)
                journal = decode(Journal, self._get(self._controller.journal.remote(number)))
                number = journal.next
                for event in journal.events:
                    if isinstance(event, Ready):
                        on_ready(event.urls)
                    show(event, reporter)
                    if isinstance(event, Stopped):
                        self._remove()
                        if event.problem:
                            raise PenstockError(event.problem)
                        return
                    if isinstance(event, Ready) and until_ready:
                        return

    def state(self) -> ServerState:
        return decode(ServerState, self._get(self._controller.state.remote()))

    def _remove(self) -> None:
        with suppress(Exception):
            cluster.kill(self._controller)

    def _get(self, reference: Any) -> Any:
        try:
            return cluster.library().get(reference)
        except Exception as error:
            raise PenstockError(f"the controller of the server is gone: {cluster.reason(error)}") from error


@contextmanager
def _signals() -> Iterator[list[int]]:
    """The signals that arrived."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
