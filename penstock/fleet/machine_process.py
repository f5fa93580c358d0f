"""One machine of a fleet, put together: supervisor, agent, controller, and, with `penstock serve`, gateways."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

import penstock
from penstock.config import Config, ModelConfig
from penstock.config.fleet import FleetConfig
from penstock.errors import ConfigError, PenstockError
from penstock.fleet.controller import Controller
from penstock.fleet.gateway_side import FleetScaler
from penstock.fleet.machine import Machine
from penstock.fleet.machine_site import MachineSite, describe_machine
from penstock.fleet.machine_usage import Usage
from penstock.fleet.membership import described, engine_model, open_registry
from penstock.fleet.operations import FleetOperations
from penstock.fleet.records import GatewayRecord, MachineRecord, ModelRecord, Record
from penstock.fleet.redis_registry import RedisRegistry
from penstock.fleet.registry import Fleet, Registry
from penstock.fleet.status import fleet_state
from penstock.fleet.topology import topology
from penstock.fleet.view import FleetView
from penstock.protocol.control import Topology
from penstock.protocol.fleet_secret import FleetSecret
from penstock.supervisor.catalogue import ModelCatalogue
from penstock.supervisor.control import ControlServer
from penstock.supervisor.launch import encoders, gateways, worker_coordinator
from penstock.supervisor.replicas import Replicas
from penstock.supervisor.reporter import Reporter
from penstock.supervisor.runtime import RuntimeFolder
from penstock.supervisor.supervisor import ENGINE_GRACE_S, Supervisor
from penstock.supervisor.unit import Unit

log = logging.getLogger("penstock.fleet")

WAIT_NOTE_S = 5.0


@dataclass(frozen=True, slots=True)
class MachineRole:
    """What this machine does in the fleet."""

    room: int
    """Engines that it may run."""
    serves: bool = False
    """It has gateways, and its models are those of the fleet."""
    pins: Mapping[str, int] | None = None
    """Replicas by model that it runs whatever the controller says; None: what the controller says."""


async def run_machine(
    config: Config,
    originals: Sequence[ModelConfig],
    folder: RuntimeFolder,
    role: MachineRole,
    reporter: Reporter,
) -> None:
    """Runs until SIGTERM, or until it is told to leave. `config` must be resolved; `originals` are its models with
    their sources as the user gave them."""
    refuse_fixed(config)
    settings = config.fleet
    secret = FleetSecret.read(settings.secret_file)
    descriptions = {model.name: described(model) for model in originals}
    async with AsyncExitStack() as stack:
        registry, view = await stack.enter_async_context(joined(settings, secret))
        record = describe_machine(settings, role.room)
        record = msgspec.structs.replace(record, pinned=role.pins is not None)
        await _claim_name(record, view, settings.lease_s)
        if role.serves:
            refuse_second_gateway(config, view.fleet)
            await registry.publish(*(desired(view.fleet, model, descriptions[model.name]) for model in originals))
        described_models = [engine_model(description) for description in descriptions.values()]
        catalogue = ModelCatalogue(config, folder, site=MachineSite(settings, record), originals=described_models)
        engines = _first_units(catalogue, _first_replicas(config, role, view.fleet, record.name))
        gateway_units = []
        gateways_up = lambda: True  # noqa: E731
        if role.serves:
            more, endpoints = encoders(config, folder)
            engines += more
            gateway_units = gateways(config, folder, endpoints, ["--control", str(folder.control)])
            gateways_up = await stack.enter_async_context(worker_coordinator(config, folder))
        supervisor = Supervisor(
            engines=engines,
            gateways=gateway_units,
            host=config.server.host,
            port=config.server.port,
            drain_s=config.server.drain_s,
            reporter=reporter,
            frozen_s=config.resilience.frozen_s,
            gateways_up=gateways_up,
            engine_grace_s=config.server.drain_s + ENGINE_GRACE_S,
        )
        replicas = Replicas(
            supervisor,
            engines,
            catalogue.unit,
            catalogue,
            max_engines=role.room,
            others=lambda: topology(view.fleet, besides=record.name),
            describe=lambda unit: machine.describe(unit),
        )
        for name in catalogue.names:
            replicas.know(name)
        machine = Machine(
            registry,
            view,
            supervisor,
            replicas,
            record,
            public_key=secret.engine_public_key,
            descriptions=descriptions,
            more=(lambda: _gateway(config, record, supervisor)) if role.serves else tuple,
            reachable=lambda: registry.available,
            busy=Usage().busy,
        )
        operations = FleetOperations(registry, view, machine.leave)
        controller = Controller(
            registry,
            view,
            record.name,
            lease_s=settings.lease_s,
            rebalance_s=settings.rebalance_s,
            reporter=reporter,
            reachable=lambda: registry.available,
        )
        if role.serves:
            scaler = FleetScaler(registry, view, record.name)
            control = await stack.enter_async_context(ControlServer(folder.control, replicas, scaler, operations))
            telling = _tell_gateways(view, settings.name, record.name, replicas, control)
            await stack.enter_async_context(beside(telling, "gateways"))
            await stack.enter_async_context(beside(restore_models(registry, view), "models"))
        else:
            stack.push_async_callback(replicas.close)
        await stack.enter_async_context(beside(machine.run(), "machine"))
        await stack.enter_async_context(beside(controller.run(), "controller"))
        _on_signals(machine, supervisor)
        await supervisor.run(handle_signals=False)
        await machine.goodbye()


def refuse_fixed(config: Config) -> None:
    """Settings that tie replicas to one machine cannot be used by a fleet, which places them."""
    for model in config.models:
        if model.placement is not None:
            raise ConfigError(
                f"`{model.name}`: placement says what each replica on one machine does, but in a fleet (fleet.url) the "
                "controller places replicas; leave it out"
            )
    if config.server.loaded_models:
        raise ConfigError("server.loaded_models: a fleet keeps loaded models in its registry; leave it out")


def refuse_second_gateway(config: Config, fleet: Fleet) -> None:
    """Models that take turns need one gateway, which decides whose turn it is."""
    others = sorted({one.url for one in fleet.gateways.values()})
    sliced = [model.name for model in config.models if model.time_slice]
    if sliced and others:
        raise ConfigError(
            f"models with time_slice ({', '.join(sliced)}) need a single gateway, which decides which one is awake, "
            f"but the fleet has one at {others[0]}; serve them from one machine only"
        )


def _first_units(catalogue: ModelCatalogue, first: Mapping[str, int]) -> list[Unit]:
    """The replicas that are started at once, as far as this machine has devices for them; the controller finds places
    for the others."""
    found = []
    for name, count in first.items():
        for index in range(count):
            try:
                found.append(catalogue.unit(name, index))
            except PenstockError as error:
                log.warning("a replica is not started here", extra={"model": name, "why": str(error)})
    return found


@asynccontextmanager
async def joined(
    settings: FleetConfig, secret: FleetSecret, *, required: bool = False
) -> AsyncIterator[tuple[RedisRegistry, FleetView]]:
    """A connection to the registry and a view of the fleet, once the registry has answered. `required`: it must now."""
    registry = await open_registry(settings, secret, required=required)
    try:
        view = FleetView(registry)
        async with beside(view.run(), "fleet view"):
            while not view.seen.is_set():
                try:
                    await asyncio.wait_for(view.seen.wait(), WAIT_NOTE_S)
                except TimeoutError:
                    log.warning("waiting for the registry", extra={"url": settings.url})
            yield registry, view
    finally:
        await registry.close()


@asynccontextmanager
async def beside(work: Coroutine[Any, Any, None], name: str) -> AsyncIterator[None]:
    """Runs `work` for as long as the block."""
    task = asyncio.create_task(work, name=name)
    try:
        yield
    finally:
        task.cancel()
        (ended,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(ended, Exception):
            log.error("%s failed", name, exc_info=ended)


def desired(fleet: Fleet, model: ModelConfig, description: Mapping[str, Any]) -> ModelRecord:
    """A model of the configuration as the fleet should serve it. What was scaled since stays, unless the configuration
    itself has changed."""
    known = fleet.models.get(model.name)
    if known is not None and known.replicas and known.description.get("source") != description.get("source"):
        running = [one.id for one in fleet.engines.values() if one.model == model.name]
        if running:
            raise ConfigError(
                f"`{model.name}`: the fleet runs it from {known.description.get('source')}; its source cannot become "
                f"{description.get('source')} while it runs ({running[0]}): give the new one another name, or unload "
                "the old one first"
            )
    # Without any replica it would be a model that is being unloaded.
    fresh = ModelRecord(name=model.name, description=dict(description), replicas=max(model.first_replicas, 1))
    if known is None or not known.replicas:
        return fresh
    same = _sizes(known.description) == _sizes(description)
    return msgspec.structs.replace(known, description=fresh.description) if same else fresh


def _sizes(description: Mapping[str, Any]) -> list[Any]:
    """What a description says about numbers of replicas."""
    pools = [(pool["name"], pool.get("replicas"), pool.get("autoscale")) for pool in description.get("pools", ())]
    return [description.get("replicas"), description.get("autoscale"), pools]


async def _claim_name(record: MachineRecord, view: FleetView, lease_s: float) -> None:
    """Two machines of one name would take each other's engines for their own. One that was killed is remembered for a
    lease."""
    if record.name in view.fleet.machines:
        log.info("waiting for the lease of an earlier process of this machine", extra={"machine": record.name})
    if not await view.wait_for(lambda fleet: record.name not in fleet.machines, lease_s * 2 + 5.0):
        raise ConfigError(
            f"the fleet has a machine called `{record.name}` already; give this one a name of its own: --as NAME, or "
            "fleet.machine in the configuration"
        )


def _first_replicas(config: Config, role: MachineRole, fleet: Fleet, machine: str) -> dict[str, int]:
    """Replicas that are started at once: what is pinned, or what no machine of the fleet runs yet."""
    if role.pins is not None:
        return dict(role.pins)
    if not role.serves:
        return {}
    elsewhere = {name for one in fleet.machines.values() for (name, _), count in one.replicas.items() if count}
    elsewhere |= {
        name for one in fleet.assignments.values() if one.machine in fleet.machines for name, _ in one.replicas
    }
    return {model.name: 0 if model.name in elsewhere else model.first_replicas for model in config.models}


def _gateway(config: Config, machine: MachineRecord, supervisor: Supervisor) -> list[Record]:
    state = "draining" if supervisor.stopping else "ready" if supervisor.announced.is_set() else "starting"
    return [
        GatewayRecord(
            machine=machine.name,
            url=f"http://{machine.address}:{config.server.port}",
            state=state,  # type: ignore[arg-type]
            region=machine.region,
            zone=machine.zone,
            version=penstock.__version__,
        )
    ]


async def restore_models(registry: Registry, view: FleetView) -> None:
    """A registry without any model has lost its data, because the last one cannot be unloaded: it gets them back."""
    known = dict(view.fleet.models)
    while True:
        await view.changed(1.0)
        if view.fleet.models:
            known = dict(view.fleet.models)
        elif known:
            log.warning("the registry has lost its models; they are published again", extra={"models": sorted(known)})
            try:
                await registry.publish(*known.values())
            except PenstockError as error:
                log.warning("the models could not be published again", extra={"why": str(error)})


async def _tell_gateways(view: FleetView, fleet: str, machine: str, replicas: Replicas, control: ControlServer) -> None:
    told: Topology | None = None
    while True:
        control.tell_fleet(fleet_state(fleet, view.fleet))
        found = topology(view.fleet, besides=machine)
        if found != told:
            told = found
            replicas.others_changed()
        await view.changed(1.0)


def _on_signals(machine: Machine, supervisor: Supervisor) -> None:
    def stop() -> None:
        # Before everything is up there is nothing to hand over.
        machine.leave() if supervisor.announced.is_set() else supervisor.stop()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop)
