"""The supervisor as admin endpoints use it: it starts and stops engines, and says how far models are loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from penstock.protocol.control import Loading, ModelScaling, Operation
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.fleet_state import FleetState


class Supervisor(Protocol):
    @property
    def loading(self) -> Mapping[str, Loading]:
        """The models that are being loaded, by name."""

    @property
    def scaling(self) -> Mapping[str, ModelScaling]:
        """The models that are scaled automatically, by name."""

    @property
    def fleet(self) -> FleetState | None:
        """The machines of the fleet; None: this server is alone."""

    async def ask(self, operation: Callable[[int], Operation]) -> None:
        """Have an operation carried out; returns when it is done, raises when it cannot be."""


class NoSupervisor:
    """For a gateway that was started without a supervisor: it cannot start or stop engines."""

    loading: Mapping[str, Loading] = {}
    scaling: Mapping[str, ModelScaling] = {}
    fleet: FleetState | None = None

    async def ask(self, operation: Callable[[int], Operation]) -> None:
        raise InvalidRequest(
            "This gateway was not started by `penstock serve`, so it cannot start or stop engines; use the tool that "
            "started them.",
            code="not_supervised",
        )
