"""What a machine offers to the fleet, and which port and device each of its engines gets."""

from __future__ import annotations

import logging
import os
import socket
from contextlib import closing
from pathlib import Path

import penstock
from penstock.config import ModelConfig
from penstock.config.fleet import FleetConfig
from penstock.errors import PenstockError
from penstock.fleet.membership import machine_name, own_address
from penstock.fleet.records import Device, MachineRecord
from penstock.protocol.address import is_loopback
from penstock.supervisor.unit import Unit

log = logging.getLogger("penstock.fleet")


def default_room() -> int:
    """Engines that this machine may run when nobody says: one per GPU, or one per two cores."""
    return len(_devices()) or max(_cores() // 2, 1)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe_machine(config: FleetConfig, room: int) -> MachineRecord:
    """This machine. `room`: how many engines it may run."""
    address = own_address(config)
    if is_loopback(address):
        log.warning("other machines cannot reach %s; set fleet.advertise if there are any", address)
    return MachineRecord(
        name=machine_name(config),
        address=address,
        cpus=_cores(),
        memory=_memory(),
        devices=_devices(),
        labels=list(config.labels),
        region=config.region,
        zone=config.zone,
        room=room,
        version=penstock.__version__,
    )


def _memory() -> int:
    """Bytes that engines could have."""
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 0


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


class MachineSite:
    """Ports and devices of one machine's engines."""

    def __init__(self, config: FleetConfig, machine: MachineRecord) -> None:
        self._ports = config.port_range()
        self._address = machine.address
        # Behind a port mapping the advertised address is not one of this machine's own.
        self._listen = machine.address if is_loopback(machine.address) else "0.0.0.0"
        self._gpus = len(machine.devices)
        self._next: tuple[int, frozenset[int]] = (0, frozenset())
        self._used: dict[Unit, tuple[int, frozenset[int]]] = {}

    def endpoints(self) -> tuple[str, str]:
        first, last = self._ports
        taken = {port for unit, (port, _) in self._used.items() if not _over(unit)}
        for port in range(first, last + 1):
            if port not in taken and self._free(port):
                self._next = (port, frozenset())
                return f"tcp://{self._listen}:{port}", f"tcp://{_bracketed(self._address)}:{port}"
        raise PenstockError(f"no free port in fleet.ports ({first}-{last}) for another engine")

    def device(self, model: ModelConfig, index: int) -> str | None:
        """The first of as many free neighbours as the model needs."""
        needed = gpus(model, index, self._gpus)
        if not needed or model.device not in ("auto", "cuda") or model.devices or model.memory_share is not None:
            return None
        busy = frozenset[int]().union(*(found for unit, (_, found) in self._used.items() if not _over(unit)))
        for first in range(self._gpus - needed + 1):
            wanted = frozenset(range(first, first + needed))
            if not wanted & busy:
                self._next = (self._next[0], wanted)
                return f"cuda:{first}"
        return None

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


def gpus(model: ModelConfig, index: int, available: int) -> int:
    """GPUs that one replica takes on a machine which has `available`; 0: it runs on the CPU, or shares one."""
    if model.device == "cpu" or (model.device == "auto" and not available) or model.memory_share is not None:
        return 0
    tensor, pipeline = model.grid(index)
    return tensor * pipeline


def _over(unit: Unit) -> bool:
    return unit.dismissed and (unit.child is None or not unit.child.alive)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
