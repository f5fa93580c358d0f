"""The local URL of a gateway, and its readiness."""

from __future__ import annotations

import asyncio
from contextlib import suppress


def local_url(host: str, port: int) -> str:
    """The URL of the server on this machine."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(host, host)
    return f"http://{f'[{reachable}]' if ':' in reachable and not reachable.startswith('[') else reachable}:{port}"


async def is_ready(host: str, port: int, timeout_s: float = 5.0) -> bool:
    """Whether the gateway reports that it is ready (`/health/ready`)."""
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
