"""The cluster manager that places gateways and engines on machines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.config.fields import setting


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """`penstock serve` on a cluster instead of on this machine."""

    kind: Literal["none", "ray"] = setting(
        "none", doc="none: this machine; ray: gateways and engines are actors of a Ray cluster (`--cluster ray`)."
    )
    address: str = setting(
        "auto", doc="Ray cluster: auto (the one of this machine), HOST:PORT of its head, or ray://HOST:PORT."
    )
    gateways: int = setting(
        1, doc="Gateways on the cluster, each on a node of its own with server.workers processes.", least=1, most=256
    )
    replicas: Literal["spread", "pack"] = setting(
        "spread", doc="Where a replica goes. spread: to the node with the fewest of its model, so that a lost node "
        "takes few; pack: to the fullest that has room, so that whole nodes stay free for large grids.",
    )  # fmt: skip
    gateway_cpus: float | None = setting(
        None, doc="CPU cores that a gateway reserves; when not set, one per worker.", least=0.01, example="2"
    )
