"""Child processes for supervisor tests: real processes, real sockets, no model."""

import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import FrameType

from penstock.engine.process import die_with_parent
from penstock.errors import ConfigError
from penstock.supervisor.status import Alive, Failed, Listening, Progress, Started, StatusPipe


def engine(endpoint: str, status_fd: str, mode: str) -> int:
    die_with_parent()
    status = StatusPipe(int(status_fd))
    print("engine loading", flush=True)
    status.send(Progress("weights", 0.5))
    if mode == "broken":
        status.send(Failed("no such model"))
        return 2
    if mode == "crashing":
        os._exit(9)
    from penstock.engine_host.server import EngineServer  # what gateways and broken engines do not wait for
    from penstock.protocol.transport import Listener
    from tests.engine_host.scripted import ScriptedEngine

    try:
        listener = Listener(endpoint)
    except ConfigError as error:
        status.send(Failed(str(error)))
        return 2
    if mode in ("slow", "endless"):
        time.sleep(3.0 if mode == "slow" else 3600.0)
    scripted = ScriptedEngine(instance=str(os.getpid()))
    server = EngineServer(scripted, listener, heartbeat_s=0.05)
    signal.signal(signal.SIGTERM, lambda *_: server.drain(1.0))
    status.send(Started(scripted.info))
    with listener, status.heartbeats():
        return server.run()


def gateway(port: str, mode: str, drain_file: str, status_fd: str) -> int:
    """Answers 200 to anything. On SIGTERM it finishes after a moment, or, being stubborn, never. A `beating` one sends
    heartbeats, and hangs once a file asks for it."""
    die_with_parent()
    status = StatusPipe(int(status_fd))
    hang = Path(f"{drain_file}.hang")
    if mode == "beating":
        status.send(Listening())
    leaving = threading.Event()

    def on_term(number: int, frame: FrameType | None) -> None:
        leaving.set()

    signal.signal(signal.SIGTERM, on_term)
    with socket.create_server(("127.0.0.1", int(port)), reuse_port=False) as server:
        server.settimeout(0.05)
        while not leaving.is_set() or mode == "stubborn":
            try:
                connection, _ = server.accept()
            except TimeoutError:
                if mode == "beating":
                    status.send(Alive())
                    if hang.exists():
                        hang.unlink()
                        time.sleep(3600)
                continue
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
    time.sleep(0.3)
    Path(drain_file).write_text("drained")
    return 0


if __name__ == "__main__":
    kind, *arguments = sys.argv[1:]
    sys.exit({"engine": engine, "gateway": gateway}[kind](*arguments))
