"""Chat completions with `store: true`, as the official SDK reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from penstock.gateway.api.openai.chat_store import ChatStore, Reader
from penstock.storage import open_database
from penstock.text import TextModel
from tests.gateway.accounting.test_quotas import sign_in
from tests.gateway.api.test_responses import sdk, stored
from tests.gateway.conftest import Serving
from tests.gateway.generation.test_tool_choice import CALL, CLOCK, WEATHER, says

ASKED: Any = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}]


async def test_stored_completions_are_listed_shown_changed_and_deleted(
    serving: Serving, text: TextModel, tmp_path: Path
) -> None:
    async with serving(says(text, f"One moment.\n{CALL}"), **stored(tmp_path)) as running:
        client = sdk(running).chat.completions
        tools: Any = [WEATHER, CLOCK]
        whole = await client.create(
            model="tiny", messages=ASKED, tools=tools, store=True, metadata={"k": "a"}, temperature=0.5
        )
        stream = await client.create(model="tiny", messages=ASKED, tools=tools, n=2, store=True, stream=True)
        ids = {chunk.id async for chunk in stream}
        await client.create(model="tiny", messages=ASKED)
        found = [completion async for completion in client.list(limit=1)]
        assert [completion.id for completion in found] == [whole.id, *ids]
        assert found[0].choices == whole.choices and found[0].usage == whole.usage
        assert found[0].metadata == {"k": "a"} and found[0].temperature == 0.5  # type: ignore[attr-defined]
        for choice in found[1].choices:
            assert choice.message.content == "One moment." and choice.finish_reason == "tool_calls"
            assert [call.function.name for call in choice.message.tool_calls or ()] == ["get_weather", "clock"]  # type: ignore[union-attr]
        assert found[1].object == "chat.completion"
        assert (await client.retrieve(whole.id)) == found[0]
        assert [one.id async for one in client.list(metadata={"k": "a"})] == [whole.id]
        assert [one.id async for one in client.list(model="other")] == []
        assert [one.id async for one in client.list(order="desc")] == [*ids, whole.id]
        changed = await client.update(whole.id, metadata={"k": "b"})
        assert changed.metadata == {"k": "b"}
        messages = [message async for message in client.messages.list(whole.id, limit=1)]
        assert [(message.role, message.content) for message in messages] == [("system", "Be kind."), ("user", "hi")]
        assert (await client.delete(whole.id)).deleted
        for missing in (client.retrieve(whole.id), client.delete(whole.id), client.update(whole.id, metadata=None)):
            with pytest.raises(openai.NotFoundError):
                await missing
        with pytest.raises(openai.BadRequestError):
            await client.list(after=whole.id)


async def test_a_turn_is_stored_with_the_answer_before_it_as_it_came(serving: Serving, tmp_path: Path) -> None:
    async with serving(**stored(tmp_path)) as running:
        client = sdk(running).chat.completions
        first = await client.create(model="tiny", messages=ASKED, store=True, modalities=["text"], audio=None)
        said: Any = {**first.choices[0].message.model_dump(), "annotations": []}
        second = await client.create(model="tiny", messages=[*ASKED, said, *ASKED[1:]], store=True)
        kept = [message async for message in client.messages.list(second.id)]
        assert [message.role for message in kept] == ["system", "user", "assistant", "user"]
        assert kept[2].content == first.choices[0].message.content


async def test_without_a_store_and_for_others_there_is_nothing(serving: Serving, tmp_path: Path) -> None:
    async with serving() as running:
        refused = await running.chat(store=True)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "store"
        assert (await running.client.get("/v1/chat/completions")).status_code == 404
    async with serving(**stored(tmp_path)) as running:
        await sign_in(running, "acme")
        mine = (await running.chat(store=True)).json()["id"]
        running.admin = running.client.headers["authorization"]  # type: ignore[attr-defined]
        await sign_in(running, "rival")
        path = f"/v1/chat/completions/{mine}"
        assert (await running.client.get("/v1/chat/completions")).json()["data"] == []
        for method, url in (("GET", path), ("DELETE", path), ("GET", f"{path}/messages")):
            assert (await running.client.request(method, url)).status_code == 404


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_the_store_forgets_by_age_and_by_number(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    sqlite = f"sqlite:///{tmp_path / 'chats.db'}"
    database = await open_database(sqlite if kind == "sqlite" else request.getfixturevalue("postgres_url"))
    now = 1000.0
    store = ChatStore(database, keep_s=60, most=3, clock=lambda: now)
    await store.prepare()
    for number in range(5):
        now += 1
        completion = {"id": f"chat{number}", "model": "m", "object": "chat.completion"}
        await store.put(completion, b"[]", {"n": str(number % 2)}, "acme", "ann" if number else "")
    mine, hers = Reader("acme"), Reader("acme", "bob")

    async def ids(reader: Reader, **asked: Any) -> list[str] | None:
        found = await store.list(reader, **{"limit": 10, "newest_first": False, **asked})
        return None if found is None else [one["id"] for one in found]

    assert await ids(mine) == ["chat2", "chat3", "chat4"]
    assert await ids(mine, after="chat3", newest_first=True) == ["chat2"] and await ids(hers) == []
    assert await ids(mine, metadata={"n": "1"}) == ["chat3"] and await ids(mine, after="chat0") is None
    assert await store.get("chat4", hers) is None and not await store.delete("chat4", hers)
    now += 60
    assert await ids(mine) == []
    await database.close()
