"""Checks a database again and again, so that its loss is noticed and logged without anybody using it."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from penstock.storage.database import Database, DatabaseError

CHECK_S = 2.0
log = logging.getLogger(__name__)


class DatabaseWatch:
    """One per gateway process and database."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._task: asyncio.Task[None] | None = None
        self._failure: str | None = None

    async def check(self) -> str | None:
        """Why the database cannot be used, without its path or address; None: it can."""
        if self._database.problem is not None:
            return self._database.problem
        return None if self._failure is None else "the database is unavailable"

    def start(self) -> None:
        self._task = asyncio.create_task(self._watch(), name="database watch")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _watch(self) -> None:
        while True:
            try:
                await self._database.check()
            except DatabaseError as error:
                self._note(str(error))
            else:
                self._note(None)
            await asyncio.sleep(CHECK_S)

    def _note(self, failure: str | None) -> None:
        if failure is not None and self._failure is None:
            log.error("the database cannot be used; paid work is refused until it can", extra={"why": failure})
        elif failure is None and self._failure is not None:
            log.info("the database can be used again")
        self._failure = failure
