"""A generation that another server produces, whose text is passed on.

Owns one task that reads the server's stream into pieces. Invariants: at most `MOST_UNREAD` pieces wait for a slow
client, then the server waits too; the end of an answer is passed on together with its usage, once the server has
reported that; closing the generation closes the connection to the server.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import aclosing, suppress
from typing import Any

import msgspec
from msgspec import Struct

from penstock.backends.remote.chunk import Chunk, ChunkChoice, ChunkUsage
from penstock.gateway.generation.base import Gate, Generation
from penstock.gateway.generation.choice import CONTENT_FILTER, TIME_LIMIT, CallPiece, Piece, TextGuard
from penstock.protocol.errors import ApiError, EngineLost, RequestTimeout, ServerError
from penstock.routing.remotes import RemoteMember, RemoteModel
from penstock.telemetry.metrics import Metrics
from penstock.telemetry.timeline import EngineRun

MOST_UNREAD = 256
_REASONS = frozenset(("stop", "length", "tool_calls", "content_filter"))

log = logging.getLogger("penstock.gateway")


class RemoteChoice:
    """One choice of the server's answer."""

    __slots__ = ("calls", "completion_tokens", "finished", "first_at", "guard", "index", "last_at", "outcome")

    def __init__(self, index: int) -> None:
        self.index = index
        self.finished = False
        self.outcome: str | None = None
        self.completion_tokens = 0
        """Chunks with content: they stand for tokens until the server reports its usage."""
        self.first_at: float | None = None
        self.last_at: float | None = None
        self.guard: TextGuard | None = None
        self.calls: set[int] = set()

    def read(self, sent: ChunkChoice) -> Piece:
        """What a chunk adds. The last piece of the choice has a finish reason."""
        piece = Piece(self.index, text=sent.delta.content or "")
        for call in sent.delta.tool_calls or ():
            piece.calls = piece.calls or []
            if call.index not in self.calls and call.function is not None:
                self.calls.add(call.index)
                piece.calls.append(CallPiece(call.index, call.id or f"call_{call.index}", call.function.name, ""))
            if call.function is not None and call.function.arguments:
                piece.calls.append(CallPiece(call.index, None, None, call.function.arguments))
        self.completion_tokens += bool(piece.text or piece.calls)
        reason = sent.finish_reason
        if reason is not None:
            piece.finish_reason = reason if reason in _REASONS else "stop"
        if self.guard is not None:
            piece.text, blocked = self.guard.push(piece.text, final=reason is not None)
            if blocked:
                piece.finish_reason = CONTENT_FILTER
        if piece.finish_reason is not None:
            self.finished, self.outcome = True, piece.finish_reason
        return piece


class RemoteSpec(Struct, frozen=True, kw_only=True):
    """What another server is asked to generate."""

    id: str
    """Names the generation in the ledger and to the client; never used before."""
    model: RemoteModel
    body: dict[str, Any]
    choices: int
    request_id: str
    started_at: float
    prompt_tokens: int
    """An estimate, until the server reports its usage."""
    most_tokens: int
    """Completion tokens that are reserved."""
    time_limit_s: float | None = None
    regions: tuple[str, ...] = ()
    """Where it must be answered; empty: anywhere."""


