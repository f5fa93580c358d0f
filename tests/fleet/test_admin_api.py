"""The fleet in the admin API: what the supervisor tells its gateways, and a machine that is asked to leave."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from penstock.errors import PenstockError
from penstock.fleet.records import EngineRecord, GatewayRecord, MachineRecord, ModelRecord
from penstock.fleet.registry import Fleet
from penstock.fleet.status import fleet_state
from penstock.protocol.control import Topology
from penstock.supervisor.control import ControlServer
from penstock.supervisor.replicas import Replicas
from penstock.supervisor.supervisor import Supervisor
from tests.gateway.conftest import Serving, serving, text

__all__ = ["serving", "text"]

FLEET = Fleet.of(
    [
        MachineRecord(name="a", address="10.0.0.1", room=4, cpus=8, memory=2**34, zone="eu-1a"),
        MachineRecord(name="b", address="10.0.0.2", room=2, labels=["spot"], problems={"large": "out of memory"}),
        EngineRecord(machine="a", model="tiny", replica="0", endpoint="tcp://10.0.0.1:5600", device="cpu"),
        EngineRecord(machine="b", model="tiny", replica="0", endpoint="tcp://10.0.0.2:5600", state="starting"),
        GatewayRecord(machine="a", url="http://10.0.0.1:8000"),
        ModelRecord(name="tiny", description={}, replicas=2),
    ],
    controller="a",
    term=7,
)


class Commands:
    """Stands for the fleet's operations."""

    def __init__(self) -> None:
        self.left: list[tuple[str, float | None]] = []

    async def leave(self, machine: str, seconds: float | None) -> None:
        if machine != "b":
            raise PenstockError(f"the fleet has no machine `{machine}`")
        self.left.append((machine, seconds))


@asynccontextmanager
async def supervisor(folder: Path) -> AsyncIterator[tuple[Path, ControlServer, Commands]]:
    class Nothing:
        stopping = False

    replicas = Replicas(cast(Supervisor, Nothing()), [], cast(Any, None), others=lambda: Topology({"tiny": []}))
    commands = Commands()
    async with ControlServer(folder / "control", replicas, operations=cast(Any, commands)) as control:
        yield folder / "control", control, commands


async def test_the_fleet_is_shown_and_a_machine_can_be_drained(serving: Serving, tmp_path: Path) -> None:
    async with supervisor(tmp_path) as (path, control, commands):
        control.tell_fleet(fleet_state("ours", FLEET))
        async with serving(control=path) as gateway:
            state: dict[str, Any] = {}

            async def shown() -> dict[str, Any]:
                return dict((await gateway.client.get("/v1/admin/fleet")).json())

            while "machines" not in (state := await shown()):
                pass
            assert state["controller"] == "a" and state["name"] == "ours"
            assert [(one["name"], one["engines"], one["room"]) for one in state["machines"]] == [
                ("a", 1, 4),
                ("b", 1, 2),
            ]
            assert [one["id"] for one in state["engines"]] == ["tiny/a.0", "tiny/b.0"]
            (model,) = state["models"]
            assert (model["name"], model["wanted"], model["ready"], model["problem"]) == ("tiny", 2, 1, "")
            metrics = (await gateway.client.get("/metrics")).text
            assert 'penstock_fleet_missing_replicas{model_name="tiny"} 1' in metrics
            reply = await gateway.client.post("/v1/admin/fleet/machines/b/drain", json={"seconds": 60})
            assert reply.status_code == 202 and commands.left == [("b", 60.0)]
            wrong = await gateway.client.post("/v1/admin/fleet/machines/z/drain")
            assert wrong.status_code == 400 and "no machine `z`" in wrong.text


async def test_a_server_on_its_own_has_no_fleet(serving: Serving) -> None:
    async with serving() as gateway:
        reply = await gateway.client.get("/v1/admin/fleet")
        assert reply.status_code == 404 and "not part of a fleet" in reply.text
