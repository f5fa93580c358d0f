"""A process that should be running, and what became of it so far."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.engine.request import EngineInfo
from penstock.supervisor.child import Child
from penstock.supervisor.heartbeat import Heartbeat


@dataclass(slots=True, eq=False)
class Unit:
    """A process that should always be running."""

    name: str
    command: Sequence[str]
    model: str = ""
    """Of an engine: what it serves, as which replica, and where it listens."""
    replica: str = ""
    endpoint: str = ""
    on_progress: Callable[[str, float], None] | None = None
    """Told how far its start is."""
    optional: bool = False
    """Started when somebody asks for it; the rest can do without."""
    early: bool = False
    """An optional one that is started without being asked, once the others are ready."""
    late: bool = False
    """Came when the server was running already: when it cannot be started, only it is given up."""
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    child: Child | None = None
    pulse: Heartbeat | None = None
    """Of the present process."""
    info: EngineInfo | None = None
    problem: str | None = None
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once it has been ready for the first time."""
    ready_at: float | None = None
    """When the present process became ready."""
    up: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while the present process is ready."""
    fell: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a process ended by accident."""
    told: bool = False
    """The present process was told to leave; that it does is no accident."""
    paused: bool = False
    """Not started again until it is asked for."""
    dismissed: bool = False
    """Not started again."""
