"""The admission queue of a model in Redis or Valkey, shared by several gateways: one script call per change.

Each gateway sends a heartbeat twice a second; the entries of a gateway that stopped sending are released by the first
gateway that notices. When one gateway's release grants another gateway's entry, that gateway hears of it over pub/sub,
and again with its next heartbeat in case the message was lost.

While Redis is unavailable, each gateway continues with a local queue that takes over its entries. When Redis is back,
or has lost its data, every gateway writes its entries there again. Waiting requests do not notice.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from msgspec.structs import replace

from penstock.config.routing import AdmissionConfig
from penstock.routing.admission.memory import MemoryQueue
from penstock.routing.admission.queue import (
    AdmissionQueue,
    Capacity,
    Outcome,
    QueueEntry,
    QueueState,
    ReadCapacity,
    max_waiting,
)
from penstock.storage.redis import TIMEOUT_S, connect

log = logging.getLogger(__name__)

CONNECTIONS = 16
"""Concurrent calls to Redis; further calls wait for a connection, which says nothing about Redis's health."""
BEAT_S = 0.5
RETRY_S = 1.0
DEAD_S = 5.0
"""A gateway that was silent for this long counts as dead."""
TENANTS = 4096
"""Tenants whose part of the queue's state is cached between calls."""
SCRIPT = resources.files("penstock.routing.admission").joinpath("fair_queue.lua").read_text()


@dataclass(slots=True)
class _Mine:
    """An entry that this gateway added."""

    entry: QueueEntry
    waiter: asyncio.Future[Outcome]
    entered_at: float

    @property
    def granted(self) -> bool:
        return self.waiter.done() and not self.waiter.cancelled() and self.waiter.result() == "granted"


