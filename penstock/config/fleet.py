"""Many machines as one server: where they meet, and what this one is called."""

from __future__ import annotations

import re
from dataclasses import dataclass

from penstock.config.fields import setting


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """Engines and gateways on several machines, which find each other in a registry."""

    url: str = setting(
        "", doc="Where the machines meet: redis://HOST:PORT or rediss://HOST:PORT; empty: this machine is alone.",
        example="redis://redis:6379",
    )  # fmt: skip
    name: str = setting("penstock", doc="Name of the fleet; several may share a Redis.")
    secret_file: str = setting(
        "", doc="File with the secret that all machines share (`penstock fleet secret FILE` writes one). With several "
        "lines the first is used and all are accepted, so that it can be changed without a pause. The variable "
        "PENSTOCK_FLEET_SECRET has precedence.", example="/etc/penstock/fleet.secret",
    )  # fmt: skip
    machine: str = setting("", doc="Name of this machine, unique in the fleet; empty: its host name.")
    advertise: str = setting(
        "", doc="Address at which other machines reach this one; empty: the address it reaches the registry from.",
        example="10.0.0.7",
    )  # fmt: skip
    ports: str = setting("5600-5699", doc="Ports for the engines of this machine, as FIRST-LAST.")
    region: str = setting("", doc="Region of this machine.", example="eu-west")
    zone: str = setting("", doc="Zone of this machine in its region.", example="eu-west-1a")
    labels: tuple[str, ...] = setting((), doc="Labels of this machine, for placement.", example="[spot, h200]")
    lease_s: float = setting(
        10.0, doc="Seconds after which a machine that is no longer heard of counts as lost.", least=1, most=600
    )

    rebalance_s: float = setting(
        120.0, doc="Seconds for which machines must be unevenly used until a replica moves to another, one at a time; "
        "0: none does.", least=0,
    )  # fmt: skip

    def problems(self) -> list[str]:
        """Mistakes."""
        problems = []
        if self.url and not self.url.startswith(("redis://", "rediss://")):
            problems.append("url: redis://HOST:PORT or rediss://HOST:PORT is needed")
        if not re.fullmatch(r"[A-Za-z0-9._-]+", self.name):
            problems.append("name: letters, digits, dots, dashes and underscores only")
        first, last = self.port_range()
        if not 0 < first <= last < 65536:
            problems.append("ports: FIRST-LAST is needed, between 1 and 65535, such as 5600-5699")
        return problems

    def port_range(self) -> tuple[int, int]:
        """First and last port for engines; (0, 0) when `ports` is not a range."""
        found = re.fullmatch(r"(\d{1,5})-(\d{1,5})", self.ports)
        return (int(found[1]), int(found[2])) if found else (0, 0)
