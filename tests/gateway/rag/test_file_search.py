"""R-RAG-2 in the words of OpenAI's API: `file_search` in responses, with the official SDK as the judge."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from penstock.gateway.api.openai.responses.background_store import RUN_EVENTS, Work
from penstock.text import TextModel
from tests.gateway.api.test_identity import make_key
from tests.gateway.conftest import Running, Serving, eventually, until
from tests.gateway.rag.test_collections import library, prompt_of
from tests.gateway.rag.test_vector_stores import CATS, HOURS, LEAVE, client_of, processed, sent
from tests.gateway.server_tools.test_server_tools import calls, script

pytestmark = pytest.mark.usefixtures("readers_here")
OPENING = calls(("file_search", {"queries": ["When does the office open?"]}))
ANSWER = "The office opens at eight in the morning [1]. Ask again."
FUNCTION: dict[str, Any] = {
    "type": "function",
    "name": "get_time",
    "parameters": {"type": "object", "properties": {}},
    "strict": False,
}


@asynccontextmanager
async def searching(
    serving: Serving, endpoint: str, folder: Path, text: TextModel, *answers: str
) -> AsyncIterator[tuple[Running, openai.AsyncOpenAI, str, dict[str, str]]]:
    """A gateway whose model says `answers`, a store, and the ids of its files by name."""
    async with (
        library(serving, endpoint, folder, script(text, *answers)) as running,
        client_of(running) as client,
    ):
        store = await client.vector_stores.create(name="handbook")
        files = {}
        for name, body in (("leave.md", LEAVE), ("hours.txt", HOURS), ("cats.txt", CATS)):
            files[name] = await sent(client, name, body)
            await client.vector_stores.files.create(store.id, file_id=files[name], attributes={"name": name})
        await processed(client, store.id)
        yield running, client, store.id, files


def tool(store: str, **more: Any) -> list[Any]:
    return [{"type": "file_search", "vector_store_ids": [store], **more}]


async def test_the_model_searches_and_its_answer_cites_files(
    serving: Serving, encoder_endpoint: str, tmp_path: Path, text: TextModel
) -> None:
    answers = (OPENING, ANSWER, "As I said, at eight.")
    async with searching(serving, encoder_endpoint, tmp_path, text, *answers) as (running, client, store, files):
        made = await client.responses.create(
            model="tiny",
            input="When can I come?",
            tools=tool(store, max_num_results=2),
            include=["file_search_call.results"],
        )
        search, message = made.output
        assert search.type == "file_search_call" and message.type == "message"
        assert (search.status, search.queries) == ("completed", ["When does the office open?"])
        assert search.results is not None and len(search.results) == 2
        best = search.results[0]
        assert (best.file_id, best.filename, best.attributes) == (
            files["hours.txt"], "hours.txt", {"name": "hours.txt"},
        )  # fmt: skip
        assert best.text == HOURS.decode().strip() and best.score is not None and 0.0 < best.score <= 1.0
        part = message.content[0]
        assert part.type == "output_text" and part.text == ANSWER == made.output_text
        (cited,) = part.annotations
        assert cited.type == "file_citation"
        assert (cited.file_id, cited.filename) == (files["hours.txt"], "hours.txt")
        assert part.text[cited.index :].startswith("[1]")
        shown = prompt_of(running, text)
        assert "[1] hours.txt" in shown and "<source>\nThe office opens" in shown and "[3]" not in shown
        first, second = running.engine.seen
        assert made.usage is not None and made.usage.input_tokens == len(first.prompt) + len(second.prompt)

        # The stored conversation goes on with the search and what it found.
        more = await client.responses.create(model="tiny", input="When?", previous_response_id=made.id)
        assert more.output_text == "As I said, at eight."
        again = prompt_of(running, text)
        assert "<source>\nThe office opens" in again and "When does the office open?" in again and ANSWER in again
        items = await client.responses.input_items.list(more.id, order="asc")
        assert [item.type for item in items.data] == ["message", "file_search_call", "message", "message"]
        kept = await client.responses.retrieve(made.id)
        assert kept.output[0].type == "file_search_call" and kept.output[0].results == search.results

        # A client that keeps the conversation itself sends the items back.
        history = [item.model_dump(exclude_none=True) for item in made.output]
        asked: list[Any] = [{"role": "user", "content": "When can I come?"}, *history, {"role": "user", "content": "?"}]
        raw = await client.responses.with_raw_response.create(model="tiny", input=asked, store=False)
        assert "x-penstock-ignored" not in raw.headers
        assert "<source>\nThe office opens" in prompt_of(running, text)


async def test_the_stream_tells_of_searches(
    serving: Serving, encoder_endpoint: str, tmp_path: Path, text: TextModel
) -> None:
    two = calls(("file_search", {"queries": ["opening hours"]}), ("file_search", {"queries": ["cats", "leave"]}))
    answers = (f"Let me look.\n{two}", "Parents receive twelve weeks of paid leave after the birth of a child.")
    async with searching(serving, encoder_endpoint, tmp_path, text, *answers) as (_, client, store, files):
        async with client.responses.stream(model="tiny", input="Hello", tools=tool(store)) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        assert [item.type for item in final.output] == ["message", "file_search_call", "file_search_call", "message"]
        kinds = [event.type for event in events]
        wanted = [
            "response.file_search_call.in_progress",
            "response.file_search_call.searching",
            "response.file_search_call.completed",
        ]
        of_searches = [event for event in events if event.type.startswith("response.file_search_call")]
        for index in (1, 2):
            told = [event.type for event in of_searches if getattr(event, "output_index", None) == index]
            assert told == wanted
        assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
        numbers = [event.sequence_number for event in events if hasattr(event, "sequence_number")]
        assert numbers == sorted(set(numbers))
        for item in final.output[1:3]:
            assert item.type == "file_search_call" and item.results is None, "not asked for"
        # The model wrote no number; the sentence is that of a source.
        last = final.output[3]
        assert last.type == "message" and last.content[0].type == "output_text"
        (cited,) = last.content[0].annotations
        assert cited.type == "file_citation" and cited.file_id == files["leave.md"]
        added = [event for event in events if event.type == "response.output_text.annotation.added"]
        assert len(added) == 1


async def test_functions_of_the_client_beside_a_search(
    serving: Serving, encoder_endpoint: str, tmp_path: Path, text: TextModel
) -> None:
    both = calls(("file_search", {"queries": ["opening hours"]}), ("get_time", {}))
    async with searching(serving, encoder_endpoint, tmp_path, text, both, ANSWER) as (running, client, store, _):
        tools = [*tool(store), FUNCTION]
        made = await client.responses.create(model="tiny", input="Is the office open?", tools=tools)
        assert sorted(item.type for item in made.output) == ["file_search_call", "function_call"]
        assert made.status == "completed" and len(running.engine.seen) == 1
        call = next(item for item in made.output if item.type == "function_call")
        assert call.name == "get_time"
        result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "09:00"}]
        more = await client.responses.create(model="tiny", input=result, previous_response_id=made.id, tools=tools)
        assert more.output_text == ANSWER
        shown = prompt_of(running, text)
        assert "<source>\nThe office opens" in shown and "09:00" in shown


async def test_what_is_asked_of_a_search_is_honoured(
    serving: Serving, encoder_endpoint: str, tmp_path: Path, text: TextModel
) -> None:
    async with searching(serving, encoder_endpoint, tmp_path, text, OPENING) as (running, client, store, files):

        async def found(**more: Any) -> tuple[list[Any], Any]:
            running.engine.script = script(text, OPENING, "Done.").script
            made = await client.responses.create(
                model="tiny", input="Hi", tools=tool(store, **more), include=["file_search_call.results"]
            )
            item = made.output[0]
            assert item.type == "file_search_call" and item.results is not None
            return [result.file_id for result in item.results], made

        not_hours = {"type": "ne", "key": "name", "value": "hours.txt"}
        ids, _ = await found(filters=not_hours)
        assert files["hours.txt"] not in ids and len(ids) == 2
        assert (await found(max_num_results=1))[0] == [files["hours.txt"]]
        assert (await found(ranking_options={"score_threshold": 1.0}))[0] == []
        assert "Nothing was found" in prompt_of(running, text)

        # The same file in two stores: the chunks are equal, the attributes are not.
        twins = [(await client.vector_stores.create()).id for _ in range(2)]
        for id in twins:
            await client.vector_stores.files.create_and_poll(
                files["hours.txt"], vector_store_id=id, attributes={"in": id}
            )
        _, made = await found(vector_store_ids=twins)
        assert {one.attributes["in"] for one in made.output[0].results} == set(twins)

        # The model would search for ever; calls are limited, and the last step has no tool.
        running.engine.script = script(text, OPENING).script
        before = len(running.engine.seen)
        made = await client.responses.create(model="tiny", input="Hi", tools=tool(store), max_tool_calls=2)
        assert [item.type for item in made.output].count("file_search_call") == 2
        assert len(running.engine.seen) - before == 3 and made.status == "completed"

        running.engine.script = script(text, OPENING, "Done.").script
        forced = await client.responses.create(
            model="tiny", input="Hi", tools=[*tool(store), FUNCTION], tool_choice={"type": "file_search"}
        )
        assert running.engine.seen[-2].params.grammar and forced.output_text == "Done."
        for wrong, message in (
            ({"tools": tool("col_unknown")}, "no vector store"),
            ({"tools": tool(store, filters={"type": "eq", "key": "x"})}, "`key` and a `value`"),
            ({"tools": tool(store, max_num_results=51)}, "max_num_results"),
            ({"tools": [{"type": "file_search", "vector_store_ids": []}]}, "vector_store_ids"),
            ({"tools": [*tool(store), *tool(store)]}, "Two tools"),
            ({"tools": tool(store), "extra_body": {"rag": {"collection": store}}}, "both number"),
            ({"tool_choice": {"type": "file_search"}}, "file_search"),
        ):
            with pytest.raises((openai.BadRequestError, openai.NotFoundError), match=message):
                await client.responses.create(model="tiny", input="Hi", **wrong)  # type: ignore[call-overload]
        # A store that is gone when the model asks: it is told, and answers.
        running.engine.script = script(text, OPENING, "I cannot search.").script
        before, running.engine.step_s = len(running.engine.seen), 0.01
        task = asyncio.create_task(client.responses.create(model="tiny", input="Hi", tools=tool(store)))
        await eventually(lambda: len(running.engine.seen) > before)
        await client.vector_stores.delete(store)
        failed = await task
        item = failed.output[0]
        assert item.type == "file_search_call" and item.status == "failed" and failed.output_text == "I cannot search."


@pytest.mark.slow
async def test_in_the_background(serving: Serving, encoder_endpoint: str, tmp_path: Path, text: TextModel) -> None:
    async with searching(serving, encoder_endpoint, tmp_path, text, OPENING, ANSWER) as (_, client, store, files):
        made = await client.responses.create(model="tiny", input="Hi", tools=tool(store), background=True)
        for _ in range(6000):
            made = await client.responses.retrieve(made.id)
            if made.status not in ("queued", "in_progress"):
                break
            await asyncio.sleep(0.02)
        assert (made.status, [item.type for item in made.output]) == ("completed", ["file_search_call", "message"])
        message = made.output[1]
        assert message.type == "message" and message.content[0].type == "output_text"
        (cited,) = message.content[0].annotations
        assert cited.type == "file_citation" and cited.file_id == files["hours.txt"]
        events = [event async for event in await client.responses.retrieve(made.id, stream=True)]
        assert "response.file_search_call.completed" in [event.type for event in events]


@pytest.mark.slow
async def test_in_the_background_every_step_is_billed_once_also_after_a_takeover(
    serving: Serving, encoder_endpoint: str, tmp_path: Path, text: TextModel
) -> None:
    answers = (OPENING, ANSWER, OPENING, ANSWER)
    async with searching(serving, encoder_endpoint, tmp_path, text, *answers) as (running, client, store, _):

        async def tokens() -> int:
            data = (await running.client.get("/v1/usage?by=model")).json()["data"]
            return sum(row["completion_tokens"] for row in data if row["model"] == "tiny")

        stream = await client.responses.create(
            model="tiny", input="Hi", tools=tool(store), background=True, stream=True
        )
        events = [event async for event in stream]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert events[-1].type == "response.completed"
        whole = events[-1].response
        assert whole.usage is not None and await until(tokens, lambda found: found >= whole.usage.output_tokens)
        # As if its gateway had died before the end was stored: it is generated again, under the same charges.
        database = running.parts.database
        assert database is not None
        asked = {"model": "tiny", "input": "Hi", "tools": tool(store), "background": True, "stream": True}
        work = Work("/v1/responses", json.dumps(asked), [("content-type", "application/json")], "default", "", True)
        await database.execute(
            "UPDATE responses SET owner = 'dead', leased_until = ?, work = ?, attempts = 1",
            time.time(), msgspec.json.encode(work).decode(),
        )  # fmt: skip
        again = [event async for event in await client.responses.retrieve(whole.id, stream=True, starting_after=500)]
        assert [event.sequence_number for event in again] == [RUN_EVENTS + number for number in range(len(again))]
        assert again[-1].type == "response.completed" and again[-1].response.output_text == whole.output_text
        assert await tokens() == whole.usage.output_tokens


async def test_stores_of_others_are_not_searched(
    serving: Serving, encoder_endpoint: str, tmp_path: Path, text: TextModel
) -> None:
    async with library(serving, encoder_endpoint, tmp_path, script(text, OPENING, ANSWER)) as running:
        for tenant in ("acme", "beta"):
            await running.client.post("/v1/admin/tenants", json={"id": tenant})
        admin = await make_key(running, scopes=["admin", "inference"])
        other = await make_key(running, admin, tenant="beta")
        async with client_of(running, admin) as acme, client_of(running, other) as beta:
            store = await acme.vector_stores.create(name="secret")
            with pytest.raises(openai.NotFoundError) as refused:
                await beta.responses.create(model="tiny", input="Hi", tools=tool(store.id))
            assert refused.value.code == "vector_store_not_found" and not running.engine.seen
            assert json.dumps(refused.value.body).count("secret") == 0
