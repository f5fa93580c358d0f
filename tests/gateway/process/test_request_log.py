"""The request log of a real gateway: one record per request, read back by an administrator."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli.app import app
from penstock.config.context import JudgeConfig
from penstock.config.schema import RequestLogConfig
from penstock.gateway.accounting.charges import Accounts
from penstock.gateway.process.request_log import RequestLogOff
from penstock.gateway.process.settings import ModelSettings
from penstock.metering.log_entries import FIELDS, STREAMS, ChargeEntry, Entry, GradeEntry, VoteEntry
from penstock.metering.request_log import Sink
from penstock.text import TextModel
from tests.gateway.conftest import Running, Serving, eventually
from tests.scripted import ScriptedEngine

FAST = RequestLogConfig(flush_s=0.01)


def settings(tmp_path: Path, **more: Any) -> dict[str, Any]:
    return {"store_url": f"sqlite:///{tmp_path / 'store.db'}", "request_log": FAST, **more}


async def read(running: Running, query: str = "") -> list[dict[str, Any]]:
    reply = await running.client.get(f"/v1/admin/requests?{query}")
    assert reply.status_code == 200, reply.text
    return [row for row in reply.json()["data"] if row["route"] != "/v1/admin/requests"]


async def written(running: Running, count: int) -> None:
    await eventually(lambda: running.parts.metrics.request_log_written.value >= count)


async def test_every_request_leaves_one_record_without_its_text(serving: Serving, tmp_path: Path) -> None:
    async with serving(**settings(tmp_path)) as running:
        usage = (await running.chat(user="ann")).json()["usage"]
        await running.chat(stream=True)
        refused = await running.chat(model="nobody")
        assert refused.status_code == 404
        await written(running, 3)
        rows = {row["request_id"]: row for row in await read(running)}
        assert len(rows) == 3
        whole = next(row for row in rows.values() if row["user_id"] == "ann")
        assert set(whole) == set(FIELDS)
        assert (whole["tenant"], whole["model_version"], whole["adapter_id"]) == ("default", "tiny", None)
        assert (whole["prompt_tokens"], whole["completion_tokens"]) == (
            usage["prompt_tokens"],
            usage["completion_tokens"],
        )
        assert (whole["finish_reason"], whole["route"]) == ("stop", "/v1/chat/completions")
        assert 0 < whole["ttft_ms"] <= whole["total_latency_ms"]
        failed = rows[refused.headers["x-request-id"]]
        assert (failed["finish_reason"], failed["ttft_ms"], failed["tenant"]) == ("error", None, "default")


async def test_records_can_be_asked_for_by_end_tenant_and_number(serving: Serving, tmp_path: Path) -> None:
    async with serving(**settings(tmp_path)) as running:
        for _ in range(3):
            await running.complete()
        await running.chat(model="nobody")
        await written(running, 4)
        assert len(await read(running, "finish_reason=error")) == 1
        assert len(await read(running, "since=1h&tenant=default&limit=2&finish_reason=stop")) == 2
        assert await read(running, "tenant=other") == []
        for query in ("limit=0", "limit=x", "since=yesterday", "color=red"):
            assert (await running.client.get(f"/v1/admin/requests?{query}")).status_code == 400


async def test_what_is_still_in_memory_is_written_at_the_end(serving: Serving, tmp_path: Path) -> None:
    slow = RequestLogConfig(flush_s=60.0)
    async with serving(**settings(tmp_path, request_log=slow)) as running:
        await running.chat()
        assert await read(running) == []
    async with serving(**settings(tmp_path)) as running:
        assert len(await read(running)) == 1


async def test_a_sink_that_is_away_changes_nothing_for_requests(
    serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path))
    away = RequestLogConfig(url=f"sqlite:///{tmp_path / 'file' / 'log.db'}", spool="~/spool", flush_s=0.01)
    async with serving(**settings(tmp_path, request_log=away)) as running:
        assert (tmp_path / "spool").is_dir()
        replies = await asyncio.gather(*(running.chat() for _ in range(20)))
        assert {reply.status_code for reply in replies} == {200}
        await eventually(lambda: running.parts.metrics.request_log_spooled.value == 20)
        text = (await running.client.get("/metrics")).text
        assert "penstock_request_log_spooled_total 20" in text
        assert "penstock_request_log_lost_total 0" in text


async def test_the_command_shows_the_same_records(serving: Serving, tmp_path: Path) -> None:
    async with serving(**settings(tmp_path)) as running:
        await running.chat(user="ann")
        await written(running, 1)
        [row] = await read(running)
    store = ["--set", f"store.url=sqlite:///{tmp_path / 'store.db'}"]
    ask = functools.partial(asyncio.to_thread, CliRunner().invoke, app)
    lines = (await ask(["requests", "-o", "jsonl", "--finish-reason", "stop", *store])).output.splitlines()
    assert [json.loads(line) for line in lines] == [row]
    assert (await ask(["requests", "--tenant", "other", *store])).output == "No requests in this period.\n"
    assert "/v1/chat/completions" in (await ask(["requests", *store], env={"COLUMNS": "300"})).output


class Everything(Sink):
    streams = frozenset(stream.name for stream in STREAMS)

    def __init__(self) -> None:
        self.entries: list[Any] = []

    async def write(self, entries: Sequence[Entry]) -> None:
        self.entries += entries

    async def close(self) -> None:
        return

    def of(self, kind: type) -> list[Any]:
        return [entry for entry in self.entries if isinstance(entry, kind)]


async def test_a_sink_for_analysis_also_gets_charges_votes_and_grades(
    serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: TextModel
) -> None:
    sink = Everything()
    monkeypatch.setattr("penstock.gateway.process.request_log.open_sink", lambda url, retention: sink)
    engine = ScriptedEngine(text, lambda request: [*text.encode("yes"), text.eos_token_ids[0]], max_model_len=2048)
    config = RequestLogConfig(url="kafka://broker/log", spool=str(tmp_path / "spool"), flush_s=0.01)
    priced = (ModelSettings("tiny", "", input_price=1.0, output_price=2.0),)
    given = settings(tmp_path, request_log=config, judge=JudgeConfig(rate=1.0), models=priced)
    async with serving(engine, **given) as running:
        reply = await running.chat(user="ann", metadata={"feature": "search"})
        vote = {"response_id": reply.json()["id"], "rating": "up", "comment": "private"}
        assert (await running.client.post("/v1/feedback", json=vote)).status_code == 200
        await eventually(lambda: all(sink.of(stream.entry) for stream in STREAMS))
        accounts = running.parts.accounts
        assert isinstance(accounts, Accounts)
        [total] = await accounts.ledger.totals()
    [charge], [voted], [grade] = sink.of(ChargeEntry), sink.of(VoteEntry), sink.of(GradeEntry)
    id = reply.headers["x-request-id"]
    assert {charge.request_id, voted.request_id, grade.request_id} == {id}
    assert (charge.cost_nanos, charge.feature, charge.user_id) == (total.cost_nanos, "search", "ann")
    assert charge.cost_nanos > 0 and voted.rating == "up" and grade.relevance == 1.0
    assert "private" not in repr(sink.entries)


async def test_off_is_off(serving: Serving, tmp_path: Path) -> None:
    async with serving(**settings(tmp_path, request_log=RequestLogConfig(url="off"))) as running:
        assert (await running.chat()).status_code == 200
        assert isinstance(running.parts.request_log, RequestLogOff)
        assert (await running.client.get("/v1/admin/requests")).status_code == 503
