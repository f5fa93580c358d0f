"""Serialises the turns of a conversation, in order of arrival.

Requests of this process queue for a conversation; the first in the queue also needs the conversation's lease in the
store, which another gateway may hold. A request that waits longer than `wait_s`, or finds the queue full, is refused
with `SessionBusy`. One task renews the leases that are held, so a long answer keeps its conversation, and a gateway
that died blocks it for at most `LEASE_S`.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from penstock.conversations.conversation import (
    Conversation,
    Owner,
    Summary,
    pack,
    unpack_conversation,
    unpack_summary,
)
from penstock.conversations.store import ConversationStore, StoredConversation
from penstock.errors import PenstockError
from penstock.storage import DatabaseError

log = logging.getLogger(__name__)

LEASE_S = 30.0
_MAX_WAITING = 16
"""Maximum of requests of this process that may wait for one conversation."""
_MAX_BACKGROUND = 64
"""Maximum of background summaries; beyond it, turns are summarised when the prompt needs it."""
_FIRST_LOOK_S, _LAST_LOOK_S = 0.02, 0.5
"""Poll intervals for a lease that another gateway holds, doubling from the first to the last."""
_INLINE_BYTES = 16 * 1024
"""Smaller conversations are compressed on the event loop: that is faster than a thread's round trip."""


class SessionBusy(PenstockError):
    """Another turn of the same conversation is being answered."""


@dataclass(slots=True)
class HeldConversation:
    """A leased conversation, while one of its turns is answered."""

    owner: Owner
    id: str
    lease: str
    conversation: Conversation
    summary: Summary
    created_at: float
    exists: bool = False
    """Whether it had been stored before this turn."""
    committed: bool = False


@dataclass(slots=True)
class _Queue:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting: int = 0


