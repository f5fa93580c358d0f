"""Responses in the background outlive their gateway: real processes, `kill -9`, one database (R-OPS-5, R-GW-5)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.drill import drill
from tests.e2e.test_resumption import second_gateway
from tests.e2e.test_settlement import settled
from tests.gateway.conftest import until

pytestmark = pytest.mark.slow
LONG = 600


def sdk(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


async def begun(client: openai.AsyncOpenAI, tokens: int = LONG, **more: Any) -> Any:
    return await client.responses.create(
        model="tiny", input="hi", background=True, max_output_tokens=tokens, extra_body={"ignore_eos": True}, **more
    )


async def status(client: openai.AsyncOpenAI, id: str, *wanted: str) -> Any:
    async def ask() -> Any:
        return await client.responses.retrieve(id)

    return await until(ask, lambda found: found.status in wanted)


async def test_another_gateway_takes_over_from_one_that_was_killed(tmp_path: Path) -> None:
    with drill(tmp_path) as running:
        other, url = await asyncio.to_thread(second_gateway, running)
        try:
            here, there = sdk(running.url), sdk(url)
            polled, cancelled = [(await begun(here)).id for _ in range(2)]
            stream = await begun(here, stream=True)
            id, seen = "", 0
            async for event in stream:
                seen = event.sequence_number
                if event.type == "response.created":
                    id = event.response.id
                elif event.type == "response.output_text.delta" and seen > 20:
                    break
            await status(there, cancelled, "in_progress")
            assert running.gateway is not None
            running.gateway.kill()
            running.gateway.wait()
            with pytest.raises((httpx.HTTPError, openai.APIError)):
                async for event in stream:
                    seen = event.sequence_number
            assert (await there.responses.cancel(cancelled)).status == "cancelled"
            # The stream goes on, and says that the answer begins again.
            rest = [event async for event in await there.responses.retrieve(id, stream=True, starting_after=seen)]
            numbers = [event.sequence_number for event in rest]
            assert numbers == sorted(numbers) and numbers[0] > seen
            again = next(at for at, event in enumerate(rest) if event.type == "response.queued")
            said = "".join(event.delta for event in rest[again:] if event.type == "response.output_text.delta")
            last: Any = rest[-1]
            assert last.type in ("response.completed", "response.incomplete") and last.response.output_text == said
            done = await status(there, polled, "completed", "incomplete")
            assert done.output_text == said and done.usage.output_tokens == LONG
            assert (await status(there, cancelled, "cancelled")).output == []
            rows = await settled(running)
        finally:
            other.kill()
            other.wait()
    # Each is billed once, for what it says; what the dead gateway had generated is not.
    assert {row[0]: row[3] for row in rows} == {name.removeprefix("resp_"): LONG for name in (id, polled)}


async def test_a_gateway_goes_on_with_its_own_after_a_restart_but_not_for_ever(tmp_path: Path) -> None:
    with drill(tmp_path) as running:
        client = sdk(running.url)
        once, always = (await begun(client)).id, (await begun(client, 9000)).id
        for attempt in range(3):
            await status(client, always, "in_progress")
            if attempt == 1:
                assert (await status(client, once, "completed", "incomplete")).usage.output_tokens == LONG
            await asyncio.to_thread(running.kill_gateway)
            await asyncio.to_thread(running.ready)
        given_up = await status(client, always, "failed", "completed", "incomplete")
        assert given_up.status == "failed" and "3 times" in given_up.error.message
        rows = await settled(running)
    assert {row[0]: row[3] for row in rows} == {once.removeprefix("resp_"): LONG}
