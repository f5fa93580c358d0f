"""Ranks on other machines, as rank 0 sees them. Who meets those machines, and over what, is not the engine's business:
`engine_host` implements `Machines` and hands it in.
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import IO, Protocol

from penstock.engine.config import EngineConfig


class RankProcess(Protocol):
    """What rank 0 needs of the process of another rank; `subprocess.Popen` has it."""

    @property
    def pid(self) -> int: ...

    @property
    def stdin(self) -> IO[bytes] | None: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int | None:
        """Raises `subprocess.TimeoutExpired`."""
        ...

    def kill(self) -> None: ...


class RemoteRank(RankProcess, Protocol):
    """A rank on another machine. It has ended when its process has, or when its machine cannot be reached."""

    connection: Connection
    """To the rank, like that of a local one."""

    @property
    def ended(self) -> str:
        """Why, once it has."""
        ...

    @property
    def replaceable(self) -> bool:
        """Whether its machine is still there, so that another can be started."""
        ...


class Machines(Protocol):
    """The other machines of one engine."""

    def gather(self, config: EngineConfig) -> None:
        """Wait until every machine of the placement has joined; ConfigError when one has not in time."""
        ...

    def rank(self, rank: int) -> RemoteRank:
        """A rank on another machine, which has been told to start."""
        ...

    def link(self, rank: int) -> Connection:
        """For the tensors of a rank on this machine; see `Link`. Each time another, in place of the one before."""
        ...

    def interrupt(self, generation: int) -> None:
        """A rank of a generation is gone: tell all others, which may wait for it; see `Link`. From any thread."""
        ...

    def begin(self, generation: int) -> None:
        """Ranks are started again: those of other machines that are lost from now on are of this generation."""
        ...

    def restart(self, rank: int, config: EngineConfig, generation: int) -> RemoteRank:
        """Start a rank of another machine again."""
        ...

    def close(self) -> None: ...
