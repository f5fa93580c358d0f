"""Bodies of requests while they arrive: in memory as far as it goes, on disk beyond that.

Invariant: the bodies that are arriving take at most `memory` bytes of this process and `disk` bytes of the temporary
folder, whatever clients send and however slowly; a tenant takes at most a part of the disk. What has arrived is handed
over as a whole. Files on disk have no name, so they vanish with the process.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from typing import IO

from penstock.protocol.errors import RateLimitExceeded, ServiceUnavailable

SHARE = 4
"""A tenant may use the disk space for arriving bodies divided by this."""
PIECE = 256 * 1024
"""Bytes that are written to disk at once."""
MEMORY = 256 * 2**20
DISK = 4 * 2**30


class Bodies:
    """What the bodies that are arriving at this process hold."""

    def __init__(self, memory: int = MEMORY, disk: int = DISK) -> None:
        self.memory_limit = memory
        self.disk_limit = disk
        self.in_memory = 0
        self.on_disk = 0
        self.disk_of: Counter[str] = Counter()

    def arriving(self, tenant: str, most_in_memory: int) -> ArrivingBody:
        """Close it when it is no longer needed. `most_in_memory`: more of this body goes to disk in any case."""
        return ArrivingBody(self, tenant, most_in_memory)

    def take_disk(self, tenant: str, size: int) -> None:
        share = self.disk_limit // SHARE
        if self.disk_of[tenant] + size > share:
            raise RateLimitExceeded(
                f"The request bodies that this tenant is sending have more than {share} bytes; send fewer at once.",
                reason="rate_limit",
                retry_after=5.0,
            )
        if self.on_disk + size > self.disk_limit:
            raise ServiceUnavailable("Too many large request bodies are arriving; send it again.", retry_after=5.0)
        self.on_disk += size
        self.disk_of[tenant] += size

    def release(self, tenant: str, memory: int, disk: int) -> None:
        self.in_memory -= memory
        self.on_disk -= disk
        self.disk_of[tenant] -= disk
        if not self.disk_of[tenant]:
            del self.disk_of[tenant]


class ArrivingBody:
    """One body, added to by one coroutine."""

    def __init__(self, bodies: Bodies, tenant: str, most_in_memory: int) -> None:
        self._bodies = bodies
        self._tenant = tenant
        self._most_in_memory = most_in_memory
        self._buffer = bytearray()  # not a list of parts: a part may be a single byte
        self._file: IO[bytes] | None = None
        self._memory = 0
        self._disk = 0
        self.size = 0

    async def add(self, part: bytes) -> None:
        bodies, size = self._bodies, len(part)
        self.size += size
        if self._file is None:
            if self.size <= self._most_in_memory and bodies.in_memory + size <= bodies.memory_limit:
                bodies.in_memory += size
                self._memory += size
                self._buffer += part
                return
            self._file = await asyncio.to_thread(tempfile.TemporaryFile, prefix="penstock-body-")
        self._buffer += part
        if len(self._buffer) >= PIECE:
            await self._flush()

    async def _flush(self) -> None:
        assert self._file is not None
        size = len(self._buffer)
        self._bodies.take_disk(self._tenant, size)
        self._disk += size
        try:
            await asyncio.to_thread(self._file.write, self._buffer)
        except OSError as error:
            raise _lost(error) from error
        self._buffer = bytearray()
        self._bodies.release(self._tenant, self._memory, 0)
        self._memory = 0

    async def read(self) -> bytes:
        """All of it. This body is empty then."""
        if self._file is None:
            whole = bytes(self._buffer)
        else:
            rest, self._buffer = self._buffer, bytearray()
            try:
                whole = await asyncio.to_thread(_joined, self._file, rest)
            except OSError as error:
                raise _lost(error) from error
        self.close()
        return whole

    def close(self) -> None:
        """Drop what has arrived."""
        self._bodies.release(self._tenant, self._memory, self._disk)
        self._memory = self._disk = self.size = 0
        self._buffer = bytearray()
        file, self._file = self._file, None
        if file is not None:
            file.close()


def _lost(error: OSError) -> ServiceUnavailable:
    return ServiceUnavailable(f"The request body could not be kept on disk: {error.strerror}.", retry_after=5.0)


def _joined(file: IO[bytes], rest: bytearray) -> bytes:
    file.seek(0)
    return file.read() + rest if rest else file.read()
