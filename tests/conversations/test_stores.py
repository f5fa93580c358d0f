"""Every store of conversations keeps the same promises: SQLite, PostgreSQL and Valkey, all of them real."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.conversations import Conversation, ConversationStore, Owner, SessionBusy, Sessions
from penstock.conversations.conversation import pack
from penstock.conversations.redis import RedisConversations
from penstock.conversations.store import SqlConversations
from penstock.storage import DatabaseError, open_database

ANN, BOB = Owner("acme", "ann"), Owner("acme", "bob")
Make = Callable[..., Any]


@pytest.fixture(params=["sqlite", "postgres", "valkey"])
async def make(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Make]:
    """Makes stores over one and the same place."""
    opened: list[Any] = []

    async def build(ttl_s: float = 60.0, most: int = 10) -> ConversationStore:
        store: ConversationStore
        if request.param == "valkey":
            valkey = request.getfixturevalue("valkey")
            store = RedisConversations(f"redis://127.0.0.1:{valkey.port}", ttl_s=ttl_s, most=most)
        else:
            url = f"sqlite:///{tmp_path / 'x.db'}"
            if request.param == "postgres":
                url = request.getfixturevalue("postgres_url")
            database = await open_database(url)
            opened.append(database)
            store = SqlConversations(database, ttl_s=ttl_s, most=most)
        opened.append(store)
        await store.prepare()
        return store

    yield build
    for store in opened:
        if isinstance(store, SqlConversations):
            await store._database.execute("DELETE FROM conversations")
    for thing in reversed(opened):
        await thing.close()


async def tell(store: ConversationStore, owner: Owner, id: str, words: bytes = b"words", turns: int = 1) -> None:
    assert await store.begin(owner, id, "lease", 60) is not None
    assert await store.commit(owner, id, "lease", words, turns)


async def test_what_is_committed_is_found_by_its_owner_alone(make: Make) -> None:
    store = await make()
    before = time.time()
    await tell(store, ANN, "s", b"\x00\xffbytes", 3)
    after = time.time()
    found = await store.get(ANN, "s")
    assert found is not None and found.data == b"\x00\xffbytes"
    assert before - 1 < found.created_at < after + 1 and before - 1 < found.expires_at - 60 < after + 1
    (listed,) = await store.list(ANN, 10)
    assert (listed.id, listed.turns) == ("s", 3)
    for stranger in (BOB, Owner("other", "ann"), Owner("acme")):
        assert await store.get(stranger, "s") is None
        assert await store.list(stranger, 10) == []
        assert not await store.delete(stranger, "s")
        begun = await store.begin(stranger, "s", "x", 5)
        assert begun is not None and begun.data == b""
        await store.release(stranger, "s", "x")
    assert await store.delete(ANN, "s") and not await store.delete(ANN, "s")
    assert await store.get(ANN, "s") is None and await store.list(ANN, 10) == []


async def test_only_the_holder_of_the_lease_writes(make: Make) -> None:
    store = await make()
    await tell(store, ANN, "s", b"one")
    assert (await store.begin(ANN, "s", "mine", 60)).data == b"one"
    assert await store.begin(ANN, "s", "theirs", 60) is None
    assert not await store.commit(ANN, "s", "theirs", b"two", 2)
    await store.release(ANN, "s", "theirs")
    assert await store.begin(ANN, "s", "theirs", 60) is None, "only the holder gives a lease up"
    await store.release(ANN, "s", "mine")
    assert await store.begin(ANN, "s", "theirs", 60) is not None
    assert not await store.commit(ANN, "s", "mine", b"late", 2)
    assert await store.commit(ANN, "s", "theirs", b"two", 2)
    assert (await store.get(ANN, "s")).data == b"two"


async def test_a_lease_runs_out_unless_it_is_renewed(make: Make) -> None:
    store = await make()
    lease_s, began = 0.1, 0.0
    while time.monotonic() >= began + lease_s:  # it has to be renewed in time, which a busy machine may not manage
        await store.release(ANN, "s", "dead")
        lease_s, began = 2 * lease_s, time.monotonic()
        assert await store.begin(ANN, "s", "dead", lease_s) is not None
        await store.renew(ANN, "s", "dead", 60)
    await asyncio.sleep(lease_s + 0.05)
    assert await store.begin(ANN, "s", "next", 60) is None
    await store.renew(ANN, "s", "dead", 0.1)
    await asyncio.sleep(0.25)
    assert await store.begin(ANN, "s", "next", 60) is not None
    assert not await store.commit(ANN, "s", "dead", b"too late", 1)


async def test_one_that_is_not_used_is_forgotten_and_use_prolongs_it(make: Make) -> None:
    store, patient = await make(ttl_s=0.2), await make(ttl_s=60)
    await tell(store, ANN, "s", b"one")
    await tell(patient, ANN, "s", b"two")
    await asyncio.sleep(0.25)
    assert (await store.get(ANN, "s")).data == b"two"
    await tell(store, ANN, "s", b"three")
    await asyncio.sleep(0.25)
    assert await store.get(ANN, "s") is None and await store.list(ANN, 10) == []
    assert (await store.begin(ANN, "s", "x", 60)).data == b""


async def test_a_user_has_so_many_and_the_oldest_go_first(make: Make) -> None:
    store = await make(most=2)
    await tell(store, BOB, "his")
    for id in "abc":
        await tell(store, ANN, id)
        await asyncio.sleep(0.01)
    assert [entry.id for entry in await store.list(ANN, 10)] == ["c", "b"]
    assert [entry.id for entry in await store.list(ANN, 1)] == ["c"]
    assert await store.get(ANN, "a") is None and await store.get(BOB, "his") is not None


async def test_what_is_deleted_while_it_is_answered_stays_deleted(make: Make) -> None:
    store = await make()
    await tell(store, ANN, "s", b"one")
    await store.begin(ANN, "s", "mine", 60)
    assert await store.delete(ANN, "s")
    assert not await store.commit(ANN, "s", "mine", b"two", 2)
    assert await store.get(ANN, "s") is None


async def test_a_summary_belongs_to_the_conversation_it_was_made_of(make: Make) -> None:
    store = await make()
    await tell(store, ANN, "s")
    first = await store.get(ANN, "s")
    await store.begin(ANN, "s", "mine", 60)
    assert await store.summarise(ANN, "s", first.created_at, b"notes"), "also while a turn is answered"
    assert await store.commit(ANN, "s", "mine", b"two", 2)
    assert (await store.get(ANN, "s")).summary == b"notes"
    await store.delete(ANN, "s")
    assert not await store.summarise(ANN, "s", first.created_at, b"notes")
    await asyncio.sleep(0.002)
    await tell(store, ANN, "s")
    assert not await store.summarise(ANN, "s", first.created_at, b"notes")
    assert (await store.get(ANN, "s")).summary == b""


async def test_turns_of_one_conversation_are_answered_in_order_over_gateways(make: Make) -> None:
    gateways = [Sessions(await make(), wait_s=120, most_bytes=10_000) for _ in range(2)]
    for gateway in gateways:
        await gateway.start()
    running = 0

    async def take(gateway: Sessions, word: str) -> None:
        nonlocal running
        async with gateway.turn(ANN, "s") as held:
            running += 1
            assert running == 1
            await asyncio.sleep(0.01)
            running -= 1
            said = held.conversation.extended([{"role": "user", "content": word}, {"role": "system", "content": "-"}])
            assert await gateway.commit(held, said)

    await asyncio.gather(*(take(gateways[i % 2], f"{i}") for i in range(8)))
    found = await gateways[0].get(ANN, "s")
    assert found is not None
    words = [turn[0]["content"] for turn in found[1].turns]
    assert sorted(words) == [str(i) for i in range(8)], "no turn was lost"
    assert [w for w in words if int(w) % 2 == 0] == ["0", "2", "4", "6"], "in line within a gateway"
    for gateway in gateways:
        await gateway.close()


@pytest.mark.slow
async def test_whoever_waits_too_long_is_refused_and_a_long_answer_keeps_its_lease(make: Make) -> None:
    here, there = [Sessions(await make(), wait_s=2.0, most_bytes=10_000, lease_s=1.5) for _ in range(2)]
    await here.start()
    async with here.turn(ANN, "s") as held:
        for gateway in (here, there):
            with pytest.raises(SessionBusy):
                async with gateway.turn(ANN, "s"):
                    pass
        async with there.turn(BOB, "s"), there.turn(ANN, "t"):
            pass
        assert await here.commit(held, Conversation(turns=([{"role": "user", "content": "hi"}],)))
    async with there.turn(ANN, "s") as held:
        assert held.conversation.end == 1
    await here.close()
    await there.close()


async def test_a_turn_that_fails_leaves_no_trace(make: Make) -> None:
    sessions = Sessions(await make(), wait_s=0.2, most_bytes=10_000)
    with pytest.raises(RuntimeError):
        async with sessions.turn(ANN, "s"):
            raise RuntimeError
    assert await sessions.get(ANN, "s") is None and await sessions.store.list(ANN, 10) == []
    async with sessions.turn(ANN, "s") as held:
        assert held.conversation == Conversation()
    await sessions.close()


@pytest.mark.parametrize("lost", ["begin", "release"])
async def test_a_lease_whose_reply_was_lost_blocks_nobody(
    make: Make, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """A store that hangs may do later what its caller has given up."""
    store = await make()
    sessions = Sessions(store, wait_s=5.0, most_bytes=10_000, lease_s=600.0)
    real = getattr(store, lost)

    async def hangs(*arguments: Any) -> None:
        if lost == "begin":
            await real(*arguments)
        raise DatabaseError("no reply")

    with monkeypatch.context() as patched:
        patched.setattr(store, lost, hangs)
        with pytest.raises(DatabaseError) if lost == "begin" else contextlib.nullcontext():
            async with sessions.turn(ANN, "s"):
                pass
    async with sessions.turn(ANN, "s"):
        with pytest.raises(SessionBusy):
            async with Sessions(store, wait_s=0.1, most_bytes=10_000).turn(ANN, "s"):
                pass
    await sessions.close()


async def test_a_line_has_an_end(tmp_path: Path) -> None:
    database = await open_database(f"sqlite:///{tmp_path / 'x.db'}")
    sessions = Sessions(SqlConversations(database, ttl_s=60, most=10), wait_s=5, most_bytes=1000)
    await sessions.start()
    gate = asyncio.Event()

    async def take() -> None:
        async with sessions.turn(ANN, "s"):
            await gate.wait()

    tasks = [asyncio.create_task(take()) for _ in range(17)]
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    assert [type(task.exception()) for task in done] == [SessionBusy]
    gate.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not sessions._queues
    await sessions.close()
    await database.close()


async def test_a_store_that_is_away_is_an_error_of_the_store(valkey: Any) -> None:
    store = RedisConversations(f"redis://127.0.0.1:{valkey.port}", ttl_s=60, most=10)
    await tell(store, ANN, "s", pack(Conversation()))
    valkey.stop()
    with pytest.raises(DatabaseError):
        await store.get(ANN, "s")
    with pytest.raises(DatabaseError):
        await Sessions(store, wait_s=1, most_bytes=1000)._begin(ANN, "s", 0)
    await store.close()


async def test_work_aside_is_done_once_at_a_time_and_ends_with_the_gateway(tmp_path: Path) -> None:
    database = await open_database(f"sqlite:///{tmp_path / 'x.db'}")
    sessions = Sessions(SqlConversations(database, ttl_s=60, most=10), wait_s=5, most_bytes=1000)
    gate, done = asyncio.Event(), []

    async def work(name: str) -> None:
        await gate.wait()
        done.append(name)

    sessions.start_background(ANN, "s", work("first"))
    sessions.start_background(ANN, "s", work("second"))
    assert not await sessions.wait_background(BOB, "s")
    asyncio.get_running_loop().call_later(0.01, gate.set)
    assert await sessions.wait_background(ANN, "s") and done == ["first"]
    gate.clear()
    sessions.start_background(ANN, "s", work("cut"))
    await sessions.close()
    await asyncio.sleep(0)
    assert done == ["first"]
    await database.close()
