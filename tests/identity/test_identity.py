"""Keys: created once, stored as a hash, found fast, revoked soon, and usable during an outage of the store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.identity import OPEN_CALLER, IdentityStore, KeyRing
from penstock.identity.exposure import check_exposure
from penstock.identity.secrets import digest, key_id, mint
from penstock.identity.store import IdentityError
from penstock.protocol.errors import AuthenticationError, KeyStoreUnavailable
from penstock.storage import Database, DatabaseError, open_database
from penstock.storage.postgres import local_name
from tests.services import emptied


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(params=["sqlite", "postgres"])
async def database(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Database]:
    url = f"sqlite:///{tmp_path / 'test.db'}"
    if request.param == "postgres":
        url = request.getfixturevalue("postgres_url")
        await emptied(url)
    opened = await open_database(url)
    marker = opened.beside("has-keys")
    assert marker is not None
    marker.unlink(missing_ok=True)
    yield opened
    await opened.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def store(database: Database, clock: Clock) -> IdentityStore:
    store = IdentityStore(database, clock)
    await store.prepare()
    return store


class Unreliable:
    """The real store, which can be made to go away."""

    def __init__(self, store: IdentityStore) -> None:
        self.store, self.away, self.lookups = store, False, 0

    async def find(self, id: str) -> object:
        self.lookups += 1
        if self.away:
            raise DatabaseError("gone")
        return await self.store.find(id)

    async def has_keys(self) -> bool:
        if self.away:
            raise DatabaseError("gone")
        return await self.store.has_keys()


def ring(store: object, clock: Clock, **options: float) -> KeyRing:
    return KeyRing(store, default_tier="standard", clock=clock, wall_clock=clock, **options)  # type: ignore[arg-type]


async def test_only_the_beginning_and_a_hash_are_kept(store: IdentityStore, database: Database) -> None:
    await store.create_tenant("acme", tier="free")
    key, minted = await store.create_key("acme", user="ann", scopes=("inference", "metrics"))
    assert minted.text.startswith(key.id + "_") and len(minted.text) == 53
    rows = await database.fetch("SELECT * FROM keys")
    secret = minted.text.rpartition("_")[2]
    assert secret not in str(rows) and digest(minted.text) in str(rows)
    assert await store.keys() == [key]


async def test_a_key_says_who_calls(store: IdentityStore, clock: Clock) -> None:
    await store.create_tenant("acme", tier="free")
    await store.create_tenant("other")
    _, ann = await store.create_key("acme", user="ann")
    _, admin = await store.create_key("other", scopes=("admin",))
    keys = ring(store, clock)
    caller = await keys.caller(f"Bearer {ann.text}")
    assert (caller.tenant, caller.user, caller.tier, caller.scopes) == ("acme", "ann", "free", {"inference"})
    caller = await keys.caller(admin.text)  # as `x-api-key` carries it
    assert (caller.tenant, caller.user, caller.tier, caller.scopes) == ("other", "", "standard", {"admin"})


@pytest.mark.parametrize("sent", [None, "", "Bearer ", "Bearer x", "Basic abc", "Bearer psk_12345678_" + "a" * 40])
async def test_anything_else_is_refused(store: IdentityStore, clock: Clock, sent: str | None) -> None:
    await store.create_tenant("acme")
    await store.create_key("acme")
    with pytest.raises(AuthenticationError):
        await ring(store, clock).caller(sent)


async def test_the_right_beginning_with_the_wrong_secret_is_refused(store: IdentityStore, clock: Clock) -> None:
    await store.create_tenant("acme")
    key, minted = await store.create_key("acme")
    wrong = f"{key.id}_{'a' * 40}"
    assert key_id(wrong) == key.id and wrong != minted.text
    with pytest.raises(AuthenticationError):
        await ring(store, clock).caller(f"Bearer {wrong}")


async def test_an_answer_from_before_a_change_is_neither_shared_nor_remembered(
    store: IdentityStore, clock: Clock
) -> None:
    await store.create_tenant("acme")
    key, minted = await store.create_key("acme")
    looked, let_go, asked = asyncio.Event(), asyncio.Event(), 0

    class Slow:
        """Its first answer takes as long as the test likes."""

        async def find(self, id: str) -> object:
            nonlocal asked
            found = await store.find(id)
            asked += 1
            looked.set()
            if asked == 1:
                await let_go.wait()
            return found

        async def has_keys(self) -> bool:
            return True

    keys = ring(Slow(), clock, fresh_s=60)
    early = asyncio.create_task(keys.caller(f"Bearer {minted.text}"))
    await looked.wait()
    await store.revoke_key(key.id)
    keys.refresh()
    with pytest.raises(AuthenticationError, match="is revoked"):
        await asyncio.wait_for(keys.caller(f"Bearer {minted.text}"), 60)
    let_go.set()
    assert (await early).key == key.id, "it was asked before"
    with pytest.raises(AuthenticationError, match="is revoked"):
        await keys.caller(f"Bearer {minted.text}")
    assert asked == 2


async def test_revoked_expired_and_disabled_keys_stop_within_the_fresh_time(store: IdentityStore, clock: Clock) -> None:
    await store.create_tenant("acme")
    key, revoked = await store.create_key("acme")
    _, short = await store.create_key("acme", expires_at=clock.now + 60)
    _, lasting = await store.create_key("acme")
    keys = ring(store, clock, fresh_s=5)
    for minted in (revoked, short, lasting):
        await keys.caller(minted.text)
    assert await store.revoke_key(key.id) and not await store.revoke_key(key.id)
    clock.now += 5
    with pytest.raises(AuthenticationError, match="revoked"):
        await keys.caller(revoked.text)
    clock.now += 60
    with pytest.raises(AuthenticationError, match="expired"):
        await keys.caller(short.text)
    await store.update_tenant("acme", disabled=True)
    clock.now += 5
    with pytest.raises(AuthenticationError, match="disabled"):
        await keys.caller(lasting.text)
    await store.update_tenant("acme", disabled=False, tier="free")
    clock.now += 5
    assert (await keys.caller(lasting.text)).tier == "free"


async def test_an_outage_never_looks_like_a_wrong_key(store: IdentityStore, clock: Clock) -> None:
    await store.create_tenant("acme")
    _, known = await store.create_key("acme")
    _, unseen = await store.create_key("acme")
    unreliable = Unreliable(store)
    keys = ring(unreliable, clock, fresh_s=5, grace_s=100)
    await keys.caller(known.text)
    unreliable.away = True
    clock.now += 50
    assert (await keys.caller(known.text)).tenant == "acme" and not keys.store_up
    with pytest.raises(KeyStoreUnavailable):
        await keys.caller(unseen.text)
    with pytest.raises(AuthenticationError):
        await keys.caller("not even a key")
    clock.now += 100
    with pytest.raises(KeyStoreUnavailable):
        await keys.caller(known.text)
    unreliable.away = False
    assert (await keys.caller(unseen.text)).tenant == "acme" and keys.store_up


async def test_without_keys_everybody_is_let_in_until_the_first_one_is_made(store: IdentityStore, clock: Clock) -> None:
    keys = ring(store, clock, fresh_s=5)
    assert await keys.caller(None) is OPEN_CALLER
    await store.create_tenant("acme")
    key, _ = await store.create_key("acme")
    clock.now += 5
    with pytest.raises(AuthenticationError):
        await keys.caller(None)
    await store.revoke_key(key.id)
    clock.now += 5
    with pytest.raises(AuthenticationError):
        await keys.caller(None)


async def test_a_store_away_at_the_very_start_opens_nothing(store: IdentityStore, clock: Clock) -> None:
    unreliable = Unreliable(store)
    unreliable.away = True
    with pytest.raises(KeyStoreUnavailable):
        await ring(unreliable, clock).caller(None)


async def test_made_up_keys_ask_the_store_once(store: IdentityStore, clock: Clock) -> None:
    await store.create_tenant("acme")
    await store.create_key("acme")
    unreliable = Unreliable(store)
    keys = ring(unreliable, clock)
    made_up = mint().text
    for _ in range(5):
        with pytest.raises(AuthenticationError):
            await keys.caller(made_up)
    assert unreliable.lookups == 1


async def test_names_and_scopes_are_checked(store: IdentityStore) -> None:
    with pytest.raises(IdentityError, match="the name of a"):
        await store.create_tenant("a b")
    await store.create_tenant("acme")
    with pytest.raises(IdentityError, match="already exists"):
        await store.create_tenant("acme")
    with pytest.raises(IdentityError, match="scopes are"):
        await store.create_key("acme", scopes=("root",))  # type: ignore[arg-type]
    with pytest.raises(IdentityError, match="no tenant"):
        await store.create_key("nobody")


async def test_an_address_others_can_reach_needs_a_key(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'doors.db'}"
    await check_exposure("127.0.0.1", url)
    with pytest.raises(ConfigError, match="penstock keys create"):
        await check_exposure("0.0.0.0", url)
    database = await open_database(url)
    store = IdentityStore(database)
    await store.create_tenant("acme")
    await store.create_key("acme")
    await database.close()
    await check_exposure("0.0.0.0", url)


async def test_a_database_that_was_replaced_does_not_open_the_server(store: IdentityStore, database: Database) -> None:
    assert not await store.has_keys(), "a new one is open"
    await store.create_tenant("acme")
    await store.create_key("acme")
    assert await store.has_keys()
    await database.execute("DELETE FROM keys")
    with pytest.raises(ConfigError, match="had some") as error:
        await store.has_keys()
    marker = database.beside("has-keys")
    assert marker is not None and str(marker) in str(error.value), "it says how to start afresh"
    marker.unlink()
    assert not await store.has_keys()


def test_a_postgresql_database_is_recognised_whoever_connects() -> None:
    name = local_name("postgresql://ann:secret@db.example/penstock")
    assert name == local_name("postgres://bob@db.example:5432/penstock") and "secret" not in name
    assert name != local_name("postgresql://ann:secret@db.example/other")
    assert name != local_name("postgresql://ann:secret@db2.example/penstock")
    assert local_name("postgresql:///x?host=/run/a") != local_name("postgresql:///x?host=/run/b")
