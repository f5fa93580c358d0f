"""What a machine offers to the fleet, and which port and device each of its engines gets."""

from __future__ import annotations

import dataclasses
import logging
import socket
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import penstock
from penstock.config import ModelConfig
from penstock.config.fleet import FleetConfig
from penstock.errors import PenstockError
from penstock.fleet.devices import NOTHING, Claim, claim, take
from penstock.fleet.membership import machine_name, own_address
from penstock.fleet.records import VARIANTS, Device, MachineRecord
from penstock.machine import usable_cores, usable_memory
from penstock.protocol.address import is_loopback
from penstock.supervisor.unit import Unit

log = logging.getLogger("penstock.fleet")


def default_room() -> int:
    """Engines that this machine may run when nobody says: one per GPU, or one per two cores."""
    return len(_devices()) or max(usable_cores() // 2, 1)


def describe_machine(config: FleetConfig, room: int) -> MachineRecord:
    """This machine. `room`: how many engines it may run."""
    address = own_address(config)
    if is_loopback(address):
        log.warning("other machines cannot reach %s; set fleet.advertise if there are any", address)
    return MachineRecord(
        name=machine_name(config),
        address=address,
        cpus=usable_cores(),
        memory=usable_memory().available,
        devices=_devices(),
        labels=list(config.labels),
        region=config.region,
        zone=config.zone,
        room=room,
        version=penstock.__version__,
        understands=[VARIANTS],
    )


def _devices() -> list[Device]:
    """The GPUs; without the driver or its Python package there are none."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    return [
        Device(str(pynvml.nvmlDeviceGetName(one)), int(pynvml.nvmlDeviceGetMemoryInfo(one).total)) for one in handles
    ]


@dataclass(frozen=True, slots=True)
class _Used:
    """What an engine of this machine has."""

    port: int = 0
    claim: Claim = NOTHING
    devices: tuple[int, ...] = ()


class MachineSite:
    """Ports and devices of one machine's engines."""

    def __init__(self, config: FleetConfig, machine: MachineRecord) -> None:
        self._ports = config.port_range()
        self._address = machine.address
        # Behind a port mapping the advertised address is not one of this machine's own.
        self._listen = machine.address if is_loopback(machine.address) else "0.0.0.0"
        self._gpus = len(machine.devices)
        self._next = _Used()
        self._used: dict[Unit, _Used] = {}

    def endpoints(self) -> tuple[str, str]:
        first, last = self._ports
        taken = {used.port for unit, used in self._used.items() if not _over(unit)}
        for port in range(first, last + 1):
            if port not in taken and self._free(port):
                self._next = _Used(port)
                return f"tcp://{self._listen}:{port}", f"tcp://{_bracketed(self._address)}:{port}"
        raise PenstockError(f"no free port in fleet.ports ({first}-{last}) for another engine")

    def device(self, model: ModelConfig) -> str | None:
        """The first of as many free neighbours as the model needs; models that take turns have the same. Raises when
        they are not free."""
        wanted = claim(model, self._gpus)
        if not wanted.devices or not self._gpus:
            self._next = dataclasses.replace(self._next, claim=Claim(group=wanted.group))
            return None if model.device == "auto" else model.device
        running = [used for unit, used in self._used.items() if not _over(unit)]
        mates = [used.devices for used in running if wanted.group and used.claim.group == wanted.group]
        found = mates[0] if mates else take(self._taken(running), wanted)
        if found is None:
            named = "" if not wanted.certain else f" ({', '.join(f'cuda:{index}' for index in wanted.certain)})"
            raise PenstockError(f"this machine has no {wanted.devices} free GPUs{named} for another engine")
        self._next = dataclasses.replace(self._next, claim=wanted, devices=found)
        return None if model.devices else f"cuda:{found[0]}"

    def _taken(self, running: Sequence[_Used]) -> list[float]:
        """The share of each GPU that is in use."""
        taken, groups = [0.0] * self._gpus, set[str]()
        for used in running:
            if used.claim.group not in groups or not used.claim.group:
                groups.add(used.claim.group)
                for index in used.devices:
                    taken[index] += used.claim.share
        return taken

    def started(self, unit: Unit) -> None:
        self._used = {other: used for other, used in self._used.items() if not _over(other)}
        self._used[unit] = self._next

    def _free(self, port: int) -> bool:
        with closing(socket.socket()) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self._listen, port))
            except OSError:
                return False
            return True


def _over(unit: Unit) -> bool:
    ended = unit.dismissed or (unit.superseded and unit.paused)
    return ended and (unit.child is None or not unit.child.alive)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
