"""A gateway reduced to its socket, and a server on a thread: what the server tests talk with."""

import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import zmq

from penstock.engine.request import Delta, Request, SamplingParams
from penstock.engine_host.interfaces import EngineLike
from penstock.engine_host.server import EngineServer
from penstock.protocol.codec import decode_from_engine, encode
from penstock.protocol.messages import FromEngine, Hello, Ready, Step, Submit, ToEngine
from penstock.protocol.transport import CurveClient, Listener


class Client:
    """A DEALER that says what it is told and remembers what it hears."""

    def __init__(self, endpoint: str, *, curve: CurveClient | None = None, receive_limit: int = 0) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, uuid.uuid4().bytes)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, receive_limit)
        if curve is not None:
            curve.apply(self.socket)
        self.socket.connect(endpoint)

    def send(self, message: ToEngine) -> None:
        self.socket.send(encode(message))

    def receive(self, timeout_s: float = 120.0) -> FromEngine | None:
        if not self.socket.poll(int(timeout_s * 1000)):
            return None
        return decode_from_engine(self.socket.recv())

    def hello(self, timeout_s: float = 120.0) -> Ready:
        self.send(Hello("test"))
        message = self.receive(timeout_s)
        assert isinstance(message, Ready), message
        return message

    def until(self, kind: type, timeout_s: float = 120.0) -> FromEngine | None:
        """The next message of this kind."""
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            message = self.receive(left)
            if isinstance(message, kind):
                return message
        return None

    def submit(self, request_id: str, *, first: int = 100, tokens: int = 4) -> None:
        self.send(Submit(Request(request_id, [first], SamplingParams(max_tokens=tokens))))

    def deltas(self, timeout_s: float = 120.0) -> Iterator[Delta]:
        """What arrives within `timeout_s`, delta by delta."""
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            message = self.receive(left)
            if isinstance(message, Step):
                yield from message.output.deltas

    def finish(self, request_id: str, timeout_s: float = 120.0) -> tuple[list[int], Delta]:
        """All tokens of one request, and its last delta."""
        tokens: list[int] = []
        for delta in self.deltas(timeout_s):
            if delta.request_id == request_id:
                tokens += delta.tokens
                if delta.finish_reason is not None:
                    return tokens, delta
        raise AssertionError(f"{request_id} did not finish; tokens so far: {tokens}")

    def close(self) -> None:
        self.socket.close()
        self.context.term()


class Running:
    """A server on a thread."""

    def __init__(self, server: EngineServer, endpoint: str) -> None:
        self.server = server
        self.endpoint = endpoint
        self.exit_code: int | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        self.exit_code = self.server.run()

    def join(self, timeout_s: float = 120.0) -> int | None:
        self.thread.join(timeout_s)
        assert not self.thread.is_alive(), "the server did not stop"
        return self.exit_code


@contextmanager
def serving(engine: EngineLike, endpoint: str = "tcp://127.0.0.1:*", **options: Any) -> Iterator[Running]:
    curve, send_limit = options.pop("curve", None), options.pop("send_limit", 1024)
    # A client that stands still answers no heartbeats. Its connection stays, however long the test takes.
    with Listener(endpoint, curve=curve, send_limit=send_limit, silence_s=3600) as listener:
        running = Running(EngineServer(engine, listener, heartbeat_s=0.05, **options), listener.endpoint)
        try:
            yield running
        finally:
            running.server.stop()
            running.join()


@contextmanager
def connected(endpoint: str, **options: Any) -> Iterator[Client]:
    client = Client(endpoint, **options)
    try:
        yield client
    finally:
        client.close()


def eventually(condition: Any, timeout_s: float = 120.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return bool(condition())
