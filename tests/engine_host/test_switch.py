"""The loop between ranks and the network keeps ports apart whose file descriptors have had the same number."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection

import pytest
import zmq

from penstock.engine.parallel.child import connection_pair
from penstock.engine_host.switch import Port, Switch
from tests.engine_host.client import eventually

NUMBER = 700


@pytest.fixture
def switch() -> Iterator[Switch]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    made = Switch(socket)
    yield made
    made.close()
    socket.close(0)
    context.term()


def ignore(*_: object) -> None:
    pass


def is_closed(descriptor: int) -> bool:
    with suppress(OSError):
        os.fstat(descriptor)
        return False
    return True


def pair(number: int) -> tuple[Connection, Connection]:
    """Both ends of a connection, the second with a descriptor that nothing else is given."""
    ours, theirs = connection_pair()
    with theirs:
        moved = Connection(fcntl.fcntl(theirs.fileno(), fcntl.F_DUPFD_CLOEXEC, number))
    assert moved.fileno() == number
    return ours, moved


def successor(switch: Switch, port: Port, messages: list[bytes]) -> Connection:
    """Attach a port with the number of one that was detached; the other end of it."""
    assert eventually(lambda: is_closed(port.fileno))
    ours, theirs = pair(port.fileno)
    switch.attach(theirs, messages.append, ignore)
    return ours


def run(switch: Switch) -> threading.Thread:
    thread = threading.Thread(target=switch.run, args=(ignore, ignore, ignore, 0.25), daemon=True)
    thread.start()
    return thread


def test_to_detach_a_port_again_does_no_harm_to_another(switch: Switch) -> None:
    messages: list[bytes] = []
    ours, theirs = pair(NUMBER)
    with ours:
        port = switch.attach(theirs, ignore, ignore)
        switch.detach(port)
        other = successor(switch, port, messages)
    switch.detach(port)
    with other:
        other.send_bytes(b"hello")
        thread = run(switch)
        assert eventually(lambda: messages == [b"hello"])
        switch.stop()
        thread.join(100)


def test_a_new_port_is_not_read_for_what_had_come_for_the_one_before(switch: Switch) -> None:
    messages: list[bytes] = []
    ours, theirs = pair(NUMBER)
    port = switch.attach(theirs, ignore, ignore)
    ours.close()  # its end can be read, and the call below is run before
    others: list[Connection] = []

    def replace() -> None:
        switch.detach(port)
        others.append(successor(switch, port, messages))

    switch.call(replace)
    thread = run(switch)
    assert eventually(lambda: len(others) == 1)
    switch.stop()
    thread.join(100)
    assert not thread.is_alive(), "the loop waits for a message"
    others[0].close()
