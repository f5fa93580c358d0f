"""What a drill needs of a fleet, whoever started it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from penstock.fleet.drills.accounting import Attempt, Balance, Losses


class Victim(Protocol):
    """A process that can be killed. `start`: brings it back, unless somebody else does."""

    name: str

    @property
    def pid(self) -> int: ...
    @property
    def running(self) -> bool: ...
    def kill(self) -> None: ...
    def start(self) -> None: ...


class Target(ABC):
    """A fleet under drill."""

    urls: list[str]
    keys: list[str]
    """Those of its clients."""
    revoked: str
    """One that must not work; empty: not checked."""
    admin: str
    """Of the operator: scopes `metrics` and `admin`."""

    @property
    @abstractmethod
    def model_name(self) -> str: ...

    @property
    @abstractmethod
    def engines_per_gateway(self) -> int: ...

    @property
    def deterministic(self) -> bool:
        """Whether the same request always gets the same tokens, whatever runs beside it."""
        return True

    @property
    @abstractmethod
    def engine_victims(self) -> Sequence[Victim]: ...

    @property
    @abstractmethod
    def gateway_victims(self) -> Sequence[Victim]: ...

    @abstractmethod
    def logs(self) -> list[Path]:
        """Of gateways and engines, as far as they can be read."""

    @abstractmethod
    async def account(self, attempts: Sequence[Attempt], prefix: str, losses: Losses) -> Balance:
        """The ledger against what clients were told. `prefix`: of the request ids."""
