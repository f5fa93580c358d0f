"""Tasks that outlive the request that started them. Every task has an owner here, which waits for it at shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

CLOSE_S = 1.0


class BackgroundTasks:
    """The background tasks of one gateway process."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="after a request")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Give running tasks a moment to finish."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_S)
