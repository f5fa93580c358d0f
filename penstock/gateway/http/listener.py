"""A listening port: accepts connections and closes them at the end.

Connections are accepted here in batches: libuv accepts one per iteration of the event loop, and under load, when an
iteration answers dozens of requests, new clients would wait for seconds while connected ones are served at once.
"""

from __future__ import annotations

import asyncio
import logging
import socket

from penstock.gateway.http.connection import Connection
from penstock.gateway.http.connections import Application, Connections, Failure

log = logging.getLogger("penstock.http")

BACKLOG = 4096
AT_ONCE = 64
"""Connections that are accepted in one iteration of the event loop."""
AGAIN_S = 0.1
"""How long to wait before accepting again when the system is out of resources."""
FLUSH_S = 0.01
"""How often to see whether the last replies have been sent, at the end."""


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
        stalled_reader_s: float,
        room_per_address: int | None = None,
    ) -> None:
        """`failed` is called with exceptions that `app` does not catch. `head_limit`: bytes of a request line and its
        headers. `receive_s`: how long a connection may be idle or take to send a head. `room`: most connections.
        `stalled_reader_s`: how long a client may leave a full buffer unread. `room_per_address`: most connections of
        one address."""
        self._address = host, port
        self._shared = Connections(
            app,
            failed,
            head_limit=head_limit,
            receive_s=receive_s,
            stalled_reader_s=stalled_reader_s,
            room=room,
            room_per_address=room_per_address,
        )
        self._listening: socket.socket | None = None
        self._again: asyncio.TimerHandle | None = None
        self._arriving: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when connections are accepted."""
        self._listening = _bound(*self._address)
        self._listening.listen(BACKLOG)
        self._watch()
        self._sweeper = asyncio.create_task(self._sweep(), name="http sweeper")

    async def close(self, within: float) -> None:
        """Stop accepting; let running requests finish for `within` seconds, then cancel them."""
        if self._listening is None or self._sweeper is None:
            return
        shared = self._shared
        shared.closing = True
        until = shared.loop.time() + within
        if self._again is not None:
            self._again.cancel()
        shared.loop.remove_reader(self._listening.fileno())
        self._listening.close()
        await asyncio.gather(*self._arriving, return_exceptions=True)
        for connection in list(shared.open):
            connection.close_when_idle()
        if shared.tasks:
            await asyncio.wait(list(shared.tasks), timeout=within)
        while (  # noqa: ASYNC110 (connections end in many ways, and there is no common event)
            shared.loop.time() < until and any(connection.sending for connection in shared.open)
        ):
            await asyncio.sleep(FLUSH_S)
        self._sweeper.cancel()
        for task in list(shared.tasks):
            task.cancel()
        await asyncio.gather(self._sweeper, *shared.tasks, return_exceptions=True)
        for connection in list(shared.open):
            connection.abort()
        await asyncio.sleep(0)

    def _watch(self) -> None:
        assert self._listening is not None
        self._again = None
        self._shared.loop.add_reader(self._listening.fileno(), self._accept)

    def _accept(self) -> None:
        assert self._listening is not None
        loop = self._shared.loop
        for _ in range(AT_ONCE):
            try:
                arrived, _ = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # out of file descriptors or memory, which is temporary
                log.error("cannot accept connections: %s", error)
                loop.remove_reader(self._listening.fileno())
                self._again = loop.call_later(AGAIN_S, self._watch)
                return
            arrived.setblocking(False)
            task = loop.create_task(self._welcome(arrived))
            self._arriving.add(task)
            task.add_done_callback(self._arriving.discard)

    async def _welcome(self, arrived: socket.socket) -> None:
        try:
            arrived.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._shared.loop.connect_accepted_socket(lambda: Connection(self._shared), arrived)
        except OSError as error:  # the client has disconnected already
            arrived.close()
            log.debug("a connection ended before it was set up: %s", error)

    async def _sweep(self) -> None:
        interval = min(1.0, self._shared.receive_s / 4, self._shared.stalled_reader_s / 4)
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
