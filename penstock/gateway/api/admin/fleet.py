"""/v1/admin/fleet: the machines, gateways, engines and models of a fleet; and letting a machine leave it."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from penstock.gateway.api.admin.supervisor import Supervisor
from penstock.gateway.app.decoding import decode
from penstock.gateway.app.exchange import Exchange
from penstock.protocol.control import Leave
from penstock.protocol.errors import NotFound


class LeaveRequest(Struct, forbid_unknown_fields=True):
    """POST /v1/admin/fleet/machines/{machine}/drain"""

    seconds: Annotated[float, Meta(ge=0, le=86400)] | None = None
    """When the machine will be gone; by default when its replicas are replaced."""


_leave = msgspec.json.Decoder(LeaveRequest)


class FleetEndpoints:
    """The machines of a fleet."""

    def __init__(self, supervisor: Supervisor, body_limit: int) -> None:
        self._supervisor = supervisor
        self._body_limit = body_limit

    async def show_fleet(self, exchange: Exchange) -> None:
        fleet = self._supervisor.fleet
        if fleet is None:
            raise NotFound("This server is not part of a fleet: `fleet.url` is not set.")
        await exchange.reply_json({"object": "fleet", **msgspec.structs.asdict(fleet)})

    async def drain_machine(self, exchange: Exchange) -> None:
        request = decode(_leave, await exchange.body(self._body_limit) or b"{}")
        machine = exchange.path.removeprefix("/v1/admin/fleet/machines/").removesuffix("/drain")
        await self._supervisor.ask(lambda number: Leave(number, machine, request.seconds))
        await exchange.reply_json({"id": machine, "object": "machine", "state": "leaving"}, 202)
