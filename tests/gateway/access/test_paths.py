"""R-GW-9 on the ways that lead to a model without its name in the request: none reaches what the caller may not use."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.config.context import JudgeConfig
from penstock.config.guardrails import GuardrailConfig
from penstock.config.schema import TierConfig
from penstock.gateway.process.settings import ModelSettings
from penstock.text import TextModel
from tests.gateway.access.world import HELLO, NOTHING_HIDDEN, World, world
from tests.gateway.accounting.test_admission import one_at_a_time
from tests.gateway.conftest import Serving, eventually, until
from tests.scripted import ScriptedEngine
from tests.tools.execution.parts import weather

HARD = [{"role": "user", "content": "Prove that 2 is prime, step by step, and write the code for it in Rust."}]
NO_RULES: dict[str, Any] = {"guardrails": ()}


async def allow(it: World, kind: str, id: str, **lists: Any) -> None:
    await it.ok("admin", "PATCH", f"/v1/admin/{kind}s/{id}", json={"allow": lists})


async def test_a_route_leads_to_what_the_caller_may_use(serving: Serving, text: TextModel, tmp_path: Path) -> None:
    async with world(serving, text, tmp_path, **NO_RULES) as it:
        hard = await it.chat("acme", "open-route", messages=HARD)
        assert hard.headers["x-penstock-model"] == "hidden-model"
        for who in ("rival", "narrow"):
            for messages in (HARD, HELLO):
                reply = await it.chat(who, "open-route", messages=messages)
                assert reply.status_code == 200 and reply.headers["x-penstock-model"] == "tiny"
                assert "hidden" not in f"{reply.headers}{reply.text}"
            shown = await it.ok(who, "GET", "/v1/models/open-route")
            assert shown["routes_to"] == ["tiny"]
        assert len(it.asked) == 1


async def test_fallbacks_and_overflow(serving: Serving, text: TextModel, tmp_path: Path) -> None:
    chain = {"fallback": ("hidden-model", "hidden-remote"), "overflow_at": 1}
    busy = ScriptedEngine(text, max_model_len=4096)
    async with world(serving, text, tmp_path, engine=busy, served=chain, **NO_RULES) as it:
        busy.hold = True
        first = asyncio.create_task(it.chat("acme", "tiny"))
        await eventually(lambda: bool(busy.seen))
        over = await it.chat("acme", "tiny")
        assert over.headers["x-penstock-model"] == "hidden-model"
        waiting = [asyncio.create_task(it.chat(who, "tiny")) for who in ("rival", "narrow")]
        await eventually(lambda: len(busy.seen) == 3)
        busy.hold = False
        for reply in await asyncio.gather(first, *waiting):
            assert reply.headers["x-penstock-model"] == "tiny"
        assert len(it.asked) == 1


async def test_a_downgrade(serving: Serving, text: TextModel, tmp_path: Path) -> None:
    busy = ScriptedEngine(text, max_model_len=4096)
    settings = {
        "models": (ModelSettings("tiny", "", downgrade_to="hidden-model"), ModelSettings("hidden-model", "")),
        "default_tier": "free",
        "tiers": (TierConfig(name="free", best_effort=True),),
        "admission": one_at_a_time(downgrade_depth=2),
        **NO_RULES,
    }
    async with world(serving, text, tmp_path, engine=busy, **settings) as it:
        busy.hold = True
        waiting = [asyncio.create_task(it.chat("rival", "tiny")) for _ in range(4)]
        admission = it.running.parts.admissions._admission
        assert admission is not None
        queue = admission._controllers["tiny"].queue
        await eventually(lambda: queue.state("", 0).depth == 3)
        lower = await it.chat("acme", "tiny")
        assert lower.headers["x-penstock-model"] == "hidden-model"
        waiting.append(asyncio.create_task(it.chat("narrow", "tiny")))
        await eventually(lambda: queue.state("", 0).depth == 4)
        busy.hold = False
        replies = await asyncio.gather(*waiting)
        assert {reply.headers["x-penstock-model"] for reply in replies} == {"tiny"}
        assert len(it.asked) == 1


@pytest.mark.parametrize("on_error", ["refuse", "allow"])
async def test_moderation(serving: Serving, text: TextModel, tmp_path: Path, on_error: Any) -> None:
    base: dict[str, Any] = {"kind": "model", "model": "hidden-model", "stage": "input", "timeout_s": 60.0}
    rules = [
        GuardrailConfig(name="checked", on_error=on_error, **base),
        GuardrailConfig(name="always", for_all_callers=True, **base),
    ]
    async with world(serving, text, tmp_path, guardrails=tuple(rules[:1])) as it:
        assert (await it.chat("acme", "tiny")).status_code == 200
        before = len(it.asked)
        assert before
        for who in ("rival", "narrow"):
            reply = await it.chat(who, "tiny")
            assert reply.status_code == (503 if on_error == "refuse" else 200), reply.text
            assert "hidden" not in reply.text
            assert (await it.ask(who, "POST", "/v1/moderations", json={"input": "hi"})).status_code == 404
        assert len(it.asked) == before, "a text reached a model that its sender may not use"
        ready = await it.ok("acme", "GET", "/health/ready")
        assert ready["checks"]["guardrails"] is None, "one tenant must not make the server unready"
    async with world(serving, text, tmp_path / "again", guardrails=tuple(rules[1:])) as it:
        assert (await it.chat("rival", "tiny")).status_code == 200
        assert it.asked, "an operator may have all texts checked"


async def test_the_judge(serving: Serving, text: TextModel, tmp_path: Path) -> None:
    for for_all in (False, True):
        judge = JudgeConfig(rate=1.0, model="hidden-model", for_all_callers=for_all)
        async with world(serving, text, tmp_path / str(for_all), judge=judge, **NO_RULES) as it:
            assert (await it.chat("rival", "tiny")).status_code == 200
            assert (await it.chat("acme", "tiny")).status_code == 200
            await eventually(lambda it=it, most=8 if for_all else 4: len(it.asked) == most)
            await asyncio.sleep(0.05)
            assert len(it.asked) == (8 if for_all else 4)


async def test_tools(serving: Serving, text: TextModel, tmp_path: Path) -> None:
    with weather() as api:
        async with world(serving, text, tmp_path, api=api, **NO_RULES) as it:
            for who in ("rival", "narrow"):
                listed = await it.ok(who, "GET", "/v1/tools")
                assert [one["name"] for one in listed["data"]] == ["open-tool"]
                for tool in ("hidden-tool", "hidden-tool.add_note"):
                    refused = await it.chat(who, "tiny", server_tools=[tool])
                    unknown = await it.chat(who, "tiny", server_tools=[tool.replace("hidden", "absent")])
                    assert refused.status_code == unknown.status_code == 400
                    assert refused.text.replace("hidden", "absent") == unknown.text
                assert (await it.chat(who, "tiny", server_tools=["*"])).status_code == 200
                offered = it.running.engine.seen[-1]
                assert "add_note" not in text.decode(offered.prompt)
            assert (await it.chat("acme", "tiny", server_tools=["hidden-tool"])).status_code == 200
            await allow(it, "tenant", "rival", tools=["hidden-tool.add_note"])
            listed = await until(lambda: it.ok("rival", "GET", "/v1/tools"), lambda said: "hidden" in str(said))
            assert [one["name"] for server in listed["data"] for one in server["functions"]] == ["add_note"]
            assert (await it.chat("rival", "tiny", server_tools=["hidden-tool.get_weather"])).status_code == 400


async def test_batches_run_with_what_is_allowed_when_they_run(
    serving: Serving, text: TextModel, tmp_path: Path
) -> None:
    busy = ScriptedEngine(text, max_model_len=4096)
    async with world(serving, text, tmp_path, engine=busy, **NO_RULES) as it:
        line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions"}
        lines = [{**line, "body": {"model": model, "messages": HELLO}} for model in ("hidden-model", "tiny")]
        content = "\n".join(json.dumps({**one, "custom_id": str(i)}) for i, one in enumerate(lines))
        sent = {"files": {"file": ("a.jsonl", content)}, "data": {"purpose": "batch"}}
        file = await it.ok("acme", "POST", "/v1/files", **sent)
        await allow(it, "tenant", "acme", models=["tiny"])
        await until(lambda: it.chat("acme", "hidden-model"), lambda reply: reply.status_code == 404)
        batch = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        id = (await it.ok("acme", "POST", "/v1/batches", json=batch))["id"]
        ended = await until(
            lambda: it.ok("acme", "GET", f"/v1/batches/{id}"), lambda shown: shown["status"] == "completed"
        )
        assert ended["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
        errors = await it.ask("acme", "GET", f"/v1/files/{ended['error_file_id']}/content")
        failed = json.loads(errors.text.splitlines()[0])
        assert failed["response"]["status_code"] == 404
        assert failed["response"]["body"]["error"]["code"] == "model_not_found"
        assert not it.asked


async def test_stored_answers_and_what_goes_on_from_them(serving: Serving, text: TextModel, tmp_path: Path) -> None:
    async with world(serving, text, tmp_path, **NO_RULES) as it:
        said = await it.ok("acme", "POST", "/v1/responses", json={"model": "hidden-model", "input": "hi"})
        body = {"model": "tiny", "input": "and now?", "previous_response_id": said["id"]}
        assert (await it.ask("acme", "POST", "/v1/responses", json=body)).status_code == 200
        missing = said["id"][:-6] + "000000"
        refused = await it.ask("narrow", "POST", "/v1/responses", json=body)
        unknown = await it.ask("narrow", "POST", "/v1/responses", json={**body, "previous_response_id": missing})
        assert refused.status_code == unknown.status_code == 400
        assert refused.text.replace(said["id"], missing) == unknown.text
        item = said["output"][0]["id"]
        reference = {"model": "tiny", "input": [{"type": "item_reference", "id": item}]}
        assert (await it.ask("narrow", "POST", "/v1/responses", json=reference)).json()["error"]["code"] == (
            "item_not_found"
        )
        # The sums of a bill stay the same where a name does not show.
        rows = {row["model"]: row["requests"] for row in (await it.ok("narrow", "GET", "/v1/usage"))["data"]}
        all_rows = {row["model"]: row["requests"] for row in (await it.ok("acme", "GET", "/v1/usage"))["data"]}
        assert rows == {"other": 1, "tiny": 1} and all_rows == {"hidden-model": 1, "tiny": 1}


async def test_a_resumed_stream_and_a_cached_answer_need_access_again(
    serving: Serving, text: TextModel, tmp_path: Path
) -> None:
    async with world(serving, text, tmp_path, **NO_RULES) as it:
        cached = {"temperature": 0}
        await it.chat("acme", "hidden-model", **cached)
        assert (await it.chat("acme", "hidden-model", **cached)).headers["x-penstock-cache"] == "exact"
        body = {"model": "hidden-model", "messages": HELLO, "stream": True, "seed": 1}
        stream = await it.ask("acme", "POST", "/v1/chat/completions", json=body, headers={"last-event-id": "new"})
        id = next(row.removeprefix("id: ") for row in stream.text.splitlines() if row.startswith("id: "))
        before = len(it.asked)
        for who in ("narrow", "rival"):
            again = await it.ask(who, "POST", "/v1/chat/completions", json=body, headers={"last-event-id": id})
            assert again.status_code == 404 and again.json()["error"]["code"] == "model_not_found"
            reply = await it.chat(who, "hidden-model", **cached)
            assert reply.status_code == 404 and "x-penstock-cache" not in reply.headers
        assert len(it.asked) == before


async def test_collections_of_a_narrow_key(
    serving: Serving, text: TextModel, tmp_path: Path, encoder_endpoint: str
) -> None:
    async with world(serving, text, tmp_path, encoder_endpoint, **NO_RULES) as it:
        await it.ok("acme", "POST", "/v1/collections", json={"name": "hidden-notes"})
        own = await it.ok("narrow", "POST", "/v1/collections", json={"name": "open-notes"})
        assert own["embedding_model"] is None, "its encoder has a name that the key may not see"
        for name in ("hidden-notes", "absent-notes"):
            refused = await it.ask("narrow", "POST", "/v1/collections", json={"name": name})
            assert refused.status_code == 403, "whether it exists does not show"
        answers = [
            await it.chat("narrow", "tiny", rag={"collection": name}) for name in ("hidden-notes", "absent-notes")
        ]
        assert [reply.status_code for reply in answers] == [404, 404]
        assert answers[0].text.replace("hidden", "absent") == answers[1].text
        listed = await it.ok("narrow", "GET", "/v1/collections?limit=1")
        assert [one["name"] for one in listed["data"]] == ["open-notes"] and not listed["has_more"]
        # The same as vector stores.
        for name in ("hidden-notes", "hidden notes"):
            refused = await it.ask("narrow", "POST", "/v1/vector_stores", json={"name": name})
            assert refused.status_code == 403, refused.text
        stores = await it.ok("narrow", "GET", "/v1/vector_stores")
        assert [one["id"] for one in stores["data"]] == [own["id"]]
        searched = [
            await it.ask("narrow", "POST", "/v1/responses", json={
                "model": "tiny", "input": "hi", "tools": [{"type": "file_search", "vector_store_ids": [name]}],
            })
            for name in ("hidden-notes", "absent-notes")
        ]  # fmt: skip
        assert [reply.status_code for reply in searched] == [404, 404]
        assert searched[0].text.replace("hidden", "absent") == searched[1].text
        both = await it.ok("acme", "GET", "/v1/collections")
        assert [one["name"] for one in both["data"]] == ["hidden-notes", "open-notes"]


async def test_changes_reach_a_gateway_soon_and_keys_never_get_more_than_their_tenant(
    serving: Serving, text: TextModel, tmp_path: Path
) -> None:
    async with world(serving, text, tmp_path, **NO_RULES) as it:
        assert (await it.chat("rival", "hidden-model")).status_code == 404
        await allow(it, "tenant", "rival", models=["hidden-*", "tiny"])
        await until(lambda: it.chat("rival", "hidden-model"), lambda reply: reply.status_code == 200)
        assert (await it.chat("rival", "hidden-adapter")).status_code == 404, "a pattern opens nothing of others"
        await allow(it, "tenant", "rival", adapters=["hidden-adapter"])
        await until(lambda: it.chat("rival", "hidden-adapter"), lambda reply: reply.status_code == 200)
        more = {"tenant": "acme", "allow": {"models": ["*"]}}
        wide = (await it.ok("admin", "POST", "/v1/admin/keys", json=more))["key"]
        await allow(it, "tenant", "acme", models=["tiny"])
        it.keys["wide"] = wide
        await until(lambda: it.chat("wide", "hidden-model"), lambda reply: reply.status_code == 404)
        assert (await it.chat("wide", "hidden-adapter")).status_code == 404, "its base model is not allowed"
        shown = await it.ok("admin", "GET", "/v1/admin/tenants/rival")
        assert shown["allow"] == {**NOTHING_HIDDEN, "models": ["hidden-*", "tiny"], "adapters": ["hidden-adapter"]}
        for lists in ({"models": "tiny"}, {"planets": []}, {"models": [""]}, {"models": ["x" * 300]}, []):
            wrong = await it.ask("admin", "PATCH", "/v1/admin/tenants/rival", json={"allow": lists})
            assert wrong.status_code == 400 and wrong.json()["error"]["message"], wrong.text
