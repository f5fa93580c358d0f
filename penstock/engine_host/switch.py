"""Passes messages between the ranks of this machine and a socket to the others: one thread, one loop.

Ranks have ordinary local connections and know nothing of the network. Each is read by the loop and written by a thread
of its own, so that a rank that is busy delays nobody: the loop never waits for anything but the next event.
"""

from __future__ import annotations

import queue
import socket as sockets
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message


class Port:
    """The loop's end of a local connection."""

    def __init__(self, connection: Connection, on_message: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        self.connection = connection
        self.fileno = connection.fileno()
        self.on_message = on_message
        self.on_end = on_end
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        threading.Thread(target=self._write, name="port", daemon=True).start()

    def send(self, message: bytes) -> None:
        self._queue.put(message)

    def close(self) -> None:
        """Once everything has been written."""
        self._queue.put(None)

    def _write(self) -> None:
        with suppress(OSError):
            while (message := self._queue.get()) is not None:
                self.connection.send_bytes(message)
        self.connection.close()


class Switch:
    """The loop. Everything but `call` and `stop` belongs to its thread."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket
        self._monitor: Any = socket.get_monitor_socket()
        self._ports: dict[int, Port] = {}
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._bell, self._button = sockets.socketpair()
        self._poller = zmq.Poller()
        for source in (socket, self._monitor, self._bell.fileno()):
            self._poller.register(source, zmq.POLLIN)
        self._stopped = False

    def attach(self, connection: Connection, on_message: Callable[[bytes], None], on_end: Callable[[], None]) -> Port:
        port = Port(connection, on_message, on_end)
        self._ports[port.fileno] = port
        self._poller.register(port.fileno, zmq.POLLIN)
        return port

    def detach(self, port: Port) -> None:
        """Read it no more; it is closed once everything for it has been written. Idempotent."""
        if self._ports.get(port.fileno) is port:  # its number may be that of another by now
            del self._ports[port.fileno]
            self._poller.unregister(port.fileno)
            port.close()

    def call(self, function: Callable[[], None]) -> None:
        """Have the loop run `function`; from any thread."""
        self._calls.put(function)
        with suppress(OSError):
            self._button.send(b"!")

    def stop(self) -> None:
        """From any thread."""

        def end() -> None:
            self._stopped = True

        self.call(end)

    def run(
        self,
        on_frames: Callable[[list[bytes]], None],
        on_event: Callable[[int], None],
        on_tick: Callable[[], None],
        tick_s: float,
    ) -> None:
        """Until stopped. `on_event`: the socket's connections, as libzmq's monitor names them. `on_tick`: at least that
        often."""
        while not self._stopped:
            events = self._poller.poll(int(1000 * tick_s))
            ports = {source: self._ports.get(source) for source, _ in events if isinstance(source, int)}
            for source, _ in events:
                if source is self.socket:
                    on_frames(self.socket.recv_multipart())
                elif source is self._monitor:
                    on_event(int(recv_monitor_message(self._monitor)["event"]))
                elif source == self._bell.fileno():
                    self._bell.recv(4096)
                    while not self._calls.empty():
                        self._calls.get()()
                elif isinstance(source, int):
                    port = ports[source]
                    # One that was attached since has nothing to read, and may have the number of one that was detached.
                    if port is not None and self._ports.get(source) is port:
                        self._read(port)
            on_tick()

    def close(self) -> None:
        """After `run`. The socket itself is its owner's."""
        for port in list(self._ports.values()):
            self.detach(port)
        self.socket.disable_monitor()
        self._monitor.close()
        self._bell.close()
        self._button.close()

    def _read(self, port: Port) -> None:
        try:
            message = port.connection.recv_bytes()
        except (EOFError, OSError):
            self.detach(port)
            port.on_end()
        else:
            port.on_message(message)
