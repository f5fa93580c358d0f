"""Questions about a port: is it free, and does a gateway answer on it."""

from __future__ import annotations

import asyncio
import errno
import socket
from contextlib import suppress

from penstock.errors import ConfigError


def check_port(host: str, port: int) -> None:
    """ConfigError when a server cannot listen there; asked before anything is loaded."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise ConfigError(f"server.host: {host!r} is not an address of this machine ({error.strerror})") from error
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        # As a server would: an old connection that is still closing is no obstacle.
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


def local_url(host: str, port: int) -> str:
    """How to reach the server from this machine."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(host, host)
    return f"http://{f'[{reachable}]' if ':' in reachable and not reachable.startswith('[') else reachable}:{port}"


async def is_ready(host: str, port: int, timeout_s: float = 5.0) -> bool:
    """Whether the gateway says that it can serve (`/health/ready`)."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    writer = None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(reachable, port)
            request = f"GET /health/ready HTTP/1.1\r\nhost: {reachable}\r\nconnection: close\r\n\r\n"
            writer.write(request.encode())
            await writer.drain()
            return b" 200 " in await reader.readline()
    except (OSError, TimeoutError):
        return False
    finally:
        if writer is not None:
            writer.close()
            with suppress(OSError, TimeoutError):
                await writer.wait_closed()
