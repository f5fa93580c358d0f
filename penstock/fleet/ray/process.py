"""A process on some node of the cluster, as the supervisor sees it.

It waits for room, runs a host there and follows its events. A host that is lost before its process was up is placed
again; one that is lost later ends the process, and the supervisor starts the next one, which waits for room in turn.
A bundle outlives the process that crashes in it, so that nobody else takes its room; a lost node's does not.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from penstock import __version__
from penstock.errors import PenstockError
from penstock.fleet.ray import cluster
from penstock.fleet.ray.bundle import Bundle
from penstock.fleet.ray.messages import Ended, HostEvents, Line, Place, Told, decode
from penstock.supervisor.status import Failed, Listening, Progress, Started, Status

LOOK_S = 0.2
"""How often to look whether there is room."""
SAY_S = 5.0
"""How long to wait for room before saying so."""
UNAVAILABLE_S = 5.0
"""How long a host may be out of reach before it counts as lost."""
AGAIN_S = 1.0
"""Pause before a lost host is placed again."""

log = logging.getLogger("penstock.fleet")


class Reservation:
    """Room for one process: a bundle of a placement group, which is made when it is first needed."""

    def __init__(
        self,
        name: str,
        bundle: Bundle,
        prefer: Callable[[Bundle], str] = lambda bundle: "",
        on_lost: Callable[[str], None] = lambda node: None,
    ) -> None:
        """`prefer`: the node on which the bundle should be if there is room; empty: any. `on_lost` is told the node of
        a host that was lost."""
        self._on_lost = on_lost
        self._name = name
        self._prefer = prefer
        self._wished = ""
        self.bundle = bundle
        self.index = 0
        self._group: Any = None

    def group(self) -> Any:
        if self._group is None:
            self._wished = self._prefer(self.bundle)
            self._group = cluster.reserve([self.bundle], strategy="STRICT_PACK", name=self._name, node=self._wished)
        return self._group

    def node(self) -> str:
        """The node with the room; empty while there is none."""
        return cluster.placed_nodes(self.group()).get(self.index, "")

    @property
    def likely_node(self) -> str:
        """Where it is, or will probably be; empty: nothing is reserved."""
        return "" if self._group is None else self.node() or self._wished

    def lost(self) -> None:
        """The node is gone, or at least the host on it: look for another one."""
        if self._group is not None:
            self._on_lost(self.likely_node)
        self.release()

    def release(self) -> None:
        if self._group is not None:
            group, self._group = self._group, None
            cluster.release(group)


class SharedReservation(Reservation):
    """One bundle of a group that spreads several over nodes; Ray finds another node for it by itself."""

    def __init__(self, name: str, bundle: Bundle, index: int, group: Any) -> None:
        super().__init__(name, bundle)
        self.index = index
        self._group = group

    def lost(self) -> None:
        pass

    def release(self) -> None:
        pass


class RemoteProcess:
    """Implements `supervisor.child.Process`."""

    def __init__(
        self,
        name: str,
        kind: type,
        reservation: Reservation,
        start: Callable[[Any, Place], Coroutine[Any, Any, None]],
        *,
        on_line: Callable[[str], None],
        on_status: Callable[[Status], None],
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """`start`: has the host, whose place is known, start its process."""
        self.name = name
        self._kind = kind
        self._reservation = reservation
        self._start = start
        self._on_line = on_line
        self._on_status = on_status
        self._on_end = on_end
        self._host: Any = None
        self._started = False
        """The host has started the process."""
        self._up = False
        """The process was ready."""
        self._end: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(), name=f"host of {name}")

    @property
    def alive(self) -> bool:
        return not self._end.done()

    async def wait(self) -> int:
        code, _ = await asyncio.shield(self._end)
        with suppress(asyncio.CancelledError, Exception):
            await asyncio.shield(self._task)
        return code

    def terminate(self) -> None:
        if self._started and self._host is not None:
            self._host.stop.remote(False)
        else:
            self._finish(-signal.SIGTERM, "stopped before it was placed")

    def kill(self) -> None:
        self._finish(-signal.SIGKILL, "killed")

    def describe(self, code: int) -> str:
        return self._end.result()[1] if self._end.done() else f"exit code {code}"

    def _finish(self, code: int, how: str) -> None:
        """Ends it, if it has not ended."""
        if not self._end.done():
            self._end.set_result((code, how))
            self._task.cancel()

    async def _run(self) -> None:
        try:
            while not self._end.done():
                try:
                    await self._run_host()
                except Exception as error:
                    if not cluster.is_lost(error):
                        self._on_status(Failed(cluster.reason(error)))
                        self._finish_late(1, cluster.reason(error))
                    elif self._up:
                        self._finish_late(-signal.SIGKILL, f"its node or actor was lost: {cluster.reason(error)}")
                        self._reservation.lost()
                    else:
                        self._on_line(f"lost while it started: {cluster.reason(error)}; it is placed again")
                        self._drop_host()
                        self._reservation.lost()
                        await asyncio.sleep(AGAIN_S)
        finally:
            self._drop_host()
            self._on_end()

    def _finish_late(self, code: int, how: str) -> None:
        if not self._end.done():
            self._end.set_result((code, how))

    def _drop_host(self) -> None:
        host, self._host, self._started = self._host, None, False
        if host is not None:
            with suppress(Exception):
                cluster.kill(host)

    async def _run_host(self) -> None:
        """One host, until its process ends."""
        await self._wait_for_room()
        reservation = self._reservation
        self._on_status(Progress("starting on a node", 0.0))
        self._host = host = cluster.make_host(
            self._kind, reservation.group(), reservation.index, reservation.bundle, self.name
        )
        place = decode(Place, await host.where.remote())
        if place.version != __version__:
            raise PenstockError(
                f"node {place.name} ({place.address}) has Penstock {place.version}, the server is {__version__}; "
                "install the same on every node"
            )
        await self._start(host, place)
        self._started = True
        number = 0
        while True:
            batch = decode(HostEvents, await self._events(host, number))
            number = batch.first + len(batch.events)
            for event in batch.events:
                match event:
                    case Line(text):
                        self._on_line(text)
                    case Told(status):
                        self._up = self._up or isinstance(status, Started | Listening)
                        self._on_status(status)
                    case Ended(code, how):
                        self._finish_late(code, how)
                        return

    async def _events(self, host: Any, number: int) -> bytes:
        """The events of a host from a number on; a connection that breaks for a moment is not a lost host."""
        deadline = time.monotonic() + UNAVAILABLE_S
        while True:
            try:
                return bytes(await host.events.remote(number))
            except Exception as error:
                if not cluster.is_unavailable(error) or time.monotonic() > deadline:
                    raise
            await asyncio.sleep(LOOK_S)

    async def _wait_for_room(self) -> None:
        began, said = time.monotonic(), False
        while not self._reservation.node():
            if not said and time.monotonic() - began > SAY_S:
                said = True
                needs = f"waiting for room on the cluster ({self._reservation.bundle})"
                self._on_status(Progress(needs, 0.0))
                log.warning("%s: %s", self.name, needs)
            await asyncio.sleep(LOOK_S)
