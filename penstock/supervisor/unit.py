"""A supervised process: how to start it, and its state."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.config.variants import PLAIN, Variant
from penstock.engine.request import EngineInfo
from penstock.supervisor.child import Process
from penstock.supervisor.heartbeat import Heartbeat


@dataclass(slots=True, eq=False)
class Unit:
    """A process that the supervisor keeps running."""

    name: str
    command: Sequence[str]
    model: str = ""
    """For an engine: its model, replica number and endpoint."""
    replica: str = ""
    endpoint: str = ""
    """Empty: not known before it was placed on a machine."""
    variant: Variant = PLAIN
    """How it differs from other replicas of its model."""
    revision: str = ""
    """Of the settings that it was built from."""
    machine: str = ""
    """Where it is, if not here."""
    save_s: float = 0.0
    """How long it may take to save what outlives it, when it ends."""
    on_progress: Callable[[str, float], None] | None = None
    """Called with the progress of its startup."""
    optional: bool = False
    """Started on demand; the server is ready without it."""
    autostart: bool = False
    """An optional unit that is started without demand, once the others are ready."""
    added_later: bool = False
    """Added while the server was running: if it cannot start, only this unit fails."""
    start_requested: asyncio.Event = field(default_factory=asyncio.Event)
    child: Process | None = None
    heartbeat: Heartbeat | None = None
    """Heartbeats of the current process."""
    must_answer: bool = False
    """Its heartbeats come from its event loop, so silence means that it hangs."""
    info: EngineInfo | None = None
    problem: str | None = None
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it was ready for the first time."""
    spawned_at: float = 0.0
    """When the current process was started; see `HEAD_START_S` for one that then waited for its command."""
    ready_at: float | None = None
    """When the current process became ready."""
    up: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while the current process is ready."""
    crashed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a process exited unexpectedly."""
    stop_requested: bool = False
    """The current process was told to stop, so its exit is expected."""
    paused: bool = False
    """Not restarted until `renew`."""
    noticed: bool = False
    """Its machine goes away soon; a replacement takes over."""
    superseded: bool = False
    """Another replica with newer settings takes its place as soon as that is ready; until then it serves, where both
    fit, or is paused."""
    successor: Unit | None = None
    """The replica that takes its place, once it is being started."""
    gave_way_to: str = ""
    """The newer settings for which it was stopped, and which could not be started."""
    dismissed: bool = False
    """Never restarted."""

    @property
    def pool(self) -> str:
        """Of its model's pools; empty: there are none."""
        return self.variant.pool
