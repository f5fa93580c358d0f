"""The gateway processes that share a port, as one of them sees the group: limits, metrics, recent load, traces and key
changes.

A process that has the port for itself is a group of one and needs no coordinator.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from penstock.gateway.workers.client import CoordinatedLimits, CoordinatorClient
from penstock.limits import LimitStore
from penstock.limits.memory import MemoryLimits
from penstock.telemetry.exposition import render
from penstock.telemetry.load_history import FAMILIES, LoadHistory, ModelHistory, keep
from penstock.telemetry.metrics import Metrics
from penstock.telemetry.timeline import RecentTimelines, Shown, TraceQuery, newest


class WorkerGroup(ABC):
    limits: LimitStore
    """Counts for the whole group."""
    lost: asyncio.Event
    """Set when the group has lost its coordinator, so this process must end."""

    @abstractmethod
    async def start(self) -> None: ...

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    async def metrics_text(self, openmetrics: bool = False) -> bytes:
        """The metrics of the group in the exposition format."""

    @abstractmethod
    async def load_history(self) -> dict[str, ModelHistory]:
        """The load of the group in recent hours, by model."""

    @abstractmethod
    async def traces(self, query: TraceQuery) -> list[Shown]:
        """Timelines of recent requests that any process of the group answered, newest first."""

    @abstractmethod
    async def keys_changed(self) -> None:
        """Tenants or keys were changed here; returns when the whole group looks them up again."""


class SingleWorker(WorkerGroup):
    """The only process on its port."""

    def __init__(self, metrics: Metrics, recent: RecentTimelines, refresh_keys: Callable[[], None]) -> None:
        self.limits = MemoryLimits()
        self.lost = asyncio.Event()
        self._metrics = metrics
        self._recent = recent
        self._refresh_keys = refresh_keys
        self.history = LoadHistory()
        self._keeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        registry = self._metrics.registry
        self._keeper = asyncio.create_task(keep(self.history, lambda: registry.readings(FAMILIES)), name="load history")

    async def close(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)

    async def metrics_text(self, openmetrics: bool = False) -> bytes:
        return self._metrics.render(openmetrics)

    async def load_history(self) -> dict[str, ModelHistory]:
        return self.history.models()

    async def traces(self, query: TraceQuery) -> list[Shown]:
        return self._recent.find(query)

    async def keys_changed(self) -> None:
        self._refresh_keys()


class CoordinatedWorker(WorkerGroup):
    """One of several processes on a port, connected to the coordinator in the supervisor."""

    def __init__(
        self, path: Path, number: int, metrics: Metrics, recent: RecentTimelines, refresh_keys: Callable[[], None]
    ) -> None:
        self._client = CoordinatorClient(
            path, number, readings=metrics.registry.readings, changed=refresh_keys, traces=recent.find
        )
        self.limits = CoordinatedLimits(self._client)
        self.lost = self._client.lost
        self._recent = recent
        self._refresh_keys = refresh_keys

    async def start(self) -> None:
        await self._client.start()

    async def close(self) -> None:
        await self._client.close()

    async def metrics_text(self, openmetrics: bool = False) -> bytes:
        return render(await self._client.collect(), openmetrics)

    async def load_history(self) -> dict[str, ModelHistory]:
        return await self._client.recall()

    async def traces(self, query: TraceQuery) -> list[Shown]:
        return newest(self._recent.find(query) + await self._client.seek(query), query.limit)

    async def keys_changed(self) -> None:
        self._refresh_keys()
        await self._client.tell_changed()
