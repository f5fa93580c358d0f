"""Which machines the ranks of an engine run on, and where those machines meet it."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config.fields import setting
from penstock.engine.config import LOCAL
from penstock.protocol.address import is_loopback


@dataclass(frozen=True, slots=True)
class PlacementConfig:
    """Ranks on other machines, which take part with `penstock join`."""

    machines: tuple[str, ...] = setting(
        (), doc="Machine of each pipeline stage, or of each rank: local, or the NAME of `penstock join --as NAME`.",
        example="[local, host-b]",
    )  # fmt: skip
    listen: str = setting(
        "", doc="Where the other machines join, as tcp://HOST:PORT; replica N listens N ports higher.",
        example="tcp://0.0.0.0:7001",
    )  # fmt: skip
    curve_key: str = setting("", doc="File with this engine's CURVE secret key.", example="head.key")
    curve_clients: str = setting(
        "", doc="File with the CURVE public keys of the machines that may join, one per line.", example="machines.txt"
    )
    join_s: float = setting(600.0, doc="Seconds in which all machines must join when the engine starts.", least=1)

    def ranks(self, tensor: int, pipeline: int) -> tuple[str, ...]:
        """The machine of each rank."""
        if len(self.machines) == tensor * pipeline:
            return self.machines
        return tuple(machine for machine in self.machines for _ in range(tensor))

    def endpoint(self, replica: int) -> str:
        """Where the machines of one replica join."""
        host, _, port = self.listen.rpartition(":")
        return f"{host}:{int(port) + replica}"

    def problems(self, tensor: int, pipeline: int) -> list[str]:
        """Mistakes, for an engine of this shape."""
        problems = []
        stages, ranks, count = pipeline, tensor * pipeline, len(self.machines)
        if count not in (stages, ranks):
            problems.append(
                f"machines: {count} are named; name {stages}, one per pipeline stage, or {ranks}, one per rank"
            )
        elif self.machines[0] != LOCAL:
            problems.append(f"machines: the first is this one: {LOCAL}")
        if not all(self.machines):
            problems.append("machines: a name is empty")
        scheme, _, address = self.listen.partition("://")
        host, _, port = address.rpartition(":")
        if scheme != "tcp" or not host or not port.isdecimal() or not 0 < int(port) < 65536:
            problems.append("listen: tcp://HOST:PORT is needed, where the other machines can reach this one")
        elif bool(self.curve_key) != bool(self.curve_clients):
            problems.append("curve_key and curve_clients must be given together")
        elif not self.curve_key and not is_loopback(host):
            problems.append(
                "curve_key, curve_clients: needed where other machines can join; see `penstock engine --make-curve-key`"
            )
        return problems