class RedisQueue(AdmissionQueue):
    """See `AdmissionQueue`."""

    def __init__(
        self,
        url: str,
        model: str,
        rules: AdmissionConfig,
        capacity: ReadCapacity,
        *,
        prefix: str = "penstock:admission:",
        clock: Callable[[], float] | None = None,
    ) -> None:
        """`clock`: for tests; Redis's own clock otherwise."""
        self._redis = connect(url, "the admission queue", CONNECTIONS + 1)  # one more than calls: for a restore
        self._free = asyncio.Semaphore(CONNECTIONS)
        from redis.asyncio import Redis

        self._listening: Any = Redis.from_url(url, socket_connect_timeout=TIMEOUT_S)
        self._script = self._redis.register_script(SCRIPT)
        self._prefix = f"{prefix}{{{model}}}:"
        self._rules = rules
        self._capacity = capacity
        self._clock = clock
        self.gateway = uuid.uuid4().hex
        self._mine: dict[str, _Mine] = {}
        self._local: MemoryQueue | None = None
        self._standing = QueueState()
        self._tenants: OrderedDict[tuple[str, int], QueueState] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self._entering: set[str] = set()
        """Entries that Redis may not know yet."""
        self._changing = asyncio.Condition()
        self._restoring = False
        self._closing = False
        """Checked by the endless tasks: a driver that turns their cancellation into a timeout must not keep them
        running."""
        self._calls = 0

    @property
    def shared(self) -> bool:
        """Whether the queue is currently in Redis, shared with other gateways."""
        return self._local is None

    async def start(self) -> None:
        await self._restore()
        self._spawn(self._beat(), "admission heartbeat")
        self._spawn(self._listen(), "admission grants")

    async def close(self) -> None:
        self._closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._local is None:
            await self._run("bye", "", 0, [])
        if self._local is not None:
            await self._local.close()
        for mine in self._mine.values():
            mine.waiter.cancel()
        self._mine.clear()
        await self._redis.aclose()
        await self._listening.aclose()

    async def enter(self, entry: QueueEntry, capacity: Capacity) -> asyncio.Future[Outcome]:
        waiter: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._mine[entry.id] = _Mine(entry, waiter, time.monotonic())
        if self._local is not None:
            self._local.push(entry, capacity, waiter)
        else:
            call = self._spawn(self._enter(entry, capacity), "admission entry")
            try:
                await asyncio.shield(call)
            except asyncio.CancelledError:
                call.add_done_callback(lambda _: self.leave(entry.id))  # only after Redis has the entry
                raise
        return waiter

    async def _enter(self, entry: QueueEntry, capacity: Capacity) -> None:
        self._entering.add(entry.id)
        try:
            await self._call("enter", entry.tenant, entry.rank, arguments_of(entry, 0.0), capacity)
        finally:
            self._entering.discard(entry.id)

    def leave(self, id: str) -> None:
        self._end(id, "leave", 0.0)

    def release(self, id: str, used: float) -> None:
        self._end(id, "release", used)

    def state(self, tenant: str, rank: int) -> QueueState:
        if self._local is not None:
            return self._local.state(tenant, rank)
        own = self._tenants.get((tenant, rank))
        if own is None:
            return replace(self._standing, own_work=0.0, active_weight=0.0, excess=0.0, own_age_s=None)
        return replace(
            self._standing,
            own_work=own.own_work,
            active_weight=own.active_weight,
            excess=own.excess,
            own_age_s=own.own_age_s,
        )

    def rate(self) -> float:
        if self._local is not None:
            return self._local.rate()
        return self._standing.rates[0] if self._standing.rates is not None else 0.0

    def _end(self, id: str, operation: str, used: float) -> None:
        mine = self._mine.pop(id, None)
        if mine is None or self._closing:
            return
        if self._local is None:
            self._spawn(self._tell_end(mine.entry, operation, used), "admission release")
        elif operation == "leave":
            self._local.leave(id)
        else:
            self._local.release(id, used)

    async def _tell_end(self, entry: QueueEntry, operation: str, used: float) -> None:
        await self._call(operation, entry.tenant, entry.rank, [entry.id, used])

    async def _beat(self) -> None:
        while not self._closing:
            await asyncio.sleep(BEAT_S if self._local is None else RETRY_S)
            if self._local is not None:
                await self._restore()
            else:
                waiting = [id for id, mine in self._mine.items() if not mine.waiter.done() and id not in self._entering]
                await self._call("tick", "", 0, waiting)

    async def _listen(self) -> None:
        """Receives grants and drops of this gateway's entries that other gateways caused."""
        from redis.exceptions import RedisError

        while not self._closing:
            pubsub = self._listening.pubsub(ignore_subscribe_messages=True)
            try:
                await pubsub.subscribe(f"{self._prefix}told:{self.gateway}")
                async for message in pubsub.listen():
                    told = message["data"].decode()
                    self._settle(told[1:], "granted" if told[0] == "+" else "dropped")
            except (RedisError, OSError, TimeoutError) as error:
                log.debug("admission grants not received", extra={"why": str(error)})
                await asyncio.sleep(RETRY_S)
            finally:
                await pubsub.aclose()

    async def _restore(self) -> None:
        """Writes all entries of this gateway to Redis; on success the shared queue is used from now on."""
        async with self._changing:
            self._restoring = True
            try:
                await self._changing.wait_for(lambda: not self._calls)
                if not await self._run("restore", "", 0, self._everything()) or self._local is None:
                    return
                log.info("admission queue is shared again: Redis is back")
                self._local.give_up()
                self._local = None
                # Once more, for what changed in the meantime; further changes wait until this is done.
                await self._run("restore", "", 0, self._everything())
            finally:
                self._restoring = False
                self._changing.notify_all()

    def _everything(self) -> list[Any]:
        """Script arguments for all entries, the granted ones first."""
        arguments: list[Any] = []
        for mine in sorted(self._mine.values(), key=lambda mine: not mine.granted):
            arguments += [*arguments_of(mine.entry, time.monotonic() - mine.entered_at), int(mine.granted)]
        return arguments

    def _away(self, error: Exception) -> None:
        if self._local is not None:
            return
        log.error(
            "admission queue is local: Redis is unavailable; gateways do not share an order until it is back",
            extra={"why": str(error)},
        )
        local = self._local = MemoryQueue(self._rules, self._capacity)
        for mine in list(self._mine.values()):
            entry = replace(mine.entry, arrived=mine.entered_at)
            if mine.granted:
                local.adopt(entry)
            elif not mine.waiter.done():
                local.push(entry, self._capacity(), mine.waiter)

    async def _call(
        self, operation: str, tenant: str, rank: int, arguments: list[Any], capacity: Capacity | None = None
    ) -> None:
        """Runs an operation, unless Redis is unavailable; never concurrently with a restore."""
        if self._restoring:
            async with self._changing:
                await self._changing.wait_for(lambda: not self._restoring)
        if self._local is not None:
            return
        self._calls += 1
        try:
            async with self._free:
                if self._local is None:  # still
                    await self._run(operation, tenant, rank, arguments, capacity)
        finally:
            self._calls -= 1
            if self._restoring and not self._calls:
                async with self._changing:
                    self._changing.notify_all()

    async def _run(
        self, operation: str, tenant: str, rank: int, arguments: list[Any], capacity: Capacity | None = None
    ) -> bool:
        """Runs the script and applies its reply; False when Redis is unavailable."""
        from redis.exceptions import RedisError

        capacity, rules = capacity or self._capacity(), self._rules
        now = -1.0 if self._clock is None else self._clock()
        head: list[Any] = [
            operation,
            now,
            self.gateway,
            f"{_limit(capacity.slots)} strict" if capacity.strict else _limit(capacity.slots),
            _limit(capacity.kv_tokens),
            max_waiting(rules, capacity),
        ]
        head += [rules.order, rules.ageing_s, DEAD_S, tenant, rank]
        try:
            reply = await self._script(keys=[self._prefix], args=[*head, *arguments])
        except (RedisError, OSError, TimeoutError) as error:
            self._away(error)
            return False
        known, granted, dropped, *rest = reply
        self._note(tenant, rank, [float(value) for value in rest])
        for id in granted:
            self._settle(id.decode(), "granted")
        for id in dropped:
            self._settle(id.decode(), "dropped")
        if not known and not self._restoring and operation != "bye":
            self._spawn(self._restore(), "admission restore")
        return True

    def _note(self, tenant: str, rank: int, values: list[float]) -> None:
        self._standing = read_state(values)
        if tenant:
            self._tenants[tenant, rank] = self._standing
            self._tenants.move_to_end((tenant, rank))
            if len(self._tenants) > TENANTS:
                self._tenants.popitem(last=False)

    def _settle(self, id: str, outcome: Outcome) -> None:
        mine = self._mine.get(id)
        if mine is None or mine.waiter.done():
            return
        mine.waiter.set_result(outcome)
        if outcome == "dropped":
            del self._mine[id]

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def arguments_of(entry: QueueEntry, age: float) -> list[Any]:
    return [
        entry.id, entry.tenant, entry.rank, entry.weight, entry.cost, entry.kv_tokens, entry.slots, age,
    ]  # fmt: skip


def read_state(values: Sequence[float]) -> QueueState:
    """The state from the numbers at the end of the script's reply."""
    in_flight, kv, q0, q1, q2, w0, w1, w2, r0, r1, r2, own, active, excess, age = values
    rates = None if r0 != r0 else (r0, r1, r2)
    return QueueState(
        int(in_flight), int(kv), (int(q0), int(q1), int(q2)), (w0, w1, w2), rates, own, active, excess,
        None if age != age else age,
    )  # fmt: skip


def _limit(value: int | None) -> int:
    return -1 if value is None else value
