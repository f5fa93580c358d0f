"""Charges of a real gateway: every token once, also of streams that break off."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from penstock.config.schema import PriceConfig
from penstock.gateway.accounting.charges import Accounts
from penstock.gateway.process.settings import ModelSettings
from penstock.metering import journal
from penstock.metering.ledger import Charge, Ledger, Settlement, opened, progressed, settled
from penstock.storage import open_database
from tests.gateway.api.test_reasoning import OPENS, SAID, scripted
from tests.gateway.conftest import Running, Serving, eventually, until
from tests.scripted import ScriptedEngine
from tests.text.test_thoughts import model

ANSWER = len("Hello, world!") + 1


def settings(tmp_path: Path, **more: Any) -> dict[str, Any]:
    return {
        "store_url": f"sqlite:///{tmp_path / 'ledger.db'}",
        "models": (ModelSettings("tiny", "", input_price=1.0, output_price=2.0),),
        **more,
    }


async def total(running: Running, query: str = "by=model") -> dict[str, Any]:
    reply = await running.client.get(f"/v1/usage?{query}")
    assert reply.status_code == 200, reply.text
    data = reply.json()["data"]
    return dict(data[0]) if data else {}


async def test_what_a_request_used_is_in_the_ledger_before_its_answer_ends(serving: Serving, tmp_path: Path) -> None:
    async with serving(**settings(tmp_path)) as running:
        whole = (await running.chat()).json()["usage"]
        used = await total(running)
        assert (used["requests"], used["prompt_tokens"], used["completion_tokens"]) == (
            1,
            whole["prompt_tokens"],
            ANSWER,
        )
        cached = whole["prompt_tokens_details"]["cached_tokens"]
        assert used["cached_tokens"] == cached
        nanos = whole["prompt_tokens"] * 1000 - cached * 500 + ANSWER * 2000
        assert used["cost"] == f"0.{nanos:09d}".rstrip("0")
        labels = 'tenant="default",model_name="tiny",adapter="",feature=""'
        for kind, count in (("prompt", whole["prompt_tokens"]), ("cached", cached), ("completion", ANSWER)):
            assert await running.metric(f'penstock_usage_tokens_total{{{labels},kind="{kind}"}}') == count
        assert await running.metric(f"penstock_usage_cost_dollars_total{{{labels}}}") == nanos / 1e9
        await running.chat(stream=True, n=2)
        used = await total(running)
        assert (used["requests"], used["completion_tokens"]) == (2, 3 * ANSWER)


async def test_thoughts_are_counted_apart(serving: Serving, tmp_path: Path) -> None:
    thinker = model(tmp_path, "<think>", "</think>", template=OPENS)
    async with serving(scripted(thinker, SAID), text=thinker, **settings(tmp_path)) as running:
        said = (await running.chat(n=2)).json()["usage"]
        thought = said["completion_tokens_details"]["reasoning_tokens"]
        used = await total(running)
        assert (used["completion_tokens"], used["reasoning_tokens"]) == (said["completion_tokens"], thought)
        assert 0 < thought < said["completion_tokens"]
        labels = 'tenant="default",model_name="tiny",adapter="",feature=""'
        assert await running.metric(f"penstock_usage_reasoning_tokens_total{{{labels}}}") == thought
        await running.chat(stream=True, max_tokens=3)  # ends inside its thought
        assert (await total(running))["reasoning_tokens"] == thought + 3


async def test_a_short_stream_takes_one_transaction(
    serving: Serving, tmp_path: Path, text: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    write = Ledger.write

    async def counted(self: Ledger, statements: Any) -> Any:
        written.append(len(statements))
        return await write(self, statements)

    monkeypatch.setattr(Ledger, "write", counted)
    engine = ScriptedEngine(text, lambda request: [ord("a")] * request.params.max_tokens, step_s=0.01)
    async with serving(engine, **settings(tmp_path)) as running:
        accounts = running.parts.accounts
        assert isinstance(accounts, Accounts)
        monkeypatch.setattr(journal, "QUICK_S", 10.0)  # nothing is written before it is waited for
        monkeypatch.setattr(journal, "GATHER_S", 10.0)
        await running.chat(stream=True, max_tokens=1)
        assert len(written) == 1, "its charge and its settlement"
        if accounts.journal._later is not None:  # of the charge before, which was not waited for
            accounts.journal._later.cancel()
            accounts.journal._later = None
        accounts.journal._opened.clear()
        monkeypatch.setattr(journal, "QUICK_S", 0.0)
        charge = Charge("y", "req", "gateway", 1000.0, "acme", "", "", "", "tiny", "", "", 50, 100, 1000, 500, 2000)
        async with asyncio.timeout(2.0):
            assert await accounts.journal.open(charge), "where little is going on it is written soon"


async def test_dimensions_come_from_the_key_the_body_and_the_header(serving: Serving, tmp_path: Path) -> None:
    async with serving(**settings(tmp_path)) as running:
        await running.chat(user="ann", metadata={"feature": "search"})
        running.client.headers["x-feature"] = "chat"
        await running.complete(user="bob")
        rows = (await running.client.get("/v1/usage?by=user,feature,tenant")).json()["data"]
        assert {(row["user"], row["feature"], row["tenant"]) for row in rows} == {
            ("ann", "search", "default"),
            ("bob", "chat", "default"),
        }


async def test_a_client_that_leaves_pays_for_what_was_produced(serving: Serving, tmp_path: Path, text: Any) -> None:
    engine = ScriptedEngine(text, lambda request: [ord("a")] * 200, step_s=0.01)
    async with serving(engine, **settings(tmp_path)) as running:
        body = {"model": "tiny", "prompt": "hi", "max_tokens": 200, "stream": True}
        async with running.client.stream("POST", "/v1/completions", json=body) as reply:
            seen = 0
            async for line in reply.aiter_lines():
                seen += line.startswith("data: {")
                if seen == 10:
                    break
        ledger = running.parts.accounts
        assert isinstance(ledger, Accounts)
        used = await until(lambda: total(running), bool)
        assert used["completion_tokens"] == sum(engine._counts.values())
        assert 10 <= used["completion_tokens"] < 200
        assert await ledger.ledger.open_charges() == []


async def test_prices_by_tier_and_cached_tokens(serving: Serving, tmp_path: Path) -> None:
    prices = (PriceConfig(model="tiny", tier="standard", input_price=10.0, cached_price=1.0, output_price=0.0),)
    async with serving(**settings(tmp_path, prices=prices, default_tier="standard")) as running:
        usage = (await running.chat()).json()["usage"]
        prompt, cached = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
        assert cached > 0
        assert float((await total(running))["cost"]) == pytest.approx(((prompt - cached) * 10 + cached) / 1e6)


async def test_a_dead_gateway_s_charges_are_settled_by_another(serving: Serving, tmp_path: Path) -> None:
    options = settings(tmp_path, gateway_timeout_s=0.2)
    ledger = Ledger(await open_database(options["store_url"]))
    await ledger.prepare()
    left = Charge("x", "req", "dead", 1000.0, "acme", "", "", "", "tiny", "", "", 50, 100, 1000, 500, 2000)
    await ledger.write([*opened(left), *progressed({"x": (16, 7, 0)})])
    async with serving(**options) as running:
        await until(ledger.open_charges, lambda left: not left)
        used = await total(running, "by=tenant")
        assert (used["tenant"], used["prompt_tokens"], used["cached_tokens"], used["completion_tokens"]) == (
            "acme", 50, 16, 7,
        )  # fmt: skip
        # The dead one, if it should write after all, is too late.
        late = Settlement(left, 2000.0, 16, 9, 1, "stop")
        assert await ledger.write(settled(late)) == [0, 0]


async def test_questions_that_cannot_be_answered_are_400(serving: Serving, tmp_path: Path) -> None:
    async with serving(**settings(tmp_path)) as running:
        for query in ("by=password", "since=yesterday", "color=red"):
            assert (await running.client.get(f"/v1/usage?{query}")).status_code == 400


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_odd_characters_do_not_stop_the_ledger(
    serving: Serving, tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    options = settings(tmp_path)
    if kind == "postgres":
        options["store_url"] = request.getfixturevalue("postgres_url")
    async with serving(**options) as running:
        assert (await running.chat(user="a\0b" + "x" * 500)).status_code in (200, 400)
        assert (await running.chat(user="ann", metadata={"feature": "f\0g"})).status_code == 200
        rows = (await running.client.get("/v1/usage?by=user,feature")).json()["data"]
        assert ("ann", "fg") in {(row["user"], row["feature"]) for row in rows}


async def test_a_request_that_broke_off_before_its_first_token_is_free(
    serving: Serving, tmp_path: Path, text: Any
) -> None:
    engine = ScriptedEngine(text)
    engine.hold = True
    async with serving(engine, **settings(tmp_path)) as running:
        asking = asyncio.create_task(running.client.post("/v1/completions", json={"model": "tiny", "prompt": "hi"}))
        await eventually(lambda: bool(engine.seen))
        asking.cancel()
        used = await until(lambda: total(running), bool)
        assert (used["requests"], used["completion_tokens"], float(used["cost"])) == (1, 0, 0.0)


async def test_while_the_ledger_cannot_be_written_new_requests_are_refused_and_free_and_begun_ones_end(
    serving: Serving, tmp_path: Path, text: Any
) -> None:
    engine = ScriptedEngine(text, step_s=0.02)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    async with serving(engine, **settings(tmp_path, ledger_wait_s=1.0)) as running:
        assert (await running.chat()).status_code == 200
        price = float((await total(running))["cost"])
        other = sqlite3.connect(tmp_path / "ledger.db", isolation_level=None)
        async with running.client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as begun:
            lines = begun.aiter_lines()
            await anext(lines)
            other.execute("BEGIN IMMEDIATE")
            try:
                assert [line async for line in lines if line][-1] == "data: [DONE]", "its charge is in the ledger"
                refused = [await running.chat(stream=stream) for stream in (False, True, False)]
            finally:
                other.execute("ROLLBACK")
                other.close()
        assert {reply.status_code for reply in refused} == {503}
        assert {reply.json()["error"]["code"] for reply in refused} == {"ledger_unavailable"}
        assert all(int(reply.headers["retry-after"]) >= 1 for reply in refused)
        await until(running.chat, lambda reply: reply.status_code == 200)
        assert float((await total(running))["cost"]) == pytest.approx(3 * price), "three answers, and nothing else"
        assert not await running.parts.accounts.ledger.open_charges()  # type: ignore[union-attr]
