"""The gateway's side of a reader process: started with the first document, replaced when it hangs or dies, stopped
after it was idle for a while."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress

import msgspec

from penstock import children
from penstock.interpreter import module
from penstock.knowledge.entities import Chunk, UnreadableDocument
from penstock.knowledge.readers.worker import HEADER, Result, Task, frame

TIME_LIMIT_S = 20.0
"""Processor time of a small document; larger ones get as much again for every `LARGE` bytes."""
PATIENCE = 6
"""How many times that it may take on a busy machine, where it runs after everything else."""
LARGE = 4 * 2**20
MOST_ANSWER = 64 * 2**20
"""Maximum size of one result; real ones stay far below."""
IDLE_S = 30.0
NICENESS = 5
_decoder = msgspec.msgpack.Decoder(Result)


class ReaderProcess:
    """Reads one document at a time."""

    def __init__(self, time_limit_s: float = TIME_LIMIT_S, idle_s: float = IDLE_S) -> None:
        """`time_limit_s`: see `TIME_LIMIT_S`."""
        self._time_limit_s = time_limit_s
        self._idle_s = idle_s
        self._turn = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._retirement: asyncio.TimerHandle | None = None

    async def read(self, task: Task, body: bytes) -> list[Chunk]:
        """The chunks of a document."""
        return [chunk for result in await self._results(task, body) for chunk in result.chunks]

    async def text(self, body: bytes, media_type: str) -> str:
        """The text of a document."""
        task = Task(len(body), media_type, "", "", "", 0, 0, 0, whole=True)
        return "".join([result.text for result in await self._results(task, body)])

    async def _results(self, task: Task, body: bytes) -> list[Result]:
        task.seconds = self._time_limit_s * (1 + len(body) / LARGE)
        too_slow = f"The document could not be read within {task.seconds:.0f} seconds."
        async with self._turn:
            if self._retirement is not None:
                self._retirement.cancel()
            process = await self._started()
            try:
                async with asyncio.timeout(task.seconds * PATIENCE):
                    results = await _exchange(process, task, body)
            except TimeoutError:
                await self._stop()
                raise UnreadableDocument(too_slow) from None
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                await self._stop()
                killed_by = -await process.wait()
                why = too_slow if killed_by == signal.SIGPROF else "The document crashed its reader."
                raise UnreadableDocument(why) from error
            except asyncio.CancelledError:
                await self._stop()  # it is in the middle of a reply
                raise
            self._retirement = asyncio.get_running_loop().call_later(self._idle_s, self._retire)
        if results[-1].error:
            raise UnreadableDocument(results[-1].error)
        return results

    async def close(self) -> None:
        if self._retirement is not None:
            self._retirement.cancel()
        await self._stop()

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                *module("penstock.knowledge.readers.worker"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                # One thread: more would each reserve a part of the address space, which is limited.
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
            )
            _lower_priority(self._process.pid)
        return self._process

    def _retire(self) -> None:
        """Stops the process: it exits when its input is closed."""
        if self._process is not None and self._process.stdin is not None and not self._turn.locked():
            self._process.stdin.close()
            self._process = None

    async def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            children.kill(process)
            await process.wait()


async def _exchange(process: asyncio.subprocess.Process, task: Task, body: bytes) -> list[Result]:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(frame(task))
    process.stdin.write(body)
    await process.stdin.drain()
    results: list[Result] = []
    while True:
        size = int.from_bytes(await process.stdout.readexactly(HEADER), "big")
        if size > MOST_ANSWER:
            raise ConnectionError("a reply of invalid size")
        results.append(_decoder.decode(await process.stdout.readexactly(size)))
        if results[-1].last:
            return results


def _lower_priority(pid: int) -> None:
    """Requests go first; a process that has ended already needs nothing."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
