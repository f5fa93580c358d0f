"""The catalogue: what devices can do and cost, and what public APIs ask.

The figures are data (`data/hardware.yaml`, `data/api_prices.yaml`), each with a source and a date. A user's file goes
over them key by key, so that a negotiated price is two lines.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Literal, get_args

from penstock.config.tree import Node
from penstock.errors import ConfigError
from penstock.machine import usable_cores, usable_memory
from penstock.planning.numbers import ComputeDType
from penstock.planning.records import Record, built_in, canonical, entries, find, merged, read_tree

DeviceKind = Literal["gpu", "cpu"]
PriceKind = Literal["on_demand", "reserved", "spot"]
PRICE_KINDS: tuple[PriceKind, ...] = get_args(PriceKind)
ARCHITECTURES = ("arm", "x86", "hopper")
SECTIONS = ("devices", "apis")
"""Of a user's file."""
_GIGA, _TERA, _MICRO = 1e9, 1e12, 1e-6
LISTING = "`penstock plan --hardware list` shows all, `--catalogue FILE` adds your own"


@dataclass(frozen=True, slots=True)
class Link:
    """What connects devices."""

    name: str
    bandwidth: float
    """Bytes per second, in one direction."""
    latency_s: float
    """Of one collective over it, however small."""


@dataclass(frozen=True, slots=True)
class Prices:
    """US dollars per device and hour; None where nobody lists one."""

    on_demand: float | None = None
    reserved: float | None = None
    """With a commitment of a year."""
    spot: float | None = None
    estimated: frozenset[str] = frozenset()
    """Which of them no page that we read gives: from memory, or derived from another."""

    def of(self, kind: PriceKind) -> float | None:
        return {"on_demand": self.on_demand, "reserved": self.reserved, "spot": self.spot}[kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One GPU, or the CPU of one machine."""

    name: str
    title: str = ""
    kind: DeviceKind
    memory_bytes: int
    bandwidth: float
    """Bytes per second that its memory gives."""
    flops: Mapping[str, float] = field(hash=False)
    """Operations per second of dense matrix products, by `ComputeDType`; see `flops_in` for those that are missing."""
    link: Link
    network: Link
    devices_per_node: int = 1
    host_memory_bytes: int = 0
    """Per device; of a CPU, the same memory as `memory_bytes`."""
    cores: int = 0
    """Of CPUs only."""
    arch: str = ""
    """Of a CPU `arm` or `x86`; of a GPU `hopper`, or nothing."""
    prices: Prices = Prices()
    source: str = ""
    date: str = ""

    def flops_in(self, compute: ComputeDType) -> float:
        """Of a format, or of the narrowest wider one that the device has: FP8 weights on a GPU without FP8 units are
        widened as they are read."""
        wider: dict[str, tuple[str, ...]] = {
            "fp4": ("fp4", "fp8", "bf16", "fp32"),
            "fp8": ("fp8", "bf16", "fp32"),
            "int8": ("int8", "bf16", "fp32"),
            "bf16": ("bf16", "fp32"),
            "fp32": ("fp32", "bf16"),
        }
        return next(self.flops[name] for name in (*wider[compute], *self.flops) if name in self.flops)


@dataclass(frozen=True, slots=True)
class ApiPrice:
    """What a public API asks: US dollars per million tokens."""

    name: str
    input: float
    output: float
    cached_input: float | None = None
    """Of prompt tokens that the provider has cached; None: as `input`."""
    serves: str | None = None
    """The open-weights model behind it, by its name in `model_shape`."""
    source: str = ""
    date: str = ""

    @property
    def cached(self) -> float:
        return self.input if self.cached_input is None else self.cached_input


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Devices and API prices by name."""

    devices: Mapping[str, Device]
    apis: Mapping[str, ApiPrice]
    aliases: Mapping[str, str]
    """Other names of devices."""

    def device(self, name: str) -> Device:
        """ConfigError with the nearest names for one that is not there. `this-machine` is the CPU that this runs on."""
        if canonical(name) == THIS_MACHINE:
            return this_machine()
        return self.devices[find(name, self.devices, self.aliases, "device", LISTING)]

    @property
    def gpus(self) -> tuple[Device, ...]:
        return tuple(device for device in self.devices.values() if device.kind == "gpu")

    def api(self, name: str) -> ApiPrice:
        short = {entry.rpartition("/")[2]: entry for entry in reversed(list(self.apis))}
        return self.apis[find(name, self.apis, short, "API", "`penstock plan --api-price list` shows all")]


def load_catalogue(path: str | Path | None = None) -> Catalogue:
    """The built-in catalogue, with a user's file over it."""
    return _built_in() if path is None else catalogue_of(read_tree(Path(path)))


@lru_cache(maxsize=1)
def _built_in() -> Catalogue:
    return catalogue_of(Node({}, ""))


def catalogue_of(own: Node) -> Catalogue:
    """The built-in catalogue, with what `own` says over it."""
    known = entries(built_in("hardware.yaml"), "devices", SECTIONS)
    theirs = _named(entries(own, "devices", SECTIONS), _aliases(known))
    hardware = dict(merged(known, theirs))
    apis = dict(merged(entries(built_in("api_prices.yaml"), "apis", SECTIONS), _named(entries(own, "apis", SECTIONS))))
    return Catalogue(
        devices=MappingProxyType({name: _device(name, Record(name, node)) for name, node in hardware.items()}),
        apis=MappingProxyType({name: _api(name, Record(name, node)) for name, node in apis.items()}),
        aliases=MappingProxyType(_aliases(hardware)),
    )


def _aliases(hardware: Mapping[str, Node]) -> dict[str, str]:
    return {canonical(alias): name for name, node in hardware.items() for alias in Record(name, node).texts("aliases")}


def _named(theirs: Mapping[str, Node], aliases: Mapping[str, str] = MappingProxyType({})) -> dict[str, Node]:
    """A user's entries by the names that the built-in ones have: in any case, and by an alias."""
    found: dict[str, Node] = {}
    for written, node in theirs.items():
        name = aliases.get(canonical(written), canonical(written))
        if name in found:
            raise ConfigError(f"{node.origin}: {written} is {name}, which was already given at {found[name].origin}")
        found[name] = node
    return found


def devices() -> tuple[Device, ...]:
    """The built-in ones."""
    return tuple(load_catalogue().devices.values())


def device(name: str) -> Device:
    """A built-in one, by name or alias."""
    return load_catalogue().device(name)


def api_prices() -> tuple[ApiPrice, ...]:
    """The built-in ones."""
    return tuple(load_catalogue().apis.values())


THIS_MACHINE = "this-machine"


def this_machine() -> Device:
    """The CPU of this machine: its cores and memory, with the bandwidth and speed per core of the catalogue's nearest
    CPU of the same architecture, and with matrix tiles if it has them. It has no price."""
    cores = usable_cores()
    memory = usable_memory().total
    arch = "x86" if platform.machine().lower() in ("x86_64", "amd64") else "arm"
    cpus = [entry for entry in devices() if entry.kind == "cpu" and entry.arch == arch]
    if arch == "x86":
        cpus = [entry for entry in cpus if ("bf16" in entry.flops) == _has_matrix_tiles()]
    like = min(cpus, key=lambda entry: abs(entry.cores - cores))
    share = cores / like.cores
    return replace(
        like,
        name=THIS_MACHINE,
        title=f"this machine ({cores} cores)",
        cores=cores,
        memory_bytes=memory,
        host_memory_bytes=memory,
        bandwidth=like.bandwidth * share,
        flops=MappingProxyType({name: rate * share for name, rate in like.flops.items()}),
        prices=Prices(),
        source=f"cores and memory of this machine, speed per core of {like.name}",
    )


def _has_matrix_tiles() -> bool:
    """Whether this x86 CPU has AMX, as far as the system says."""
    try:
        return "amx_int8" in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False


def _device(name: str, record: Record) -> Device:
    record.texts("aliases")
    kind: DeviceKind = "gpu" if record.text("kind", choices=get_args(DeviceKind)) == "gpu" else "cpu"
    memory = record.size("memory")
    built = Device(
        name=name,
        title=record.text("title", name),
        kind=kind,
        memory_bytes=memory,
        bandwidth=record.number("bandwidth") * _GIGA,
        flops=MappingProxyType(
            {dtype: rate * _TERA for dtype, rate in record.numbers("tflops", get_args(ComputeDType)).items()}
        ),
        link=_link(record.inner("link")),
        network=_link(record.inner("network")),
        devices_per_node=record.whole("devices_per_node", 1),
        host_memory_bytes=record.size("host_memory"),
        cores=record.whole("cores", 0),
        arch=record.text("arch", "", ARCHITECTURES),
        prices=_prices(record.inner("price")),
        source=record.text("source", "not given"),
        date=record.text("date", "not given"),
    )
    record.done()
    return built


def _link(record: Record) -> Link:
    link = Link(record.text("name"), record.number("gb_s") * _GIGA, record.number("latency_us") * _MICRO)
    record.done()
    return link


def _prices(record: Record) -> Prices:
    prices = Prices(
        record.price("on_demand"), record.price("reserved"), record.price("spot"), frozenset(record.texts("estimated"))
    )
    record.done()
    return prices


def _api(name: str, record: Record) -> ApiPrice:
    price = ApiPrice(
        name=name,
        input=record.number("input"),
        output=record.number("output"),
        cached_input=record.price("cached_input"),
        serves=record.text("serves", "") or None,
        source=record.text("source", "not given"),
        date=record.text("date", "not given"),
    )
    record.done()
    return price
