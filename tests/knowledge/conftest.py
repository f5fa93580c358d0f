from __future__ import annotations

import asyncio
import threading

import pytest

from penstock.storage import DatabaseError, open_database
from tests.services import postgres_url  # noqa: F401


@pytest.fixture(scope="session")
def pgvector_url(postgres_url: str) -> str:  # noqa: F811
    """A PostgreSQL whose pgvector works: the bundled one is built for newer processors than some have."""
    problems: list[str] = []
    thread = threading.Thread(target=lambda: problems.extend(asyncio.run(_problems(postgres_url))))
    thread.start()
    thread.join()
    if problems:
        pytest.skip(f"pgvector does not run here: {problems[0]}")
    return postgres_url


async def _problems(url: str) -> list[str]:
    try:
        database = await open_database(url)
        await database.create("CREATE EXTENSION IF NOT EXISTS vector")
        await database.fetch("SELECT '[1,2]'::vector <=> '[2,1]'::vector")
        await database.close()
    except DatabaseError as error:
        await _recovered(url)  # the server restarts after a crash; others use it too
        return [str(error)]
    return []


async def _recovered(url: str) -> None:
    for _ in range(500):
        try:
            await (await open_database(url)).close()
            return
        except DatabaseError:
            await asyncio.sleep(0.2)
