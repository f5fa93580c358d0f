"""The chunks of a remote answer: one task reads the servers' streams into a bounded buffer, in the order of arrival.

Invariants: at most `MOST_UNREAD` chunks wait for a slow reader, then the servers wait too; an error arrives after the
chunks before it; closing the source closes the connections. Of a stream that its client may resume, all chunks are
kept, up to `MOST_KEPT` characters of text; then it can no longer be resumed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, suppress
from typing import Literal, NamedTuple

from msgspec import Struct

from penstock.backends.remote.chunk import Chunk, ChunkChoice, ChunkUsage, plausible
from penstock.protocol.errors import ApiError, EngineLost, InvalidRequest, ServerError

MOST_UNREAD = 256
MOST_KEPT = 2**20
AT_ONCE = 16
"""Requests of one generation that its servers have at a time."""

log = logging.getLogger("penstock.gateway")


class RemoteCall(Struct, frozen=True):
    """One request to a server: all choices of a generation, or some of them."""

    kind: Literal["chat", "completions"]
    body: dict[str, object]
    first: int = 0
    """The index of its first choice."""
    choices: int = 1


class Arrived(NamedTuple):
    """A chunk of a call, and when it arrived."""

    call: int
    chunk: Chunk
    at: float


Open = Callable[[int], AsyncGenerator[Chunk, None]]
"""The chunks of the call with this number."""


class ChunkSource:
    """Reads the answers to the calls of one generation."""

    def __init__(self, calls: Sequence[RemoteCall], about: dict[str, str], *, keep: bool = False) -> None:
        """`about`: for the log. `keep`: a client may come back for all of it."""
        self.calls = calls
        self.usage: list[ChunkUsage | None] = [None] * len(calls)
        """As far as the servers have reported it, by call."""
        self.prompt_token_ids: list[int] | None = None
        """Of the first call, where the server tells them."""
        self.error: Exception | None = None
        self.over = False
        """Nothing more will arrive."""
        self.reader: object = None
        """Who reads it; another one may take over."""
        self._about = about
        self._unread: deque[Arrived] = deque()
        self._kept: list[Arrived] | None = [] if keep else None
        self._size = 0
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None

    def start(self, open: Open) -> None:
        self._reader = asyncio.create_task(self._read(open), name=f"remote answer {self._about.get('id', '')}")

    @property
    def kept(self) -> bool:
        """Whether everything that has arrived can be read again."""
        return self._kept is not None

    def rewind(self) -> None:
        """Read everything again from the beginning."""
        assert self._kept is not None
        self._unread = deque(self._kept)
        self._arrived.set()

    def all(self) -> Iterator[tuple[int, ChunkChoice]]:
        """The choices in everything that has arrived, as in `unread`."""
        for arrived in self._kept or ():
            first = self.calls[arrived.call].first
            yield from ((first + choice.index, choice) for choice in arrived.chunk.choices)

    def stir(self) -> None:
        """Let `take` return."""
        self._arrived.set()
        self._room.set()

    def drained(self) -> list[Arrived]:
        """What nobody has read yet."""
        taken = list(self._unread)
        self._unread.clear()
        return taken

    async def take(self, reader: object, within: float | None) -> list[Arrived]:
        """What has arrived; empty when `within` seconds pass without anything, all is over, or another one reads."""
        if not self._unread and not self.over:
            self._arrived.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(within):
                    await self._arrived.wait()
        if reader is not self.reader:
            return []
        self._room.set()
        return self.drained()

    @property
    def exhausted(self) -> bool:
        """Whether all is over and read."""
        return self.over and not self._unread

    def unread(self) -> Iterator[tuple[int, ChunkChoice]]:
        """The choices in chunks that nobody has read yet, each with its index in the generation."""
        for arrived in self._unread:
            first = self.calls[arrived.call].first
            yield from ((first + choice.index, choice) for choice in arrived.chunk.choices)

    def end(self, error: Exception | None = None) -> None:
        """Nothing more is wanted."""
        self.close()
        self.error = self.error or error
        self.over = True
        self._arrived.set()

    def close(self) -> None:
        # Once: a second time would interrupt the closing of the connection.
        if self._reader is not None and not self._reader.cancelling():
            self._reader.cancel()

    async def closed(self) -> None:
        """Close, and wait until the connections are."""
        self.close()
        if self._reader is not None:
            await asyncio.gather(self._reader, return_exceptions=True)

    async def _read(self, open: Open) -> None:
        try:
            if len(self.calls) == 1:
                await self._call(open, 0)
            else:
                await self._all(open)
        except ApiError as error:
            self.error = self.error or error
        except Exception:
            log.exception("remote answer failed", extra=self._about)
            self.error = self.error or ServerError("The server failed on this request.")
        finally:
            self.over = True
            self._arrived.set()

    async def _all(self, open: Open) -> None:
        turns = asyncio.Semaphore(AT_ONCE)

        async def one(number: int) -> None:
            async with turns:
                await self._call(open, number)

        try:
            async with asyncio.TaskGroup() as group:
                for number in range(len(self.calls)):
                    group.create_task(one(number))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from failed

    async def _call(self, open: Open, number: int) -> None:
        unfinished = set(range(self.calls[number].choices))
        silent = set(unfinished)
        try:
            async with aclosing(open(number)) as chunks:
                async for chunk in chunks:
                    silent -= {choice.index for choice in chunk.choices}
                    unfinished -= {choice.index for choice in chunk.choices if choice.finish_reason is not None}
                    self._put(number, chunk)
                    while len(self._unread) >= MOST_UNREAD:
                        self._room.clear()
                        await self._room.wait()
        except ApiError:
            if unfinished:  # an error after the last piece does not matter
                raise
        if unfinished and unfinished == silent and len(silent) < self.calls[number].choices:
            raise InvalidRequest(
                "The remote server of this model does not know `n`: it gave fewer answers. Ask for one at a time.",
                param="n",
                code="unsupported_parameter",
            )
        if unfinished:
            raise EngineLost("The server behind this model ended its answer early.")

    def _put(self, number: int, chunk: Chunk) -> None:
        if chunk.usage is not None:
            self.usage[number] = plausible(chunk.usage)
        if chunk.prompt_token_ids and not number:
            self.prompt_token_ids = chunk.prompt_token_ids
        arrived = Arrived(number, chunk, time.monotonic())
        self._unread.append(arrived)
        if self._kept is not None:
            self._kept.append(arrived)
            self._size += sum(64 + len(choice.delta.content or "") for choice in chunk.choices)
            if self._size > MOST_KEPT:
                self._kept = None
        self._arrived.set()
