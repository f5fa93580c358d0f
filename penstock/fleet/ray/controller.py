"""The controller of a server on a Ray cluster: an actor on the head node that everything else hangs from.

It is the ordinary supervisor, autoscaler and control socket of `penstock serve`; only the processes are on other nodes
(`RemoteProcess`). So restarts, draining, scaling and the admin API are the same as on one machine. Gateways learn
from it which replicas there are, over Ray.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
import uuid
from collections.abc import Callable
from typing import Any

from penstock import __version__
from penstock.config import Config, ModelConfig
from penstock.config.variants import Variant, variant_at
from penstock.errors import PenstockError
from penstock.fleet.ray import cluster
from penstock.fleet.ray.bundle import (
    Bundle,
    engine_bundle,
    engine_config,
    gateway_bundle,
    placed,
    problems,
)
from penstock.fleet.ray.choice import Reserved, preferred_node
from penstock.fleet.ray.control_tunnel import ControlEnds
from penstock.fleet.ray.host import EngineHost, GatewayHost, config_of
from penstock.fleet.ray.journal import JournalReporter
from penstock.fleet.ray.messages import Order, Place, PlacedProcess, ServerState, Stopped, decode, encode
from penstock.fleet.ray.process import RemoteProcess, Reservation, SharedReservation
from penstock.protocol.control import Replica
from penstock.protocol.fleet_secret import FleetSecret
from penstock.supervisor.autoscaler import ReplicaAutoscaler
from penstock.supervisor.catalogue import ModelCatalogue
from penstock.supervisor.control import ControlServer
from penstock.supervisor.launch import engine_name
from penstock.supervisor.replicas import Replicas
from penstock.supervisor.runtime import RuntimeFolder
from penstock.supervisor.status import Status
from penstock.supervisor.supervisor import Supervisor
from penstock.supervisor.unit import Unit

DISTRUST_S = 60.0
"""How long replicas avoid a node on which a host was lost, if there is room elsewhere."""
SWEEP_S = 1.0
"""How often the room of removed replicas is given back."""


class RayCatalogue(ModelCatalogue):
    """Models loaded at run time keep their sources: every node fetches what it needs itself."""

    async def _fetch(self, name: str, source: str) -> str:
        return source

    def unit(self, name: str, index: int, variant: Variant | None = None) -> Unit:
        model = self.model(name)
        variant = variant_at(model, index) if variant is None else variant
        return Unit(engine_name(model, index), [], model=name, replica=str(index), variant=variant, save_s=model.save_s)

    def settings(self, unit: Unit) -> ModelConfig:
        """Of one replica."""
        return unit.variant.of(self.model(unit.model))


class Controller:
    """The actor. `start` is called once."""

    def __init__(self) -> None:
        self._reporter = JournalReporter(self._urls)
        self._detached = False
        self._supervisor: Supervisor | None = None
        self._engines: list[Unit] = []
        self._gateways: list[Unit] = []
        self._replicas: Replicas | None = None
        self._reservations: dict[Unit, Reservation] = {}
        self._nodes: dict[Unit, str] = {}
        self._run_task: asyncio.Task[None] | None = None
        self._gateway_group: Any = None
        self._distrusted: dict[str, float] = {}

    async def start(self, data: bytes, detached: bool) -> None:
        self._detached = detached
        order = decode(Order, data)
        self._config: Config = config_of(order.config)
        self._secret = FleetSecret(tuple(order.secret))
        self._folder = RuntimeFolder()
        self._ends = ControlEnds(self._folder.control)
        self._run_task = asyncio.create_task(self._run(), name="controller")

    async def journal(self, after: int) -> bytes:
        return encode(await self._reporter.after(after))

    async def state(self) -> bytes:
        replicas = self._replicas
        units = [unit for unit in self._reservations if not unit.dismissed] if replicas is not None else []
        processes = [
            PlacedProcess(
                unit.name,
                "engine" if unit.model else "gateway",
                unit.model,
                unit.replica,
                unit.endpoint,
                self._nodes.get(unit, ""),
                unit.machine,
                unit.up.is_set() if unit.model else unit.must_answer,
            )
            for unit in units
        ]
        stopping = self._supervisor is not None and self._supervisor.stopping
        return encode(ServerState(__version__, self._detached, stopping, processes))

    async def stop(self, now: bool) -> None:
        """Drains everything and ends; `now`: without draining."""
        if self._supervisor is not None:
            if now:
                self._supervisor.stop()
            self._supervisor.stop()

    async def control_open(self, owner: str, connection: str) -> None:
        await self._ends.open(owner, connection)

    async def control_send(self, connection: str, data: bytes) -> None:
        self._ends.send(connection, data)

    async def control_receive(self, connection: str) -> bytes | None:
        return await self._ends.receive(connection)

    async def control_close(self, connection: str) -> None:
        self._ends.close(connection)

    def _urls(self) -> list[str]:
        return [unit.endpoint for unit in self._gateways]

    async def _run(self) -> None:
        problem = ""
        try:
            await self._serve()
        except PenstockError as error:
            problem = str(error)
        except Exception as error:
            problem = f"the controller failed: {type(error).__name__}: {error}"
        finally:
            for reservation in self._reservations.values():
                reservation.release()
            if self._gateway_group is not None:
                cluster.release(self._gateway_group)
            self._folder.close()
            self._reporter.add(Stopped(problem))

    async def _serve(self) -> None:
        config = self._config
        if found := problems(config, cluster.nodes()):
            raise PenstockError("\n".join(found))
        catalogue = RayCatalogue(config, self._folder)
        self._engines = [
            catalogue.unit(model.name, index) for model in config.models for index in range(model.first_replicas)
        ]
        count = config.cluster.gateways
        self._gateways = [Unit("gateway" if count == 1 else f"gateway {number}", []) for number in range(count)]
        bundle = gateway_bundle(config)
        name = f"{config.fleet.name} gateways"
        self._gateway_group = cluster.reserve([bundle] * count, strategy="STRICT_SPREAD", name=name)
        for number, unit in enumerate(self._gateways):
            self._reservations[unit] = SharedReservation(unit.name, bundle, number, self._gateway_group)
        self._supervisor = supervisor = Supervisor(
            engines=self._engines,
            gateways=self._gateways,
            host="",
            port=0,
            drain_s=config.server.drain_s,
            reporter=self._reporter,
            frozen_s=config.resilience.frozen_s,
            spawn=self._spawn,
            answers=self._gateways_answer,
        )
        self._catalogue = catalogue
        self._replicas = replicas = Replicas(
            supervisor,
            self._engines,
            catalogue.unit,
            catalogue,
            max_engines=config.server.max_engines,
            describe=self._describe,
        )
        autoscaler = ReplicaAutoscaler(replicas, lambda: catalogue.autoscaled, reporter=self._reporter)
        sweeper = asyncio.create_task(self._sweep(), name="sweep")
        try:
            async with ControlServer(self._folder.control, replicas, autoscaler):
                await supervisor.run(handle_signals=False)
        finally:
            sweeper.cancel()

    def _prefer(self, unit: Unit, bundle: Bundle) -> str:
        """The node on which a replica should be."""
        reserved = [
            Reserved(reservation.likely_node, reservation.bundle, other.model)
            for other, reservation in self._reservations.items()
            if other is not unit
        ]
        now = time.monotonic()
        nodes = [node for node in cluster.nodes() if now > self._distrusted.get(node.id, 0.0)]
        return preferred_node(bundle, unit.model, nodes, reserved, self._config.cluster.replicas)

    def _distrust(self, node: str) -> None:
        """A host was lost there; Ray may need a while to notice that the node is."""
        self._distrusted[node] = time.monotonic() + DISTRUST_S

    async def _gateways_answer(self) -> bool:
        return all(unit.must_answer for unit in self._gateways)

    async def _spawn(
        self, unit: Unit, *, on_line: Callable[[str], None], on_status: Callable[[Status], None]
    ) -> RemoteProcess:
        if unit not in self._reservations:
            bundle = engine_bundle(self._config, self._catalogue.settings(unit), cluster.nodes())
            name = f"{self._config.fleet.name} {unit.name}"
            self._reservations[unit] = Reservation(
                name, bundle, lambda bundle: self._prefer(unit, bundle), self._distrust
            )
        reservation = self._reservations[unit]
        if unit.model:

            async def start(host: Any, place: Place) -> None:
                order = self._engine_order(unit, reservation)
                endpoint = await host.start.remote(encode(order), place.address)
                self._settle(unit, place, endpoint, on_line)

            return RemoteProcess(unit.name, EngineHost, reservation, start, on_line=on_line, on_status=on_status)
        owner = uuid.uuid4().hex

        async def start_gateway(host: Any, place: Place) -> None:
            order = Order(dataclasses.asdict(self._config), list(self._secret.secrets))
            url = await host.start.remote(encode(order), place.address, cluster.itself(), owner)
            self._settle(unit, place, url, on_line)

        return RemoteProcess(
            unit.name,
            GatewayHost,
            reservation,
            start_gateway,
            on_line=on_line,
            on_status=on_status,
            on_end=lambda: self._ends.close_of(owner),
        )

    def _engine_order(self, unit: Unit, reservation: Reservation) -> Order:
        settings = self._catalogue.settings(unit)
        config = engine_config(self._config, placed(settings, reservation.bundle))
        arguments = ["--role", unit.variant.role] if unit.variant.role else []
        return Order(dataclasses.asdict(config), list(self._secret.secrets), unit.model, arguments)

    def _describe(self, unit: Unit) -> Replica:
        """How gateways reach a replica."""
        return Replica(unit.replica, unit.endpoint, self._secret.engine_public_key, unit.machine, unit.pool)

    def _settle(self, unit: Unit, place: Place, endpoint: str, on_line: Callable[[str], None]) -> None:
        """A unit has found its place."""
        unit.endpoint, unit.machine, self._nodes[unit] = endpoint, place.name, place.node
        on_line(f"on node {place.name} ({place.address}), {endpoint}")
        if unit.model and self._replicas is not None:
            self._replicas.moved()

    async def _sweep(self) -> None:
        """Gives back the room of replicas that were removed or drained."""
        while True:
            await asyncio.sleep(SWEEP_S)
            for unit, reservation in tuple(self._reservations.items()):
                over = unit.child is None or not unit.child.alive
                if over and (unit.dismissed or unit.paused):
                    reservation.release()
                    if unit.dismissed:
                        del self._reservations[unit]
                        self._nodes.pop(unit, None)
