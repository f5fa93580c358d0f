"""R-GW-5: `kill -9` of the gateway or the engine at any instant loses no charge, bills none twice, and what was left
open is settled with the tokens the engine really produced."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.metering.ledger import Ledger
from penstock.storage import open_database
from tests.e2e.diary import MOST_TOKENS, Run, read_diary
from tests.e2e.drill import Drill, drill
from tests.gateway.conftest import eventually

NEAR_S = 0.3
"""An engine that is killed may not have sent what it wrote down this long before."""


@dataclass
class Seen:
    """What a client saw of its request."""

    tokens: int = 0
    usage: dict[str, int] | None = None


async def ask(client: httpx.AsyncClient, name: str, chance: random.Random) -> Seen:
    """One request of a random kind. Whatever breaks is what a client sees break."""
    seen = Seen()
    body: dict[str, Any] = {"model": "tiny", "prompt": "x" * chance.randint(1, 40), "max_tokens": chance.randint(1, 80)}
    kind = chance.choice(("whole", "whole", "stream", "stream", "cancelled", "two", "echo", "impatient"))
    if kind == "two":
        body["n"] = 2
    elif kind == "echo":
        body |= {"echo": True, "max_tokens": 0}
    headers = {"x-request-id": name}
    try:
        if kind in ("stream", "cancelled"):
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            stop_at = chance.randint(1, 40) if kind == "cancelled" else None
            async with client.stream("POST", "/v1/completions", json=body, headers=headers) as reply:
                async for line in reply.aiter_lines():
                    if line.startswith("data: {"):
                        event = json.loads(line.removeprefix("data: "))
                        seen.tokens += sum(len(choice["text"]) for choice in event.get("choices", ()))
                        seen.usage = event.get("usage") or seen.usage
                    if stop_at is not None and seen.tokens >= stop_at:
                        break
        else:
            within = chance.uniform(0.01, 0.2) if kind == "impatient" else 30.0
            reply = await client.post("/v1/completions", json=body, headers=headers, timeout=within)
            if reply.status_code == 200:
                seen.usage = reply.json()["usage"]
    except httpx.ConnectError:  # nobody listens at the moment
        await asyncio.sleep(0.3)
        return await ask(client, name, chance)
    except httpx.HTTPError:
        pass
    return seen


async def load(running: Drill, count: int, kills: int, chance: random.Random) -> dict[str, Seen]:
    """`count` requests, twenty at a time, and `kills` at random instants among them."""
    seen: dict[str, Seen] = {}
    names = iter(range(count))

    async def clients(client: httpx.AsyncClient) -> None:
        for number in names:
            seen[f"drill-{number}"] = await ask(client, f"drill-{number}", chance)
            await asyncio.sleep(chance.uniform(0, 0.02))

    async def killer() -> None:
        for number in range(kills):
            before = len(seen)
            await eventually(lambda: len(seen) >= min(before + count // (kills + 1), count - 25), 60)  # noqa: B023
            await asyncio.sleep(chance.uniform(0, 0.1))
            await asyncio.to_thread(running.kill_engine if number % 2 else running.kill_gateway)
            await asyncio.to_thread(running.ready)

    async with httpx.AsyncClient(base_url=running.url, timeout=180, verify=False) as client:
        await asyncio.gather(killer(), *(clients(client) for _ in range(20)))
    return seen


async def settled(running: Drill, within: float = 180.0) -> list[tuple[Any, ...]]:
    """Every charge, once none is open any more: its id, request, tokens and who settled it."""
    database = await open_database(running.store)
    ledger = Ledger(database)
    deadline = time.monotonic() + within
    while left := await ledger.open_charges():
        assert time.monotonic() < deadline, f"{len(left)} charges stay open"
        await asyncio.sleep(0.1)
    rows = await database.fetch(
        "SELECT o.id, o.request_id, s.prompt_tokens, s.completion_tokens, s.cost_nanos, s.settled_by, s.cached_tokens "
        "FROM charges_opened o LEFT JOIN charges_settled s ON s.id = o.id"
    )
    await database.close()
    return rows


def produced(running: Drill) -> tuple[dict[str, int], set[str], set[str]]:
    """Tokens by charge, as the engines wrote them down; the charges whose end an engine may have kept to itself; and
    those whose engine died later on, and with it its memory of them."""
    totals: defaultdict[str, int] = defaultdict(int)
    doubtful: set[str] = set()
    forgotten: set[str] = set()
    for number in range(1, running.engines + 1):
        runs: dict[str, Run] = read_diary(running.diary(number))
        death = running.deaths.get(number)
        for request_id, run in runs.items():
            charge = request_id.partition(":")[0]
            totals[charge] += 0 if request_id.endswith("x") else run.tokens
            if death is not None:
                forgotten.add(charge)
                if run.last_at > death - NEAR_S:
                    doubtful.add(charge)
    return totals, doubtful, forgotten


@pytest.mark.parametrize(
    ("count", "kills"),
    [pytest.param(30, 2, id="quick"), pytest.param(500, 10, id="long", marks=pytest.mark.slow)],
)
async def test_the_ledger_balances_with_what_the_engine_produced(tmp_path: Path, count: int, kills: int) -> None:
    chance = random.Random(count)
    with drill(tmp_path) as running:
        seen = await load(running, count, kills, chance)
        rows = await settled(running)
    made, doubtful, forgotten = produced(running)
    exact = recovered = 0
    told = {name for name, client in seen.items() if client.usage is not None}
    for id, name, prompt, completion, cost, settled_by, cached in rows:
        assert completion is not None, f"{name} was never settled"
        client = seen[name]
        if client.usage is not None:  # the client has its answer: the bill says the same, and is not lost
            told.discard(name)
            assert (prompt, completion) == (client.usage["prompt_tokens"], client.usage["completion_tokens"]), name
        if settled_by == "recovery" and id in forgotten:
            # Gateway and engine dead, one after the other, before anybody asked: what the gateway had noted stands.
            # How old that may be is a matter of the journal, in tests/metering/test_ledger.py.
            assert running.noted.get(id, 0) <= completion <= made[id], name
        elif id in doubtful:
            assert client.tokens <= completion <= made[id], name
        else:
            assert completion == made.get(id, 0), (name, settled_by)
            exact += 1
        recovered += settled_by == "recovery" and completion > 0
        if completion:
            assert cost == (prompt - cached) * 1000 + cached * 500 + completion * 2000
    assert told == set(), "answers without a charge"
    assert len({name for _, name, *_ in rows}) == len(rows)  # none twice
    unbilled = made.keys() - {row[0] for row in rows}
    assert len(unbilled) <= 25 * kills  # its gateway died before the charge was written, and before anything was sent
    # On a fast machine much of the load falls into the moments around a kill; what is left must still say something.
    assert recovered > 0 and exact >= 0.25 * len(rows)


@pytest.mark.slow
async def test_when_both_die_at_once_what_was_noted_is_billed(tmp_path: Path) -> None:
    """A stream by itself, so that nothing but the stream makes the gateway write."""
    seen = 0
    body = {"model": "tiny", "prompt": "x" * 10, "max_tokens": MOST_TOKENS, "stream": True}
    with drill(tmp_path) as running:

        async def follow() -> None:
            nonlocal seen
            with suppress(httpx.HTTPError):
                async with (
                    httpx.AsyncClient(base_url=running.url, timeout=180, verify=False) as client,
                    client.stream("POST", "/v1/completions", json=body) as reply,
                ):
                    async for line in reply.aiter_lines():
                        seen += line.startswith("data: {")

        reading = asyncio.create_task(follow())
        await eventually(lambda: seen > 20, 30)
        before = seen
        await eventually(lambda: max(running.read_notes().values(), default=0) >= before, 30)
        await asyncio.to_thread(running.kill_both)
        await reading
        await asyncio.to_thread(running.ready)
        ((id, _, _, completion, cost, settled_by, _),) = await settled(running)
    made, _, _ = produced(running)
    assert settled_by == "recovery" and before <= running.noted[id] == completion <= made[id]
    assert cost >= completion * 2000
