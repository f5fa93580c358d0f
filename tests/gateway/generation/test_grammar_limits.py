"""A grammar cannot take the machine: one that is too large is a 400 with the limit, and others go on meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.engine.grammar.compile_queue import WAITING_PER_OWNER
from penstock.gateway.app.exchange import ClientDisconnected, Exchange
from penstock.gateway.generation.response_format import GrammarCache
from penstock.gateway.generation.schemas import GrammarFormat, RegexFormat
from penstock.protocol.errors import InvalidRequest, Overloaded
from penstock.telemetry.metrics import Metrics
from tests.gateway.conftest import Serving, eventually

BOMB = {
    "$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 200} for i in range(30)} | {"d30": {}},
    "$ref": "#/$defs/d0",
}
TOO_LARGE: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "regex", "regex": "a?" * 100_000}}, "at most 4096 are accepted"),
    ({"response_format": {"type": "regex", "regex": "a?" * 20_000}}, "at most 4096 are accepted"),
    ({"response_format": {"type": "regex", "regex": "(x{1000}){1000}"}}, "at most 10000 are accepted"),
    ({"response_format": {"type": "choice", "choice": ["x" * 9_000]}}, "at most 2048 are accepted"),
    ({"response_format": {"type": "grammar", "grammar": 'start: "a"{90000}'}}, "at most 10000 are accepted"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": BOMB}}}, "more than 1000"),
    (
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"pattern": "(a{500}){500}"}}}],
            "tool_choice": "required",
        },
        "parameters of `f`: a regular expression in it repeats 250000 times; at most 10000",
    ),
]


def costly(seed: int = 0) -> GrammarFormat:
    """Small, and takes a second to compile: terminals that are twice each other."""
    rules = "\n".join(f"T{i}: T{i + 1} T{i + 1}" for i in range(25))
    return GrammarFormat(f'start: T0 "{seed}"\n{rules}\nT25: "a"')


async def test_a_grammar_that_is_too_large_is_a_400_with_the_limit(serving: Serving) -> None:
    async with serving() as gateway:
        for body, limit in TOO_LARGE:
            begun = time.monotonic()
            reply = await gateway.chat(**body)
            assert time.monotonic() - begun < 60
            error = reply.json()["error"]
            assert reply.status_code == 400 and error["code"] == "unsupported_grammar"
            assert limit in error["message"]
        form = {"type": "choice", "choice": ["yes", "no"]}
        assert (await gateway.chat(response_format=form)).status_code == 200
        assert len(gateway.engine.seen) == 1, "the others never reached the engine"


@pytest.fixture
async def cache() -> AsyncIterator[GrammarCache]:
    cache = GrammarCache(Metrics(list))
    await cache.response_format(RegexFormat("warm"))
    yield cache
    cache.close()


class Client:
    """An exchange, as far as the cache looks at it."""

    def __init__(self, tenant: str) -> None:
        self.caller = SimpleNamespace(tenant=tenant)
        self.leave: Callable[[Exception], None] | None = None

    @contextmanager
    def watched(self, fail: Callable[[Exception], None]) -> Iterator[None]:
        self.leave = fail
        yield
        self.leave = None


def exchange(tenant: str) -> Exchange:
    return cast(Exchange, Client(tenant))


def trials(cache: GrammarCache) -> list[str]:
    """The processes in which grammars are being tried."""
    process = cache._sandbox._process
    assert process is not None
    return Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()


async def test_a_tenants_grammars_do_not_delay_anothers(cache: GrammarCache) -> None:
    attack = [
        asyncio.ensure_future(cache.response_format(costly(seed), exchange("greedy")))
        for seed in range(WAITING_PER_OWNER)
    ]
    await eventually(lambda: bool(trials(cache)))
    with pytest.raises(Overloaded, match="already wait"):
        for seed in range(100, 103):
            attack.append(asyncio.ensure_future(cache.response_format(costly(seed), exchange("greedy"))))
            await asyncio.sleep(0.01)
            if attack[-1].done():
                attack.pop().result()
    for number in range(3):
        assert await cache.response_format(RegexFormat(f"answer {number}"), exchange("other"))
    assert not all(task.done() for task in attack), "the others were still waiting"
    for task in attack:
        task.cancel()
    await asyncio.gather(*attack, return_exceptions=True)


async def test_a_check_ends_with_its_request(cache: GrammarCache) -> None:
    client = Client("a")
    for leaves in (False, True):
        task = asyncio.ensure_future(cache.response_format(costly(), cast(Exchange, client)))
        await eventually(lambda: bool(trials(cache)))
        if leaves:
            assert client.leave is not None
            client.leave(ClientDisconnected())
        else:
            task.cancel()
        with pytest.raises((asyncio.CancelledError, ClientDisconnected)):
            await task
        await eventually(lambda: not trials(cache))


async def test_what_is_too_complex_says_so(cache: GrammarCache) -> None:
    with pytest.raises(InvalidRequest, match="too complex"):
        await cache.response_format(costly(), exchange("a"))


async def test_requests_with_the_same_grammar_share_its_check(cache: GrammarCache) -> None:
    form, client = RegexFormat("shared"), Client("a")
    leaving = asyncio.ensure_future(cache.response_format(form, cast(Exchange, client)))
    staying = [asyncio.ensure_future(cache.response_format(form, exchange("a"))) for _ in range(3 * WAITING_PER_OWNER)]
    await asyncio.sleep(0)
    assert client.leave is not None
    client.leave(ClientDisconnected())
    with pytest.raises(ClientDisconnected):
        await leaving
    assert len(set(await asyncio.gather(*staying))) == 1
    assert not cache._checks
    checked = len(cache._known)
    assert await cache.response_format(form, exchange("a")) and len(cache._known) == checked
    # Another tenant cannot tell from the time it takes that somebody has used the grammar.
    assert await cache.response_format(form, exchange("b")) and len(cache._known) == checked + 1
