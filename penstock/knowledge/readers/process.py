"""The gateway's side of the reader process: started with the first document, replaced when it hangs or dies, stopped
after it was idle for a while."""

from __future__ import annotations

import asyncio
import sys

import msgspec

from penstock.knowledge.entities import UnreadableDocument
from penstock.knowledge.readers.blocks import Extracted
from penstock.knowledge.readers.worker import HEADER, Result, Task, frame

TIME_LIMIT_S = 60.0
MOST_ANSWER = 512 * 2**20
"""Maximum size of a reply; the process itself stays far below."""
IDLE_S = 30.0
_results = msgspec.msgpack.Decoder(Result)


class ReaderProcess:
    """Reads one document at a time."""

    def __init__(self, time_limit_s: float = TIME_LIMIT_S, idle_s: float = IDLE_S) -> None:
        self._time_limit_s = time_limit_s
        self._idle_s = idle_s
        self._turn = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._retirement: asyncio.TimerHandle | None = None

    async def read(self, body: bytes, media_type: str, charset: str = "") -> Extracted:
        async with self._turn:
            if self._retirement is not None:
                self._retirement.cancel()
            process = await self._started()
            try:
                async with asyncio.timeout(self._time_limit_s):
                    result = await _exchange(process, Task(body, media_type, charset))
            except TimeoutError:
                await self._stop()
                raise UnreadableDocument(
                    f"The document could not be read within {self._time_limit_s:g} seconds."
                ) from None
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                await self._stop()
                raise UnreadableDocument("The document crashed its reader.") from error
            except asyncio.CancelledError:
                await self._stop()  # it is in the middle of a reply
                raise
            self._retirement = asyncio.get_running_loop().call_later(self._idle_s, self._retire)
        if result.extracted is None:
            raise UnreadableDocument(result.error)
        return result.extracted

    async def close(self) -> None:
        if self._retirement is not None:
            self._retirement.cancel()
        await self._stop()

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "penstock.knowledge.readers.worker"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
            )
        return self._process

    def _retire(self) -> None:
        """Stops the process: it exits when its input is closed."""
        if self._process is not None and self._process.stdin is not None and not self._turn.locked():
            self._process.stdin.close()
            self._process = None

    async def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()


async def _exchange(process: asyncio.subprocess.Process, task: Task) -> Result:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(frame(task))
    await process.stdin.drain()
    size = int.from_bytes(await process.stdout.readexactly(HEADER), "big")
    if size > MOST_ANSWER:
        raise ConnectionError("a reply of invalid size")
    return _results.decode(await process.stdout.readexactly(size))
