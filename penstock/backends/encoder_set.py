"""The engines of one encoder: that of this machine, if there is one, and those that register in the fleet.

Invariant: a list of texts is encoded whole by one engine. When that engine is lost meanwhile, another one encodes it
anew: the vectors are the same, and nothing has been delivered yet. Engines that leave finish what they have.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic

from penstock.backends.encoder import EncoderBackend
from penstock.engine.encoder.request import EncodeRequest, Encoding
from penstock.engine.request import EngineInfo, EngineLoad
from penstock.protocol.errors import ApiError, EngineUnavailable, Overloaded

LOOK_S = 0.05
"""How often a caller that waits for the first engine looks for it."""
MOST_WAITING = 4096
ATTEMPTS = 3


class EncoderSet:
    """Chooses the engine with the least work."""

    def __init__(self, own: EncoderBackend | None = None) -> None:
        """`own`: the engine that this machine starts on demand."""
        self._own = own
        self._others: dict[str, EncoderBackend] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._started = False
        self._waiters = 0
        self._last: EngineInfo | None = None

    @property
    def members(self) -> list[EncoderBackend]:
        return [*([] if self._own is None else [self._own]), *self._others.values()]

    async def start(self) -> None:
        self._started = True
        for member in self.members:
            await member.start()

    async def close(self) -> None:
        for task in self._leaving:
            task.cancel()
        await asyncio.gather(*self._leaving, return_exceptions=True)
        if self._started:
            await asyncio.gather(*(member.close() for member in self.members))

    async def follow(self, engines: dict[str, Callable[[], EncoderBackend]]) -> None:
        """The engines of the fleet, by name: how a new one is reached. Those that are no longer listed leave."""
        for name in self._others.keys() - engines.keys():
            if not self._started:
                del self._others[name]
                continue
            task = asyncio.create_task(_close_when_idle(self._others.pop(name)), name=f"retire encoder {name}")
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
        for name in engines.keys() - self._others.keys():
            self._others[name] = backend = engines[name]()
            if self._started:
                await backend.start()

    @property
    def ready(self) -> bool:
        return any(member.ready for member in self.members)

    @property
    def info(self) -> EngineInfo | None:
        """Of an engine that is ready; else of the last one that was."""
        found = next((member.info for member in self.members if member.ready and member.info is not None), None)
        self._last = found or self._last
        return self._last

    @property
    def load(self) -> EngineLoad:
        """That of the busiest engine."""
        loads = [member.load for member in self.members if member.ready]
        return max(loads, key=lambda load: load.waiting, default=EngineLoad())

    @property
    def in_flight(self) -> int:
        return sum(member.in_flight for member in self.members if member.ready)

    async def wait_ready(self, within: float) -> EngineInfo:
        if not self.ready:
            if self._waiters >= MOST_WAITING:
                raise EngineUnavailable(f"{self._waiters} requests already wait for this encoder.", reason="queue_full")
            self._waiters += 1
            try:
                until = monotonic() + within
                while not self.ready and monotonic() < until:  # noqa: ASYNC110 (any of them, and they change)
                    await asyncio.sleep(LOOK_S)
            finally:
                self._waiters -= 1
        if not self.ready or (info := self.info) is None:
            raise EngineUnavailable(f"No engine of this encoder is up (waited {within:g} s).", reason="queue_timeout")
        return info

    async def encode(self, request: EncodeRequest) -> Encoding:
        problem: ApiError = EngineUnavailable("The engine for this encoder is restarting; try again.")
        tried: set[EncoderBackend] = set()
        for _ in range(ATTEMPTS):
            able = [member for member in self.members if member.ready and member not in tried]
            if not able:
                break
            member = min(able, key=lambda member: member.in_flight + member.load.waiting)
            tried.add(member)
            try:
                return await member.encode(request)
            except (EngineUnavailable, Overloaded) as error:
                problem = error
        raise problem


async def _close_when_idle(backend: EncoderBackend) -> None:
    try:
        while backend.ready and backend.in_flight:  # noqa: ASYNC110 (requests end in many ways)
            await asyncio.sleep(LOOK_S)
    finally:
        await backend.close()
