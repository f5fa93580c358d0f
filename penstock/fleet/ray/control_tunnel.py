"""The control socket over actor calls: gateways on any node talk to the controller's supervisor.

On the gateway's node there is a Unix socket; what arrives on a connection to it is sent to the controller, which has
one connection to the real socket for each (`ControlEnds`). Bytes stay in order: the calls of one caller arrive in the
order in which they were made, and a call writes before it waits for anything.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

LARGEST = 2**20
WAIT_S = 30.0
"""How long a call for bytes waits for the first."""

log = logging.getLogger("penstock.fleet")


class ControlTunnel:
    """The gateway's end."""

    def __init__(self, path: Path, controller: Any, owner: str) -> None:
        """`owner`: names this end to the controller, which closes its connections when the host is gone."""
        self._path = path
        self._controller = controller
        self._owner = owner
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, self._path)
        self._path.chmod(0o600)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = uuid.uuid4().hex
        down: asyncio.Task[None] | None = None
        try:
            await self._controller.control_open.remote(self._owner, connection)
            down = asyncio.create_task(self._down(connection, writer), name="control tunnel")
            self._tasks.add(down)
            while data := await reader.read(LARGEST):
                await self._controller.control_send.remote(connection, data)
        except Exception as error:  # the controller is gone, and so will this host be
            log.error("the control connection of a gateway failed: %s", error)
        finally:
            if down is not None:
                self._tasks.discard(down)
                down.cancel()
            writer.close()
            with suppress(Exception):
                self._controller.control_close.remote(connection)

    async def _down(self, connection: str, writer: asyncio.StreamWriter) -> None:
        while (data := await self._controller.control_receive.remote(connection)) is not None:
            writer.write(data)
        writer.close()


class ControlEnds:
    """The controller's ends: one connection to the control socket for each connection of a gateway."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open: dict[str, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}
        self._owners: dict[str, str] = {}

    async def open(self, owner: str, connection: str) -> None:
        self._owners[connection] = owner
        self._open[connection] = await asyncio.open_unix_connection(self._path, limit=LARGEST)

    def send(self, connection: str, data: bytes) -> None:
        if connection in self._open:
            self._open[connection][1].write(data)

    async def receive(self, connection: str) -> bytes | None:
        """What has arrived; empty after a while without anything, None when the connection has ended."""
        if connection not in self._open:
            return None
        try:
            async with asyncio.timeout(WAIT_S):
                return await self._open[connection][0].read(LARGEST) or None
        except TimeoutError:
            return b""

    def close(self, connection: str) -> None:
        self._owners.pop(connection, None)
        if connection in self._open:
            self._open.pop(connection)[1].close()

    def close_of(self, owner: str) -> None:
        """Closes the connections of a host that is gone."""
        for connection in [connection for connection, found in self._owners.items() if found == owner]:
            self.close(connection)
