"""Actors that run a process of the server on their node and pass on what it says.

An engine host runs `penstock engine`, a gateway host runs `penstock gateway` with its encoders under a supervisor of
its own; both are the ordinary commands, with the node's own copy of the model's files. A process ends with its actor,
and the actor with the controller, however they end (`engine.process.die_with_parent`).

The fleet secret is written to a file that only this user can read, in a folder that is removed with the process.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from penstock import __version__
from penstock.config import Config, ModelConfig, dump
from penstock.config.load import check
from penstock.config.tree import parse_yaml
from penstock.errors import PenstockError
from penstock.fleet.ray import cluster
from penstock.fleet.ray.control_tunnel import ControlTunnel
from penstock.fleet.ray.messages import Ended, HostEvent, HostEvents, Line, Order, Place, Told, decode, encode
from penstock.interpreter import module
from penstock.protocol.address import is_loopback
from penstock.protocol.fleet_secret import VARIABLE
from penstock.sources.resolve import resolve
from penstock.supervisor.catalogue import in_daemon_thread
from penstock.supervisor.child import STATUS_FD, Child, describe_exit
from penstock.supervisor.heartbeat import HEARTBEAT_S
from penstock.supervisor.launch import encoders, gateways, worker_coordinator
from penstock.supervisor.reporter import Reporter
from penstock.supervisor.runtime import RuntimeFolder
from penstock.supervisor.status import Alive, Failed, Listening, Progress
from penstock.supervisor.supervisor import Supervisor

POLL_S = 5.0
"""How long a call for events waits for the first one."""
MOST_LINES = 10_000
"""Lines kept for a controller that does not fetch them."""


def config_of(values: dict[str, Any]) -> Config:
    """The configuration that an order carries."""
    return check(parse_yaml(json.dumps(values), "cluster"))


class Host:
    """What both kinds of host share: where they are, and the events of their process."""

    def __init__(self) -> None:
        self._events: list[HostEvent] = []
        self._first = 0
        """Number of the oldest event that is kept."""
        self._happened = asyncio.Event()
        self._folder = RuntimeFolder()

    async def where(self) -> bytes:
        """The node of this host."""
        node, address = cluster.here()
        return encode(Place(node, socket.gethostname(), address, __version__))

    async def events(self, after: int) -> bytes:
        """What has happened from event number `after` on; waits a few seconds if that is nothing. Older ones are no
        longer needed."""
        del self._events[: max(after - self._first, 0)]
        self._first = max(after, self._first)
        if not self._events:
            self._happened.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._happened.wait()
        return encode(HostEvents(self._first, self._events))

    def _tell(self, event: HostEvent) -> None:
        if len(self._events) < MOST_LINES or not isinstance(event, Line):
            self._events.append(event)
        self._happened.set()

    def _end(self, code: int, how: str) -> None:
        self._folder.close()
        self._tell(Ended(code, how))

    async def _prepare(self, config: Config, needed: set[str], secret: list[str]) -> Config:
        """The configuration for this node: the needed models are local files, and the secret is in one."""
        os.environ.pop(VARIABLE, None)  # it would have precedence over the server's own
        file = self._folder.path / "fleet.secret"
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as handle:
            handle.write("\n".join(secret) + "\n")
        here: list[ModelConfig] = []
        for model in config.models:
            if model.name not in needed:
                here.append(model)
                continue
            model = dataclasses.replace(model, source=await self._fetch(model.source))
            if model.draft_model is not None:
                model = dataclasses.replace(model, draft_model=await self._fetch(model.draft_model))
            here.append(model)
        fleet = dataclasses.replace(config.fleet, secret_file=str(file), url="")
        return dataclasses.replace(config, models=tuple(here), fleet=fleet)

    async def _fetch(self, source: str) -> str:
        """The path of a model on this node, fetched if it is not here."""

        def progress(what: str, done: int, total: int | None) -> None:
            loop.call_soon_threadsafe(self._tell, Told(Progress(what, done / total if total else 0.0)))

        loop = asyncio.get_running_loop()
        return str(await in_daemon_thread(lambda: resolve(source, progress), f"fetch {source}"))


class EngineHost(Host):
    """Runs one engine."""

    def __init__(self) -> None:
        super().__init__()
        self._child: Child | None = None
        self._wait: asyncio.Task[None] | None = None

    async def start(self, data: bytes, address: str) -> str:
        """Starts the engine; returns its endpoint, where it will listen."""
        order = decode(Order, data)
        config = config_of(order.config)
        here = await self._prepare(config, {order.model}, order.secret)
        file = self._folder.path / "config.json"
        dump(here, file)
        endpoint = f"tcp://{address}:{free_port(address, *config.fleet.port_range())}"
        command = module("penstock", "engine", "--resolved", str(file), "--supervised", STATUS_FD)
        command += [order.model, "--endpoint", endpoint, *order.arguments]
        self._child = child = await Child.spawn(
            order.model,
            command,
            on_line=lambda line: self._tell(Line(line)),
            on_status=lambda status: self._tell(Told(status)),
        )
        self._wait = asyncio.create_task(self._until_exit(child), name="end of the engine")
        return endpoint

    async def stop(self, kill: bool) -> None:
        if self._child is not None:
            (self._child.kill if kill else self._child.terminate)()

    async def _until_exit(self, child: Child) -> None:
        code = await child.wait()
        self._end(code, describe_exit(code))


class GatewayHost(Host):
    """Runs the gateway of a node: its workers, and the encoders that they need."""

    def __init__(self) -> None:
        super().__init__()
        self._supervisor: Supervisor | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, data: bytes, address: str, controller: Any, owner: str) -> str:
        """Starts the gateway; returns its URL. `controller`: the actor whose control socket gateways use; `owner`:
        what it calls this host."""
        order = decode(Order, data)
        config = config_of(order.config)
        here = await self._prepare(config, {model.name for model in config.models}, order.secret)
        server = here.server
        host = address if is_loopback(server.host) else server.host
        here = dataclasses.replace(here, server=dataclasses.replace(server, host=host))
        tunnel = ControlTunnel(self._folder.control, controller, owner)
        await tunnel.start()
        self._tasks = [asyncio.create_task(self._run(here, tunnel), name="gateway")]
        return f"http://{address}:{server.port}"

    async def stop(self, kill: bool) -> None:
        if self._supervisor is not None:
            if kill:
                self._supervisor.stop()
            self._supervisor.stop()

    async def _run(self, config: Config, tunnel: ControlTunnel) -> None:
        how, server = "stopped", config.server
        beat: asyncio.Task[None] | None = None
        try:
            helpers, endpoints = encoders(config, self._folder)
            options = ["--control", str(self._folder.control)]
            async with worker_coordinator(config, self._folder) as gateways_up:
                self._supervisor = supervisor = Supervisor(
                    engines=helpers,
                    gateways=gateways(config, self._folder, endpoints, options),
                    host=server.host,
                    port=server.port,
                    drain_s=server.drain_s,
                    reporter=_HostReporter(self._tell),
                    frozen_s=config.resilience.frozen_s,
                    gateways_up=gateways_up,
                )
                beat = asyncio.create_task(self._beat(supervisor), name="heartbeats")
                await supervisor.run(handle_signals=False)
        except PenstockError as error:
            how = "could not start"
            self._tell(Told(Failed(str(error))))
        finally:
            if beat is not None:
                beat.cancel()
            await tunnel.close()
            self._end(0, how)

    async def _beat(self, supervisor: Supervisor) -> None:
        """Says when the gateway is ready, and from then on that this host is alive."""
        await supervisor.announced.wait()
        self._tell(Told(Listening()))
        while True:
            self._tell(Told(Alive()))
            await asyncio.sleep(HEARTBEAT_S)


class _HostReporter(Reporter):
    """Passes on what the processes of a gateway write."""

    def __init__(self, tell: Callable[[HostEvent], None]) -> None:
        self._tell = tell

    def line(self, child: str, text: str) -> None:
        self._tell(Line(text))

    def exited(self, child: str, how: str, restart_in_s: float) -> None:
        self._tell(Line(f"{child} died ({how}); restarting in {restart_in_s:g} s"))


def free_port(address: str, first: int, last: int) -> int:
    """A port of the range on which nobody listens at `address`."""
    # Hosts that start together on a node begin at different places, so that they rarely choose the same one.
    count = last - first + 1
    for offset in range(count):
        port = first + (os.getpid() + offset) % count
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            try:
                probe.bind((address, port))
            except OSError:
                continue
            return port
    raise PenstockError(f"all ports of fleet.ports ({first}-{last}) are in use at {address}")
