"""/v1/conversations as the official SDK has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from penstock.text import TextModel
from tests.gateway.accounting.test_quotas import sign_in
from tests.gateway.api.test_responses import prompt, sdk, stored
from tests.gateway.conftest import Serving

TALK: Any = [
    {"type": "message", "role": "system", "content": "Be kind."},
    {"type": "message", "role": "user", "content": "Weather?"},
    {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
    {"type": "function_call", "call_id": "c2", "name": "clock", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
]


async def test_a_conversation_is_made_continued_and_edited(serving: Serving, text: TextModel, tmp_path: Path) -> None:
    async with serving(**stored(tmp_path)) as running:
        client = sdk(running).conversations
        made = await client.create(metadata={"topic": "x"}, items=TALK)
        assert made.id.startswith("conv_") and made.metadata == {"topic": "x"}
        assert (await client.update(made.id, metadata={"topic": "y"})).metadata == {"topic": "y"}
        assert (await client.retrieve(made.id)).metadata == {"topic": "y"}
        items = [item async for item in client.items.list(made.id, order="asc", limit=2)]
        assert [item.type for item in items] == [one["type"] for one in TALK]
        assert items[0].content[0].text == "Be kind." and items[2].call_id == "c1"  # type: ignore[union-attr]

        reply = await sdk(running).responses.create(model="tiny", input="And now?", conversation=made.id)
        assert reply.conversation.id == made.id  # type: ignore[union-attr]
        assert prompt(running, text).startswith("<|system|>Be kind.<|end|><|user|>Weather?")
        assert "sunny" in prompt(running, text)
        newest = await client.items.list(made.id, limit=2)
        assert [item.content[0].text for item in newest.data] == ["Hello, world!", "And now?"]  # type: ignore[union-attr]

        added = await client.items.create(made.id, items=[{"role": "user", "content": "Bye."}])
        (bye,) = added.data
        assert (await client.items.retrieve(bye.id, conversation_id=made.id)) == bye  # type: ignore[arg-type]
        await client.items.delete(items[3].id, conversation_id=made.id)  # type: ignore[arg-type]
        await client.items.delete(items[1].id, conversation_id=made.id)  # type: ignore[arg-type]
        left = [item async for item in client.items.list(made.id, order="asc")]
        assert [item.type for item in left] == ["message", "function_call", "function_call_output", *["message"] * 3]
        assert left[-1] == bye
        for missing in (
            client.items.retrieve(str(items[1].id), conversation_id=made.id),
            client.items.delete("msg_99", conversation_id=made.id),
            client.items.create("conv_none", items=[{"role": "user", "content": "x"}]),
            client.update("conv_none", metadata=None),
        ):
            with pytest.raises(openai.NotFoundError):
                await missing
        with pytest.raises(openai.BadRequestError) as refused:
            await client.items.create(made.id, items=[{"role": "user"}])  # type: ignore[list-item, typeddict-item]
        assert refused.value.param == "items[0].content"
        assert (await client.delete(made.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.items.list(made.id)


async def test_an_empty_conversation_is_there_and_belongs_to_its_tenant(serving: Serving, tmp_path: Path) -> None:
    async with serving(**stored(tmp_path)) as running:
        await sign_in(running, "acme")
        mine = (await running.client.post("/v1/conversations", json={})).json()
        path = f"/v1/conversations/{mine['id']}"
        assert (await running.client.get(path)).json()["turns"] == 0
        assert (await running.client.get(f"{path}/items")).json()["data"] == []
        assert [one["id"] for one in (await running.client.get("/v1/conversations")).json()["data"]] == [mine["id"]]
        assert (await running.client.get(f"{path}/items?user=ann")).status_code == 404
        running.admin = running.client.headers["authorization"]  # type: ignore[attr-defined]
        await sign_in(running, "rival")
        for method, url in (("GET", f"{path}/items"), ("POST", path), ("DELETE", f"{path}/items/msg_0")):
            body = {"metadata": {}} if method == "POST" else None
            assert (await running.client.request(method, url, json=body)).status_code == 404
    async with serving() as running:
        assert (await running.client.post("/v1/conversations", json={})).status_code == 503
