"""Where an engine listens: `ipc://` on one machine, `tcp://` between machines (with a range of ports: on the first
that is free), `inproc://` in tests.

Invariants: a socket file left by a dead engine is replaced, one of a live engine is never taken over; a TCP
endpoint that other machines can reach is encrypted and admits only clients whose public keys are listed (CURVE).
"""

from __future__ import annotations

import errno
import os
import socket as sockets
import stat
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import zmq
import zmq.auth.thread

from penstock.errors import ConfigError
from penstock.protocol.address import is_loopback

SEND_LIMIT = 1024
"""Messages queued in the socket for one gateway before sends report that it is full."""


@dataclass(frozen=True, slots=True)
class CurveServer:
    """An engine's identity on the network. Keys are Z85 text, as `generate_keypair` makes them."""

    secret_key: str
    clients: Collection[str]
    """Public keys of the gateways that may connect."""

    @classmethod
    def read(cls, key: Path | None, clients: Path | None) -> CurveServer | None:
        """From the files that `--curve-key` and `--curve-clients` name; None when neither is given."""
        if key is None and clients is None:
            return None
        if key is None or clients is None:
            raise ConfigError("--curve-key and --curve-clients must be given together")
        try:
            admitted = [line.strip() for line in clients.read_text().splitlines() if line.strip()]
            return cls(key.read_text().strip(), admitted)
        except OSError as error:
            raise ConfigError(f"{error.filename}: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class CurveClient:
    """What a gateway needs to connect to an engine that uses CURVE."""

    server_public_key: str
    secret_key: str

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        """Set before `connect`."""
        secret = self.secret_key.encode()
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.server_public_key.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(secret))


def generate_keypair() -> tuple[str, str]:
    """(public, secret), as text."""
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def write_secret_key(file: Path) -> str:
    """Write a new secret key to `file`, which must not exist; returns its public key."""
    public, secret = generate_keypair()
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    with os.fdopen(descriptor, "w") as handle:
        handle.write(secret + "\n")
    return public


def public_key(secret: str) -> str:
    try:
        return str(zmq.curve_public(secret.encode()).decode())
    except (zmq.ZMQError, ValueError) as error:
        raise ConfigError("this is not a CURVE secret key (40 characters of Z85)") from error


class Listener:
    """A bound ROUTER socket and what must be closed with it."""

    def __init__(
        self,
        endpoint: str,
        *,
        curve: CurveServer | None = None,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        send_limit: int = SEND_LIMIT,
        silence_s: float = 10.0,
        on_stranger: Callable[[str], None] | None = None,
    ) -> None:
        """`silence_s`: a TCP connection that answers no heartbeat for this long is closed. `on_stranger`: told the key
        of a client that was refused, from another thread."""
        _check(endpoint, curve)
        self.secret_key = "" if curve is None else curve.secret_key
        """This engine's own key, also where it is the client of another engine."""
        self._owns_context = context is None
        self._context = context or zmq.Context()
        self._authenticator: zmq.auth.thread.ThreadAuthenticator | None = None
        self._path = Path(endpoint.removeprefix("ipc://")) if endpoint.startswith("ipc://") else None
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A gateway that reconnects keeps its identity, also when its old connection has not been noticed dead.
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.socket.setsockopt(zmq.SNDHWM, send_limit)
        self.socket.setsockopt(zmq.LINGER, 300)
        if endpoint.startswith("tcp://"):
            # Half-open connections are found by the socket itself, also while a long step runs.
            set_heartbeats(self.socket, silence_s)
        try:
            if curve is not None:
                self._admit(curve, on_stranger)
            _bind(self.socket, endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"cannot listen on {endpoint}: {error.strerror}") from error
        self.endpoint: str = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        """Where it really listens: `tcp://127.0.0.1:*` becomes a port."""

    def _admit(self, curve: CurveServer, on_stranger: Callable[[str], None] | None) -> None:
        public_key(curve.secret_key)
        self.socket.setsockopt(zmq.CURVE_SERVER, 1)
        self.socket.setsockopt(zmq.CURVE_SECRETKEY, curve.secret_key.encode())
        self.socket.setsockopt(zmq.ZAP_DOMAIN, b"engine")
        self._authenticator = zmq.auth.thread.ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback("engine", _Allowed(frozenset(curve.clients), on_stranger))

    def close(self) -> None:
        """Idempotent; waits briefly for the last messages to leave."""
        self.socket.close()
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None
        if self._owns_context:
            self._context.term()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def __enter__(self) -> Listener:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _bind(socket: zmq.Socket[bytes], endpoint: str) -> None:
    address, _, port = endpoint.rpartition(":")
    first, dash, last = port.partition("-")
    if not endpoint.startswith("tcp://") or not dash or not (first + last).isdecimal():
        socket.bind(endpoint)
        return
    for number in range(int(first), int(last) + 1):
        try:
            socket.bind(f"{address}:{number}")
            return
        except zmq.ZMQError as error:
            if error.errno != errno.EADDRINUSE or number == int(last):
                raise


class _Allowed:
    """The credentials provider that the authenticator asks about each client's key."""

    def __init__(self, clients: frozenset[str], on_stranger: Callable[[str], None] | None) -> None:
        self._clients = clients
        self._on_stranger = on_stranger

    def callback(self, domain: str, key: bytes) -> bool:
        allowed = domain == "engine" and key.decode() in self._clients
        if not allowed and self._on_stranger is not None:
            self._on_stranger(key.decode())
        return allowed


def set_heartbeats(socket: zmq.Socket[bytes], silence_s: float) -> None:
    """Have libzmq's own thread close a TCP connection on which nothing arrives for so long."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, 1000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(1000 * silence_s))


def _check(endpoint: str, curve: CurveServer | None) -> None:
    scheme, separator, address = endpoint.partition("://")
    if not separator or scheme not in ("ipc", "tcp", "inproc") or not address:
        raise ConfigError(f"{endpoint}: an endpoint is ipc://PATH, tcp://HOST:PORT or inproc://NAME")
    if scheme == "ipc":
        _release(Path(address))
    if scheme == "tcp" and curve is None and not is_loopback(address.rpartition(":")[0]):
        raise ConfigError(
            f"{endpoint}: other machines can reach this address, so it needs CURVE keys; "
            "give the engine a secret key and the public keys of its gateways, or listen on 127.0.0.1"
        )


def _release(path: Path) -> None:
    """Remove a stale socket file; refuse when a process listens on it, or when it is not a socket."""
    if len(os.fsencode(path)) > 100:
        raise ConfigError(f"{path}: too long for a socket path (the system allows about 100 bytes)")
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"{path}: exists and is not a socket; choose another endpoint")
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except OSError as error:
            raise ConfigError(f"{path}: cannot tell whether it is in use: {error.strerror}") from error
    raise ConfigError(f"{path}: another engine listens here")
