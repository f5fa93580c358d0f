"""A TCP relay that delivers everything a fixed time later, for kernels without netem.

python -m tests.e2e.delay_relay HOST PORT TARGET_PORT DELAY_MS
"""

from __future__ import annotations

import asyncio
import contextlib
import sys


async def carry(source: asyncio.StreamReader, sink: asyncio.StreamWriter, delay_s: float) -> None:
    """Copies until the end of `source`; each piece arrives `delay_s` after it was sent, in order."""
    loop = asyncio.get_running_loop()
    under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def deliver() -> None:
        while True:
            due, data = await under_way.get()
            await asyncio.sleep(max(due - loop.time(), 0.0))
            if not data:
                break
            sink.write(data)
            await sink.drain()
        sink.close()

    delivery = asyncio.create_task(deliver())
    with contextlib.suppress(ConnectionError):
        while data := await source.read(65536):
            under_way.put_nowait((loop.time() + delay_s, data))
    under_way.put_nowait((loop.time() + delay_s, b""))
    with contextlib.suppress(ConnectionError):
        await delivery


async def main(host: str, port: int, target: int, delay_s: float) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", target)
        await asyncio.gather(carry(reader, back, delay_s), carry(there, writer, delay_s))

    server = await asyncio.start_server(connected, host, port)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]) / 1000))
