"""What tests of collections share."""

from __future__ import annotations

import asyncio

import pytest

from penstock.knowledge.entities import Chunk, UnreadableDocument
from penstock.knowledge.readers.worker import Task, work


class ReaderHere:
    """Reads documents in this process. Starting a reader process takes a second; `test_collections.py` and the tests of
    `penstock.knowledge` have real ones."""

    async def read(self, task: Task, body: bytes) -> list[Chunk]:
        results = await asyncio.to_thread(lambda: list(work(task, body)))
        if results[-1].error:
            raise UnreadableDocument(results[-1].error)
        return [chunk for result in results for chunk in result.chunks]

    async def close(self) -> None: ...


@pytest.fixture
def readers_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.knowledge.ingest.ReaderProcess", ReaderHere)
