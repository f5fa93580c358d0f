"""Tells the supervisor how loaded the automatically scaled models are: every second, and at once when a request finds a
model asleep."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from penstock.gateway.accounting.admission import Admissions
from penstock.protocol.control import Loads, ModelLoad, scaled_name
from penstock.routing.member import Member
from penstock.routing.registry import ModelRegistry, ServedModel
from penstock.routing.replicas import ReplicaSet

REPORT_S = 1.0


class LoadReporter:
    """Reports for one gateway."""

    def __init__(
        self, registry: ModelRegistry, admissions: Admissions, slots: int | None, report: Callable[[Loads], None]
    ) -> None:
        """`slots`: requests that run on a replica at one time, where the configuration says so."""
        self._registry = registry
        self._admissions = admissions
        self._slots = slots
        self._report = report
        self._wanted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="load reports")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            self._wanted.clear()
            if loads := self.loads():
                self._report(Loads(loads))
            with suppress(TimeoutError):
                async with asyncio.timeout(REPORT_S):
                    await self._wanted.wait()

    def loads(self) -> dict[str, ModelLoad]:
        """The load of every automatically scaled model."""
        found = {}
        for model in self._registry:
            if model.autoscaled and isinstance(model.backend, ReplicaSet):
                if model.backend.hold is not None:
                    model.backend.hold.on_wanted = self._wanted.set
                found[model.name] = self._load(model, model.backend)
            if isinstance(model.backend, ReplicaSet):
                for pool in model.autoscaled_pools:
                    found[scaled_name(model.name, pool)] = self._pool_load(model, model.backend, pool)
        return found

    def _pool_load(self, model: ServedModel, backend: ReplicaSet, pool: str) -> ModelLoad:
        depth, wait, shared = self._admissions.pool_load(model, pool)
        arrived, finished, in_flight, parked = backend.dispatcher.pool_progress(pool)
        members = [member for member in backend.members if member.place.pool == pool]
        return self._of_engines(
            members,
            arrived=arrived,
            finished=finished,
            in_flight=in_flight,
            queued=parked + (0 if shared else depth),
            shared_queue=depth if shared else 0,
            predicted_wait_s=round(wait, 3),
        )

    def _load(self, model: ServedModel, backend: ReplicaSet) -> ModelLoad:
        depth, wait, shared = self._admissions.queue_load(model)
        finished, in_flight = backend.dispatcher.progress()
        held = 0 if backend.hold is None else backend.hold.waiting
        return self._of_engines(
            backend.members,
            arrived=backend.arrived,
            finished=finished,
            in_flight=in_flight,
            queued=held + backend.dispatcher.parked + (0 if shared else depth),
            shared_queue=depth if shared else 0,
            predicted_wait_s=round(wait, 3),
        )

    def _of_engines(self, members: Sequence[Member], **seen: Any) -> ModelLoad:
        """What this gateway has seen, with what the engines say."""
        engines = [member.backend for member in members if member.backend.ready and not member.retiring]
        return ModelLoad(
            **seen,
            waiting=sum(engine.load.waiting for engine in engines),
            slots=sum(self._slots or info.max_running for engine in engines if (info := engine.info) is not None),
            used_blocks=sum(engine.load.used_blocks for engine in engines),
            total_blocks=sum(engine.load.total_blocks for engine in engines),
        )
