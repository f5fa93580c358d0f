"""What is stored of responses in the background: leases, takeovers and events, on SQLite and PostgreSQL."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.gateway.api.openai.responses.background_run import BackgroundRun
from penstock.gateway.api.openai.responses.background_store import (
    GIVE_UP_S,
    RUN_EVENTS,
    UNFINISHED,
    TakenOver,
    Work,
    number_of,
    split_events,
)
from penstock.gateway.api.openai.responses.replay import encode_event
from penstock.gateway.api.openai.responses.store import ResponseStore
from penstock.gateway.generation.chat_messages import template_messages
from penstock.gateway.generation.schemas import ChatMessage
from penstock.identity import Caller
from penstock.protocol.errors import InvalidRequest
from penstock.storage import Database, open_database
from tests.services import emptied


@asynccontextmanager
async def kept(tmp_path: Path, kind: str, request: pytest.FixtureRequest) -> AsyncIterator[Database]:
    """An empty database."""
    url = f"sqlite:///{tmp_path / 'state.db'}"
    if kind == "postgres":
        url = request.getfixturevalue("postgres_url")
        await emptied(url)
    database = await open_database(url)
    try:
        yield database
    finally:
        await database.close()


ASKED = Work("/v1/responses", '{"input": "hi"}', [("x-feature", "f")], "t", "k", False)


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_a_response_is_taken_over_a_few_times(tmp_path: Path, kind: str, request: pytest.FixtureRequest) -> None:
    now = [1000.0]
    async with kept(tmp_path, kind, request) as database:
        store = ResponseStore(database, keep_s=1e6, most=10, clock=lambda: now[0])
        await store.prepare()
        begun, take_over = store.background, store.background.take_over

        async def shown(id: str) -> dict[str, Any]:
            found: dict[str, Any] = json.loads(await store.response(id, "t") or b"")
            return found

        response = {"id": "resp_1", "model": "m", "status": "in_progress", "background": True}
        about: Any = {"tenant": "t", "user": "", "response": json.dumps(response).encode(), "items": []}
        await begun.begin("resp_1", "one", 20.0, events=b"", work=ASKED, **about)
        assert await begun.running("resp_1") and await store.conversation("resp_1", "t") is None
        now[0] += 15.0
        assert await begun.keep("one", 20.0, ["resp_1"], [], []) == {"resp_1": "one"}
        now[0] += 15.0
        assert await take_over("two", 20.0) is None
        now[0] += 10.0
        # Its owner is dead. Readers wait, and one gateway takes it over, unless its tenant has too many there.
        assert await begun.running("resp_1") and (await shown("resp_1"))["status"] == "in_progress"
        assert await take_over("two", 20.0, not_of=["t"]) is None
        found = await take_over("two", 20.0)
        assert found is not None and (found.id, found.work, found.first_event) == ("resp_1", ASKED, 0)
        assert await take_over("three", 20.0) is None and (await shown("resp_1"))["status"] == "queued"
        # The owner before was only slow: nothing that it writes counts.
        assert await begun.keep("one", 20.0, ["resp_1"], [("resp_1", b"{}")], []) == {"resp_1": "two"}
        assert not await begun.end("resp_1", "one", b"{}", [])
        # Handing over costs no attempt; dying does, and the third time is the last.
        await begun.release("resp_1", "two")
        assert await take_over("three", 20.0) is not None
        now[0] += 20.0
        assert await take_over("four", 20.0) is not None
        now[0] += 20.0
        assert await take_over("five", 20.0) is None
        failed = await shown("resp_1")
        assert failed["status"] == "failed" and "3 times" in failed["error"]["message"]
        assert not await begun.running("resp_1") and not await begun.end("resp_1", "four", b"{}", [])
        # What no gateway wants for a day is given up; so is what an earlier version has begun.
        await begun.begin("resp_2", "one", 20.0, events=b"", work=ASKED, **about)
        now[0] += GIVE_UP_S + 21.0
        assert "within a day" in (await shown("resp_2"))["error"]["message"]
        await begun.begin("resp_3", "one", 20.0, events=b"", work=ASKED, **about)
        await begun.begin("resp_5", "one", 20.0, events=b"", work=ASKED, **about)
        await database.execute("UPDATE responses SET work = '' WHERE id = 'resp_3'")
        await database.execute("UPDATE responses SET work = '{}' WHERE id = 'resp_5'")
        now[0] += 21.0
        assert await take_over("two", 20.0) is None
        for id in ("resp_3", "resp_5"):
            assert "stopped before its end" in (await shown(id))["error"]["message"]
        # Nobody takes over what was cancelled, whoever had it.
        await begun.begin("resp_4", "one", 20.0, events=b"", work=ASKED, **about)
        now[0] += 21.0
        assert await begun.end("resp_4", None, json.dumps({**response, "status": "cancelled"}).encode())
        assert await take_over("two", 20.0) is None and (await shown("resp_4"))["status"] == "cancelled"
        assert not [row for row in await database.fetch("SELECT work FROM responses") if row[0]]


async def test_a_tenant_with_many_lost_responses_keeps_nobody_waiting(tmp_path: Path) -> None:
    database = await open_database(f"sqlite:///{tmp_path / 'state.db'}")
    now = [1000.0]
    store = ResponseStore(database, keep_s=1e6, most=1000, clock=lambda: now[0])
    await store.prepare()
    for number in range(101):
        tenant = "few" if number == 100 else "many"
        about: Any = {"tenant": tenant, "user": "", "response": b'{"model": "m"}', "items": [], "events": b""}
        work = msgspec.structs.replace(ASKED, tenant=tenant)
        await store.background.begin(f"resp_{number}", "dead", 20.0, work=work, **about)
        now[0] += 0.01
    now[0] += 30.0
    found = await store.background.take_over("me", 20.0, not_of=["many", "else"])
    assert found is not None and found.work.tenant == "few"
    assert await store.background.take_over("me", 20.0, not_of=["many", "else"]) is None
    await database.close()


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_every_run_numbers_its_events_apart(tmp_path: Path, kind: str, request: pytest.FixtureRequest) -> None:
    now = [1000.0]
    async with kept(tmp_path, kind, request) as database:
        store = ResponseStore(database, keep_s=1e6, most=10, clock=lambda: now[0])
        await store.prepare()
        begun = store.background
        response = json.dumps({"id": "resp_2", "model": "m", "status": "queued", "background": True}).encode()
        about: Any = {"tenant": "t", "user": "", "response": response, "items": []}

        def events(first: int, count: int) -> bytes:
            return b"".join(encode_event(("e", {}), first + number) for number in range(count))

        work = msgspec.structs.replace(ASKED, stream=True)
        await begun.begin("resp_2", "me", 20.0, events=events(0, 2), work=work, **about)
        # Events come in chunks, and one that is written again replaces itself.
        await begun.keep("me", 20.0, ["resp_2"], [("resp_2", response)], [("resp_2", 2, events(2, 1))])
        await begun.keep("me", 20.0, ["resp_2"], [], [("resp_2", 2, events(2, 2))])
        whole = split_events(events(0, 4))
        for after in range(-1, 4):
            assert await begun.events("resp_2", after) == whole[after + 1 :]
        now[0] += 30.0
        found = await begun.take_over("you", 20.0)
        assert found is not None and found.first_event == RUN_EVENTS + 1
        # Readers of the first run may have got more of its events than were stored: they get all of the second.
        (again,) = await begun.events("resp_2", 3)
        assert again.startswith(b"event: response.queued") and number_of(again) == RUN_EVENTS
        assert await begun.events("resp_2", 57) == [again] and await begun.events("resp_2", RUN_EVENTS) == []
        await begun.keep("me", 20.0, ["resp_2"], [], [("resp_2", 4, events(4, 3))])  # too late
        await begun.keep("you", 20.0, ["resp_2"], [], [("resp_2", RUN_EVENTS + 1, events(RUN_EVENTS + 1, 2))])
        assert [number_of(event) - RUN_EVENTS for event in await begun.events("resp_2", 57)] == [0, 1, 2]
        for run in (2, 3):
            now[0] += 30.0
            found = await begun.take_over("her", 20.0)
            assert (None if found is None else found.first_event) == (run * RUN_EVENTS + 1 if run < 3 else None)
        # The stream of what was given up has an end, and nothing behind it.
        assert not await begun.running("resp_2")
        (failed,) = await begun.events("resp_2", 2 * RUN_EVENTS)
        assert failed.startswith(b"event: response.failed") and number_of(failed) == 2 * RUN_EVENTS + 1
        late = [("resp_2", 2 * RUN_EVENTS + number, events(number, 1)) for number in (1, 2)]
        assert await begun.keep("her", 20.0, ["resp_2"], [], late) == {"resp_2": ""}
        assert await begun.events("resp_2", 2 * RUN_EVENTS) == [failed]
        assert await store.delete("resp_2", "t")
        assert await begun.keep("her", 20.0, ["resp_2"], [], late) == {}
        assert not await begun.events("resp_2", -1) and not await begun.recorded("resp_2")


async def test_charges_have_the_same_ids_in_every_run() -> None:
    """A response may take several generations, as one that searches does; each is billed, and once."""
    found = TakenOver("resp_abc", {}, ASKED, 0)
    runs = [BackgroundRun.taken_over(found, Caller("t")) for _ in range(2)]
    ids = [[run.next_charge_id() for _ in range(3)] for run in runs]
    assert ids[0] == ids[1] and ids[0][0] == "abc" and len(set(ids[0])) == 3


def test_gateways_of_the_last_release_refuse_to_continue_what_has_no_answer() -> None:
    """They take every stored conversation for one that can be continued: this one they must refuse with a 400."""
    with pytest.raises(InvalidRequest, match="unfinished_response"):
        template_messages(msgspec.json.decode(UNFINISHED, type=list[ChatMessage]))


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_the_oldest_are_deleted_and_leases_are_single(
    tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    now = [1000.0]
    async with kept(tmp_path, kind, request) as database:
        store = ResponseStore(database, keep_s=1000.0, most=2, clock=lambda: now[0])
        await store.prepare()
        response = json.dumps({"id": "x", "model": "m", "status": "queued", "background": True}).encode()
        about: Any = {
            "tenant": "t",
            "user": "",
            "response": response,
            "items": [],
            "events": b"event: a\n\n",
            "work": ASKED,
        }
        for number in range(4):
            now[0] += 1.0
            await store.background.begin(f"resp_{number}", "me", 20.0, **about)
            if number:
                assert await store.background.end(f"resp_{number}", "me", response, [])
        # The first is still generated; of the others two are left, with their events.
        await store.put("resp_4", "t", response, [])
        left = {str(row[0]) for row in await database.fetch("SELECT id FROM responses")}
        assert left == {"resp_0", "resp_3", "resp_4"}
        assert {row[0] for row in await database.fetch("SELECT response FROM response_events")} == {"resp_0", "resp_3"}
        # A lease that is not renewed expires, whatever else its owner generates.
        await store.background.begin("resp_5", "me", 20.0, **about)
        now[0] += 15.0
        assert await store.background.keep("me", 20.0, ["resp_5"], [], []) == {"resp_5": "me"}
        now[0] += 10.0
        found = await store.background.take_over("you", 20.0)
        assert found is not None and found.id == "resp_0" and await store.background.take_over("you", 20.0) is None
