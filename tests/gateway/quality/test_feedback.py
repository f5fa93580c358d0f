"""R-API-8: a thumb up or down on an answer of one's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.gateway.process.settings import ModelSettings
from tests.gateway.api.test_identity import make_key
from tests.gateway.conftest import Running, Serving, events


async def vote(running: Running, id: str, rating: str = "up", **more: Any) -> httpx.Response:
    return await running.client.post("/v1/feedback", json={"response_id": id, "rating": rating, **more})


@pytest.fixture(params=["sqlite", "postgres"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path / 'store.db'}"
    return url if request.param == "sqlite" else str(request.getfixturevalue("postgres_url"))


async def test_every_kind_of_answer_can_be_voted_on(serving: Serving, store_url: str) -> None:
    models = (ModelSettings("tiny", ""),)
    async with serving(store_url=store_url, models=models) as running:
        chat = (await running.chat()).json()["id"]
        streamed = json.loads(events((await running.complete(stream=True)).text)[0])["id"]
        response = (await running.client.post("/v1/responses", json={"model": "tiny", "input": "hi"})).json()["id"]
        body = {"model": "tiny", "max_tokens": 20, "messages": [{"role": "user", "content": "hi"}]}
        message = (await running.client.post("/v1/messages", json=body)).json()["id"]
        for id, rating in ((chat, "down"), (streamed, "up"), (response, "up"), (message, "down")):
            assert (await vote(running, id, rating)).status_code == 200
        changed = (await vote(running, chat, "up", comment="better\0 now", user="ann")).json()
        assert (changed["rating"], changed["comment"], changed["user"]) == ("up", "better now", "ann")
        assert (changed["model"], changed["route"]) == ("tiny", "/v1/chat/completions")
        for id in ("chatcmpl-" + "0" * 32, "nonsense", chat.removeprefix("chatcmpl-"), chat + "0"):
            reply = await vote(running, id)
            assert (reply.status_code, reply.json()["error"]["param"]) == (404, "response_id")
        for wrong in ({"rating": "sideways"}, {"comment": "x" * 4001}, {"stars": 5}):
            reply = await running.client.post("/v1/feedback", json={"response_id": chat, "rating": "up", **wrong})
            assert reply.status_code == 400
        listed = (await running.client.get("/v1/admin/feedback?since=1h&model=tiny")).json()
        ours = {chat, streamed, response, message}
        assert ours <= {entry["response_id"] for entry in listed["data"]}
        totals = {entry["route"]: entry for entry in listed["totals"]}
        assert totals["/v1/chat/completions"]["share_up"] == 1.0 and totals["/v1/messages"]["down"] >= 1
        only = (await running.client.get("/v1/admin/feedback?rating=down&route=/v1/messages&limit=1")).json()["data"]
        assert [entry["response_id"] for entry in only] == [message]
        assert (await running.client.get("/v1/admin/feedback?since=never")).status_code == 400
        assert (changed["via"], changed["arm"]) == ("direct", "")
        labels = 'model_name="tiny",endpoint="/v1/chat/completions",route="direct",arm="",rating="up"'
        assert await running.metric(f"penstock_feedback_total{{{labels}}}") == 1


async def test_nobody_votes_on_another_tenant_s_answers(serving: Serving, tmp_path: Path) -> None:
    models = (ModelSettings("tiny", ""),)
    async with serving(store_url=f"sqlite:///{tmp_path / 'store.db'}", models=models) as running:
        for tenant in ("acme", "beta"):
            await running.client.post("/v1/admin/tenants", json={"id": tenant})
        operator = await make_key(running, tenant="acme", scopes=["admin"])
        running.client.headers["authorization"] = f"Bearer {operator}"
        acme, beta = [await make_key(running, tenant=tenant) for tenant in ("acme", "beta")]
        running.client.headers["authorization"] = f"Bearer {acme}"
        answer = (await running.chat()).json()["id"]
        assert (await running.client.get("/v1/admin/feedback")).status_code == 403
        running.client.headers["authorization"] = f"Bearer {beta}"
        assert (await vote(running, answer)).status_code == 404
        running.client.headers["authorization"] = f"Bearer {acme}"
        assert (await vote(running, answer)).status_code == 200


async def test_without_a_store_there_is_nothing_to_vote_on(serving: Serving) -> None:
    async with serving() as running:
        assert (await vote(running, (await running.chat()).json()["id"])).status_code == 503
