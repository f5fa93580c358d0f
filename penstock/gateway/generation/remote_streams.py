"""Streams of remote models whose clients may come back for the rest.

No other server can go on in the middle of a text, so this gateway keeps what arrived: while a client is away its answer
is read on, and a client that comes back within `RESUME_S` gets it from the beginning, less the events that it has.
Invariants: only the client that began a stream gets it, with the very same request; what is kept is bounded, per stream
(`remote_source.MOST_KEPT`) and in all; what nobody came back for is closed, and charged.

After the end of this process nothing of it is left: then the client is told to send its request anew.
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING

import msgspec

from penstock.gateway.generation.remote_source import ChunkSource
from penstock.gateway.generation.resumption import Resumption
from penstock.metering.prices import Usage
from penstock.protocol.errors import NotFound, ResumedElsewhere
from penstock.protocol.messages import RESUME_S

if TYPE_CHECKING:
    from penstock.gateway.generation.remote import RemoteGeneration

MOST_STREAMS = 1024
"""Streams that are kept after their clients left, or after their end; then the oldest are given up."""
USED_KEPT = 4096
"""Streams that nobody came back for, whose usage is known until their charges are settled."""


class _Held:
    """A stream that can be resumed."""

    __slots__ = ("client", "digest", "expiry", "generation", "source")

    def __init__(self, client: str, digest: str, source: ChunkSource, generation: RemoteGeneration) -> None:
        self.client = client
        self.digest = digest
        self.source = source
        self.generation: RemoteGeneration = generation
        """What reads it, or did so last."""
        self.expiry: asyncio.TimerHandle | None = None
        """Set while nobody reads it."""


class RemoteStreams:
    """Those of one gateway process."""

    def __init__(self, keep_s: float = RESUME_S) -> None:
        self._keep_s = keep_s
        self._held: dict[str, _Held] = {}
        self._used: dict[str, Usage] = {}

    def begin(self, resumption: Resumption, generation: RemoteGeneration, source: ChunkSource) -> None:
        """A stream begins, or goes on with another reader."""
        before = self._held.pop(generation.id, None)
        if before is not None and before.expiry is not None:
            before.expiry.cancel()
        self._held[generation.id] = _Held(resumption.client, digest_of(source), source, generation)

    def claim(self, resumption: Resumption, source: ChunkSource) -> ChunkSource:
        """What has arrived of a stream, for the client that comes back for it; `source`: that of its new request."""
        held = self._held.get(resumption.id)
        if held is None or not held.source.kept or (held.client, held.digest) != (resumption.client, digest_of(source)):
            raise NotFound(
                "There is no stream with this `Last-Event-ID` that can be resumed: the answer of a model that another "
                "server runs is kept by the gateway that began it, and for a few seconds. Send the request without it."
            )
        if held.expiry is None:
            held.generation.fail(ResumedElsewhere())
        # Until `begin`: the new request may still be refused, and be sent again.
        self._await(resumption.id, held)
        return held.source

    def rest(self, generation: RemoteGeneration) -> None:
        """Its client left, or it has ended: keep it for a while."""
        held = self._held.get(generation.id)
        if held is None or held.generation is not generation:
            return
        self._held[generation.id] = self._held.pop(generation.id)  # the newest last
        self._await(generation.id, held)
        while len(self._held) > MOST_STREAMS:
            oldest = next((id for id, each in self._held.items() if each.expiry is not None), None)
            if oldest is None:
                return
            self._expire(oldest)

    def forget(self, generation: RemoteGeneration) -> None:
        """It failed: there is nothing to come back for."""
        held = self._held.get(generation.id)
        if held is not None and held.generation is generation and held.expiry is None:
            del self._held[generation.id]

    def holds(self, charge: str) -> bool:
        """Whether the client of a charge may still come back, or has."""
        return charge in self._held

    def used(self, charge: str) -> Usage | None:
        """What a stream took for which nobody came back; None: it is not known."""
        return self._used.pop(charge, None)

    async def close(self) -> None:
        sources = [held.source for held in self._held.values()]
        for id in list(self._held):
            held = self._held[id]
            if held.expiry is not None:
                held.expiry.cancel()
        self._held.clear()
        await asyncio.gather(*(source.closed() for source in sources))

    def _await(self, id: str, held: _Held) -> None:
        """Give a stream up unless a client comes for it in time."""
        if held.expiry is not None:
            held.expiry.cancel()
        held.expiry = asyncio.get_running_loop().call_later(self._keep_s, self._expire, id)

    def _expire(self, id: str) -> None:
        held = self._held.pop(id, None)
        if held is None:
            return
        if held.expiry is not None:
            held.expiry.cancel()
        held.source.end()
        held.generation.caught_up()
        generation = held.generation
        self._used[id] = Usage(
            generation.prompt_tokens,
            generation.cached_tokens,
            generation.completion_tokens,
            generation.reasoning_tokens,
        )
        while len(self._used) > USED_KEPT:
            del self._used[next(iter(self._used))]


def digest_of(source: ChunkSource) -> str:
    """What was asked."""
    asked = [(call.kind, call.body, call.choices) for call in source.calls]
    return hashlib.sha256(msgspec.json.encode(asked, order="sorted")).hexdigest()
