"""A TCP relay between gateways and an engine, in which the network can be cut or slowed without being root.

Cut: packets vanish in both directions and nobody is told, as behind a broken switch; connections stay. What was sent
meanwhile arrives when the network heals, as TCP would resend it.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

_CHUNK = 65536


class Relay:
    """Listens on `port`, forwards to `target`."""

    def __init__(self, port: int, target: int) -> None:
        self.port = port
        self.target = target
        self.delay_s = 0.0
        """Extra time in each direction."""
        self._whole = asyncio.Event()
        self._whole.set()
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*list(self._connections), return_exceptions=True)

    def cut(self) -> None:
        self._whole.clear()

    def mend(self) -> None:
        self._whole.set()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._whole.wait()
            try:
                far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
            except OSError:
                return
            there = asyncio.create_task(self._forward(reader, far_writer))
            back = asyncio.create_task(self._forward(far_reader, writer))
            try:
                await asyncio.wait((there, back), return_when=asyncio.FIRST_COMPLETED)
            finally:
                there.cancel()
                back.cancel()
                await asyncio.gather(there, back, return_exceptions=True)
                far_writer.close()
        finally:
            writer.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Chunks keep their order and their distance; each arrives `delay_s` after it was sent."""
        chunks: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(256)
        loop = asyncio.get_running_loop()

        async def read() -> None:
            with suppress(ConnectionError):
                while data := await reader.read(_CHUNK):
                    await chunks.put((loop.time() + self.delay_s, data))
            await chunks.put((loop.time() + self.delay_s, b""))

        reading = asyncio.create_task(read())
        try:
            with suppress(ConnectionError):
                while True:
                    due, data = await chunks.get()
                    await asyncio.sleep(max(0.0, due - loop.time()))
                    await self._whole.wait()
                    if not data:
                        return
                    writer.write(data)
                    await writer.drain()
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
