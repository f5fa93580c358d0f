"""Checks that a port is free before anything is loaded."""

from __future__ import annotations

import errno
import socket

from penstock.errors import ConfigError


def check_port(host: str, port: int) -> None:
    """Raises `ConfigError` when a server cannot listen there. Without this check a second server would silently share
    the clients of the first one, because gateways bind with SO_REUSEPORT."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise ConfigError(f"server.host: {host!r} is not an address of this machine ({error.strerror})") from error
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        # As a server does: an old connection that is still closing does not count as "in use".
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            raise ConfigError(_explain(host, port, error)) from error


def _explain(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use by another program; stop it, or choose another: --port {port + 1}"
    if error.errno == errno.EACCES:
        return f"port {port} needs more rights than this user has; choose one above 1023: --port 8000"
    return f"cannot listen on {host}:{port}: {error.strerror}"