class RemoteGeneration(Generation):
    """An answer that another server writes."""

    model: RemoteModel
    choices: list[RemoteChoice]

    def __init__(self, spec: RemoteSpec, metrics: Metrics) -> None:
        super().__init__(spec.id, spec.model, spec.model.members[0].server.name, metrics, spec.started_at)
        self.choices = [RemoteChoice(index) for index in range(spec.choices)]
        self._spec = spec
        self._deadline = None if spec.time_limit_s is None else time.monotonic() + spec.time_limit_s
        self._usage: ChunkUsage | None = None
        self._pieces: list[Piece] = []
        self._ends: list[Piece] = []
        """The last pieces of choices, held back until the server's stream is over."""
        self._error: Exception | None = None
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()
        self._over = False
        self._reader: asyncio.Task[None] | None = None

    def submit(self, gate: Gate | None = None) -> None:
        assert gate is None, "a remote server has a queue of its own"
        self._submitted_at = time.monotonic()
        member = self.model.choose(regions=self._spec.regions)
        self._began(member.server.name)
        self._reader = asyncio.create_task(self._read(member), name=f"remote answer {self.id}")

    async def next(self, within: float | None = None) -> list[Piece]:
        if self._deadline is not None:
            left = max(self._deadline - time.monotonic(), 0.0)
            within = left if within is None else min(within, left)
        if not self._pieces and not self._over:
            self._arrived.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(within):
                    await self._arrived.wait()
        if not self._pieces and not self._over and self._deadline is not None and time.monotonic() >= self._deadline:
            self._expire()
        pieces, self._pieces = self._pieces, []
        self._room.set()
        if not pieces and self._error is not None:
            raise self._error
        return pieces

    def fail(self, error: Exception) -> None:
        self.close()
        self._error = self._error or error
        self._end()

    def close(self) -> None:
        # Once: a second time would interrupt the closing of the connection.
        if self._reader is not None and not self._reader.cancelling():
            self._reader.cancel()

    async def settled(self) -> None:
        """A server reports nothing about an answer that was cut off: the connection is closed."""

    def guard(self, make: Callable[[], TextGuard]) -> None:
        for choice in self.choices:
            choice.guard = make()

    def cut(self, index: int) -> None:
        self.choices[index].finished, self.choices[index].outcome = True, CONTENT_FILTER
        if self.complete and not self._over:
            self.close()
            self._end()

    def texts(self, most: int) -> list[tuple[str, str]] | None:
        if self._texts is None:
            return None
        prompt = msgspec.json.encode(self._spec.body["messages"]).decode()[:most]
        return [(prompt, "".join(parts)[:most]) for parts in self._texts]

    def runs(self, purpose: str = "") -> list[EngineRun]:
        return [
            self._run(choice, purpose, self.prompt_tokens, self.cached_tokens, choice.completion_tokens)
            for choice in self.choices
        ]

    @property
    def done(self) -> bool:
        return self._over and not self._pieces and self._error is None

    @property
    def prompt_tokens(self) -> int:
        return self._spec.prompt_tokens if self._usage is None else self._usage.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        details = None if self._usage is None else self._usage.prompt_tokens_details
        return 0 if details is None else details.cached_tokens or 0

    @property
    def completion_tokens(self) -> int:
        counted = sum(choice.completion_tokens for choice in self.choices)
        return counted if self._usage is None else self._usage.completion_tokens

    @property
    def most_completion_tokens(self) -> int:
        return self._spec.most_tokens

    async def _read(self, member: RemoteMember) -> None:
        try:
            spec = self._spec
            async with aclosing(self.model.answer(spec.body, spec.request_id, member, spec.regions)) as chunks:
                async for chunk in chunks:
                    self._take(chunk)
                    if self.complete and self._cut:
                        break
                    while len(self._pieces) >= MOST_UNREAD:
                        self._room.clear()
                        await self._room.wait()
            if not self.complete:
                self._error = EngineLost("The server behind this model ended its answer early.")
        except ApiError as error:
            if not self.complete:  # an error after the last piece does not matter
                self._error = error
        except Exception:
            log.exception("remote answer failed", extra={"request_id": self._spec.request_id, "model": self.model.name})
            self._error = ServerError("The server failed on this request.")
        finally:
            self._end()

    @property
    def _cut(self) -> bool:
        """Whether a guard ended it here, so that the server need not go on."""
        return any(choice.outcome == CONTENT_FILTER and choice.guard is not None for choice in self.choices)

    def _end(self) -> None:
        if not self._over:
            self._over = True
            if self._error is None:
                self._pieces += self._ends
                if self._submitted_at is not None:
                    self._observe_end(time.monotonic(), self.prompt_tokens, self.completion_tokens)
                    for choice in self.choices:
                        self._count_outcome(choice)
        self._arrived.set()

    def _take(self, chunk: Chunk) -> None:
        if chunk.usage is not None:
            self._usage = chunk.usage
        now = time.monotonic()
        for sent in chunk.choices:
            if not 0 <= sent.index < len(self.choices) or self.choices[sent.index].finished:
                continue
            choice = self.choices[sent.index]
            piece = choice.read(sent)
            if self._texts is not None:
                self._texts[sent.index].append(piece.text)
            if piece.text or piece.calls:
                self._observe_tokens(choice, 1, now)
            if piece.finish_reason is not None:
                self._ends.append(piece)
            elif piece.text or piece.calls:
                self._pieces.append(piece)
                self._arrived.set()

    def _expire(self) -> None:
        """The server took longer than a request may."""
        self.close()
        if not self.completion_tokens:
            self._error = RequestTimeout("The request did not produce a token in the time allowed.")
        for choice in self.choices:
            if not choice.finished:
                choice.finished, choice.outcome = True, "timeout"
                held = choice.guard.push("", final=True)[0] if choice.guard is not None else ""
                self._ends.append(Piece(choice.index, text=held, finish_reason="length", stop_reason=TIME_LIMIT))
        self._end()
