"""Texts of documents that were read already: whose they are, and what they may take."""

from __future__ import annotations

import asyncio

import pytest

from penstock.gateway.generation.file_texts import FAILURE_S, FileTexts, Key, Owner
from penstock.knowledge.entities import UnreadableDocument
from penstock.telemetry.exposition import MetricRegistry

ACME, BETA = Owner("acme", None), Owner("beta", None)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Reader:
    def __init__(self, text: str = "text", error: str = "") -> None:
        self.text, self.error, self.count = text, error, 0

    async def __call__(self) -> str:
        self.count += 1
        await asyncio.sleep(0)
        if self.error:
            raise UnreadableDocument(self.error)
        return self.text


def texts(limit: int = 1 << 20, clock: Clock | None = None) -> FileTexts:
    return FileTexts(limit, MetricRegistry(), clock or Clock())


async def test_a_text_is_found_only_by_whoever_sent_the_same_bytes() -> None:
    kept, reader = texts(), Reader()
    for owner in (ACME, BETA, Owner("acme", "ann"), Owner("acme", "ben")):
        for _ in range(3):
            assert await kept.text(Key.of(owner, b"one"), reader) == "text"
    assert reader.count == 4
    await kept.text(Key.of(ACME, b"two"), reader)
    assert reader.count == 5


async def test_who_asks_meanwhile_waits_and_reads_itself_if_the_first_leaves() -> None:
    kept, key, begun, reader = texts(), Key.of(ACME, b"one"), asyncio.Event(), Reader()

    async def forever() -> str:
        begun.set()
        await asyncio.Event().wait()
        return ""

    first = asyncio.create_task(kept.text(key, forever))
    await begun.wait()
    others = [asyncio.create_task(kept.text(key, reader)) for _ in range(3)]
    await asyncio.sleep(0)
    assert reader.count == 0
    first.cancel()
    assert await asyncio.gather(*others) == ["text"] * 3 and reader.count == 1
    assert not kept._turns


async def test_a_failure_is_known_for_a_while() -> None:
    clock = Clock()
    kept, broken, key = texts(clock=clock), Reader(error="broken"), Key.of(ACME, b"one")
    for _ in range(2):
        with pytest.raises(UnreadableDocument, match="broken"):
            await kept.text(key, broken)
    assert broken.count == 1
    clock.now += FAILURE_S

    async def leaves() -> str:
        assert kept.size == kept._bytes.value == 0, "what has expired takes nothing while it is read again"
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await kept.text(key, leaves)
    assert await kept.text(key, Reader()) == "text"


async def test_memory_is_bounded_and_a_tenant_takes_half_at_most() -> None:
    kept, reader = texts(limit=20_000), Reader("x" * 2000)

    async def known(owner: Owner, body: bytes) -> bool:
        before = reader.count
        await kept.text(Key.of(owner, body), reader)
        return reader.count == before

    assert not await known(BETA, b"of beta")
    for number in range(50):
        await known(ACME, b"%d" % number)
        assert kept.size <= 20_000 and kept._sizes["acme"] <= 10_000
    assert await known(BETA, b"of beta"), "another tenant's documents did not displace it"
    assert await known(ACME, b"49") and not await known(ACME, b"0")
    for number in range(50):
        await known(Owner(f"t{number}", None), b"")
        assert kept.size <= 20_000
    assert kept.size == sum(kept._sizes.values()) and set(kept._tenants) == set(kept._sizes)
    huge = Reader("x" * 20_000)
    for _ in range(2):
        await kept.text(Key.of(ACME, b"huge"), huge)
    assert huge.count == 2, "what is too large is not kept"
