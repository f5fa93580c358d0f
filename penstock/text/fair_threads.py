"""Threads for work on long texts, shared fairly by tenants.

Work here must release the interpreter lock for most of its time, as tokenizing does. Invariants: no tenant holds all
threads, so another tenant's text begins at once however much the first one sent; threads that become free go to
tenants in turn; the text that waits is bounded per tenant. The threads run at a lower priority than the event loop.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import ParamSpec, TypeVar

from penstock.machine import usable_cores
from penstock.protocol.errors import RateLimitExceeded

P = ParamSpec("P")
T = TypeVar("T")

THREADS_PER_TENANT = 2 if usable_cores() > 2 else 1
THREADS = THREADS_PER_TENANT + 1
WAITING_CHARACTERS = 16 << 20
"""Of one tenant."""
NICENESS = 10


@dataclass(slots=True)
class _Tenant:
    running: int = 0
    waiting: deque[tuple[asyncio.Future[None], int]] = field(default_factory=deque)
    characters: int = 0
    """Of the texts that wait."""


class FairThreads:
    """See above. To be used from one event loop."""

    def __init__(self, threads: int = THREADS, per_tenant: int = THREADS_PER_TENANT) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="text", initializer=_lower_priority)
        self._free = threads
        self._per_tenant = per_tenant
        self._tenants: dict[str, _Tenant] = {}
        """Those with work, the one that began longest ago first."""

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, tenant: str, characters: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `work`, called in a thread; `characters` is the size of the text it works on."""
        await self._turn(tenant, characters)
        loop = asyncio.get_running_loop()
        try:
            running = self._threads.submit(partial(work, *args, **kwargs))
        except BaseException:
            self._leave(tenant)
            raise
        # The thread is free when the work has ended, which may be after the caller has gone.
        running.add_done_callback(partial(_tell, loop, partial(self._leave, tenant)))
        return await asyncio.wrap_future(running)

    async def _turn(self, name: str, characters: int) -> None:
        tenant = self._tenants.setdefault(name, _Tenant())
        if self._free and tenant.running < self._per_tenant:
            self._enter(name, tenant)
            return
        if tenant.waiting and tenant.characters + characters > WAITING_CHARACTERS:
            raise RateLimitExceeded(
                f"Texts of {tenant.characters:,} characters of this tenant are waiting to be tokenized, and at most "
                f"{WAITING_CHARACTERS:,} may wait; send long texts one after the other.",
                retry_after=1.0,
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (turn, characters)
        tenant.waiting.append(entry)
        tenant.characters += characters
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave(name)  # it had got its turn in the same moment
            else:
                tenant.waiting.remove(entry)
                tenant.characters -= characters
                self._forget_idle(name)
            raise

    def _enter(self, name: str, tenant: _Tenant) -> None:
        self._free -= 1
        tenant.running += 1
        self._tenants[name] = self._tenants.pop(name)

    def _leave(self, name: str) -> None:
        self._tenants[name].running -= 1
        self._free += 1
        self._forget_idle(name)
        for other, tenant in self._tenants.items():
            if tenant.waiting and tenant.running < self._per_tenant:
                turn, characters = tenant.waiting.popleft()
                tenant.characters -= characters
                self._enter(other, tenant)
                turn.set_result(None)
                return

    def _forget_idle(self, name: str) -> None:
        tenant = self._tenants[name]
        if not tenant.running and not tenant.waiting:
            del self._tenants[name]


def _tell(loop: asyncio.AbstractEventLoop, callback: Callable[[], None], done: Future[T]) -> None:
    with suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(callback)


def _lower_priority() -> None:
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