class Sessions:
    """The conversations of one gateway process."""

    def __init__(self, store: ConversationStore, *, wait_s: float, most_bytes: int, lease_s: float = LEASE_S) -> None:
        self.store = store
        self._wait_s = wait_s
        self._most_bytes = most_bytes
        self._lease_s = lease_s
        self._queues: dict[tuple[Owner, str], _Queue] = {}
        self._held: dict[str, HeldConversation] = {}
        self._holding = asyncio.Event()
        self._doubtful: dict[str, tuple[Owner, str, float]] = {}
        """Leases that the store may hold for nobody, because its reply was lost, and when they have expired."""
        self._background: dict[tuple[Owner, str], asyncio.Task[None]] = {}
        self._keeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.store.prepare()
        self._keeper = asyncio.create_task(self._renew(), name="conversation leases")

    async def close(self) -> None:
        left = {*self._background.values(), *([self._keeper] if self._keeper is not None else [])}
        while left:  # a driver may turn a cancellation into a timeout, and the task continues: cancel again
            for task in left:
                task.cancel()
            _, left = await asyncio.wait(left, timeout=1.0)
        await self.store.close()

    @asynccontextmanager
    async def turn(self, owner: Owner, id: str) -> AsyncIterator[HeldConversation]:
        """Leases the conversation for one turn. Without a commit inside, nothing is stored."""
        queue = self._queues.setdefault((owner, id), _Queue())
        if queue.waiting >= _MAX_WAITING:
            raise SessionBusy(f"{queue.waiting} turns of this conversation are already waiting")
        deadline = asyncio.get_running_loop().time() + self._wait_s
        queue.waiting += 1
        try:
            async with _timed_lock(queue.lock, deadline):
                held = await self._begin(owner, id, deadline)
                try:
                    yield held
                finally:
                    await self._end(held)
        finally:
            queue.waiting -= 1
            if not queue.waiting:
                del self._queues[owner, id]

    async def commit(self, held: HeldConversation, conversation: Conversation) -> bool:
        """Stores the conversation and lets the next turn begin; False when it was deleted meanwhile."""
        conversation = conversation.bounded(self._most_bytes)
        data = await _packed(conversation)
        held.committed = await self.store.commit(held.owner, held.id, held.lease, data, conversation.end)
        if held.committed:
            held.conversation = conversation
        else:
            log.info("turn not stored: its conversation was deleted, or its lease was lost, while it was answered")
        self._forget(held)
        return held.committed

    async def get(self, owner: Owner, id: str) -> tuple[StoredConversation, Conversation, Summary] | None:
        stored = await self.store.get(owner, id)
        return None if stored is None else (stored, *await _unpacked(stored))

    def start_background(self, owner: Owner, id: str, work: Coroutine[Any, Any, None]) -> None:
        """Starts background work for a conversation, unless some is running or too much is running in total."""
        key = (owner, id)
        if key in self._background or len(self._background) >= _MAX_BACKGROUND:
            work.close()
            return
        task = self._background[key] = asyncio.create_task(work, name="conversation summary")
        task.add_done_callback(lambda _: self._background.pop(key, None))

    async def wait_background(self, owner: Owner, id: str) -> bool:
        """Waits for a conversation's background work; False when there is none."""
        task = self._background.get((owner, id))
        if task is None:
            return False
        await asyncio.wait((task,))
        return True

    async def _begin(self, owner: Owner, id: str, deadline: float) -> HeldConversation:
        lease, pause = uuid.uuid4().hex, _FIRST_LOOK_S
        loop = asyncio.get_running_loop()
        while (stored := await self._lease(owner, id, lease)) is None:
            await self._release_doubtful(owner, id)
            if loop.time() + pause > deadline:
                raise SessionBusy("another turn of this conversation is being answered")
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LAST_LOOK_S)
        try:
            conversation, summary = await _unpacked(stored)
        except BaseException:
            await self.store.release(owner, id, lease)
            raise
        held = HeldConversation(owner, id, lease, conversation, summary, stored.created_at, bool(stored.data))
        self._held[lease] = held
        self._holding.set()
        return held

    async def _lease(self, owner: Owner, id: str, lease: str) -> StoredConversation | None:
        try:
            return await self.store.begin(owner, id, lease, self._lease_s)
        except BaseException:
            self._doubt(owner, id, lease)
            raise

    def _doubt(self, owner: Owner, id: str, lease: str) -> None:
        now = asyncio.get_running_loop().time()
        self._doubtful = {known: about for known, about in self._doubtful.items() if about[2] > now}
        # A command may still be on its way to a store that does not answer.
        self._doubtful[lease] = (owner, id, now + 2 * self._lease_s)

    async def _release_doubtful(self, owner: Owner, id: str) -> None:
        """Release the leases of a conversation that may be held for nobody."""
        for lease, about in list(self._doubtful.items()):
            if about[:2] == (owner, id):
                await self.store.release(owner, id, lease)

    async def _end(self, held: HeldConversation) -> None:
        if self._held.get(held.lease) is not held:
            return
        self._forget(held)
        try:
            await self.store.release(held.owner, held.id, held.lease)
        except DatabaseError as error:
            self._doubt(held.owner, held.id, held.lease)
            log.warning("conversation lease could not be released; it will expire", extra={"why": str(error)})

    def _forget(self, held: HeldConversation) -> None:
        self._held.pop(held.lease, None)
        if not self._held:
            self._holding.clear()

    async def _renew(self) -> None:
        while True:
            await self._holding.wait()
            await asyncio.sleep(self._lease_s / 3)
            for held in list(self._held.values()):
                try:
                    await self.store.renew(held.owner, held.id, held.lease, self._lease_s)
                except DatabaseError as error:
                    log.warning("conversation lease could not be renewed", extra={"why": str(error)})


@asynccontextmanager
async def _timed_lock(lock: asyncio.Lock, deadline: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout_at(deadline):
            await lock.acquire()
    except TimeoutError:
        raise SessionBusy("other turns of this conversation are being answered") from None
    try:
        yield
    finally:
        lock.release()


async def _packed(conversation: Conversation) -> bytes:
    size = sum(len(str(message["content"])) for turn in conversation.turns for message in turn)
    return pack(conversation) if size <= _INLINE_BYTES else await asyncio.to_thread(pack, conversation)


async def _unpacked(stored: StoredConversation) -> tuple[Conversation, Summary]:
    if not stored.data:
        return Conversation(), Summary()

    def read() -> tuple[Conversation, Summary]:
        conversation = unpack_conversation(stored.data)
        return conversation, conversation.own(unpack_summary(stored.summary))

    return read() if len(stored.data) <= _INLINE_BYTES else await asyncio.to_thread(read)
