"""The list of models through Anthropic's SDK."""

from __future__ import annotations

import datetime

import anthropic
import pytest

from tests.gateway.conftest import Serving


async def test_models_are_listed_and_described(serving: Serving) -> None:
    async with serving() as running:
        client = anthropic.AsyncAnthropic(base_url=f"http://127.0.0.1:{running.port}", api_key="none", max_retries=0)
        listing = await client.models.list(limit=1)
        names = [model.id async for model in listing]
        assert names[0] == "tiny" and listing.first_id == listing.last_id == "tiny"
        assert listing.has_more is (len(names) > 1)
        found = await client.models.retrieve("tiny")
        assert (found.type, found.display_name) == ("model", "tiny")
        assert isinstance(found.created_at, datetime.datetime)
        assert found.max_input_tokens == running.engine.info.max_model_len
        behind = await client.models.list(after_id=names[-1])
        assert behind.data == [] and not behind.has_more
        before = await client.models.list(before_id="tiny")
        assert before.data == []
        with pytest.raises(anthropic.BadRequestError, match="after_id"):
            await client.models.list(after_id="nope")
        with pytest.raises(anthropic.NotFoundError) as missing:
            await client.models.retrieve("nope")
        assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index,call-overload]
        plain = (await running.client.get("/v1/models")).json()
        assert plain["object"] == "list" and "created_at" not in plain["data"][0]
