"""A port: accepts connections, and lets them go."""

from __future__ import annotations

import asyncio
import socket

from penstock.gateway.http.connection import Application, Connection, Connections, Failure

BACKLOG = 4096


class Listener:
    """HTTP/1.1 without TLS on one address. The socket is bound with SO_REUSEPORT, so that processes can share it."""

    def __init__(
        self,
        app: Application,
        failed: Failure,
        host: str,
        port: int,
        *,
        head_limit: int,
        receive_s: float,
        room: int,
    ) -> None:
        """`failed`: told of what `app` lets escape. `head_limit`: bytes of a request line and headers. `receive_s`: how
        long a connection may send no request, or take to send the head of one. `room`: the most connections."""
        self._address = host, port
        self._shared = Connections(app, failed, head_limit=head_limit, receive_s=receive_s, room=room)
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when connections are accepted."""
        loop, shared = asyncio.get_running_loop(), self._shared
        self._server = await loop.create_server(
            lambda: Connection(shared), sock=_bound(*self._address), backlog=BACKLOG
        )
        self._sweeper = asyncio.create_task(self._sweep(), name="http sweeper")

    async def close(self, within: float) -> None:
        """Accept nothing more; let what is being answered end, cut what has not after `within` seconds."""
        if self._server is None or self._sweeper is None:
            return
        shared = self._shared
        shared.closing = True
        self._server.close()
        for connection in list(shared.open):
            connection.close_when_idle()
        if shared.tasks:
            await asyncio.wait(list(shared.tasks), timeout=within)
        self._sweeper.cancel()
        for task in list(shared.tasks):
            task.cancel()
        await asyncio.gather(self._sweeper, *shared.tasks, return_exceptions=True)
        for connection in list(shared.open):
            connection.abort()
        await asyncio.sleep(0)

    async def _sweep(self) -> None:
        interval = min(1.0, self._shared.receive_s / 4)
        while True:
            await asyncio.sleep(interval)
            self._shared.sweep()


def _bound(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listening.bind(address)
    except BaseException:
        listening.close()
        raise
    listening.setblocking(False)
    return listening
