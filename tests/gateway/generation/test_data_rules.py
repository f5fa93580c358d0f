"""Data rules: what lacks a demanded label never gets the request's data, on whatever path (R-GW-9). A second gateway on
a real port stands for servers of others; its engine and a plain HTTP server record what they are sent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.config.context import JudgeConfig, ToolServerConfig
from penstock.config.guardrails import GuardrailConfig
from penstock.config.routing import RegionRuleConfig, RouteConfig, RoutingConfig
from penstock.config.schema import TierConfig
from penstock.gateway.process.settings import ModelSettings
from penstock.identity.labels import Labels
from penstock.routing.placement import Placer
from penstock.routing.registry import ServedModel
from penstock.routing.replicas import ReplicaSet
from penstock.testing.in_process_backend import InProcessBackend
from penstock.text import TextModel
from tests.gateway.conftest import Serving, eventually, until
from tests.gateway.generation.test_remotes import World, world
from tests.scripted import ScriptedEngine

HOME = {"x-penstock-require": "external=false"}
SECRET = GuardrailConfig(name="secret", action="require", require=(("external", "false"),), words=("bluebird",))


@dataclass
class Recorder:
    """An HTTP server that keeps what it is sent and always says the same."""

    port: int
    said: bytes
    bodies: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@asynccontextmanager
async def recorder(said: Any) -> AsyncIterator[Recorder]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = next((int(line.partition(":")[2]) for line in head.split("\r\n") if "content-length" in line), 0)
        it.bodies.append((await reader.readexactly(length)).decode())
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: application/json\r\n")
        writer.write(b"content-length: %d\r\n\r\n" % len(it.said) + it.said)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    it = Recorder(server.sockets[0].getsockname()[1], json.dumps(said).encode())
    async with server:
        yield it


async def chat(it: World, model: str = "tiny", text: str = "hi", headers: Any = None, **body: Any) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": text}], **body}
    return await it.front.client.post("/v1/chat/completions", json=body, headers=headers)


def error(reply: httpx.Response) -> str:
    return f"{reply.status_code} {reply.json()['error']['code']} {reply.json()['error']['message']}"


async def test_a_request_says_where_its_data_may_go(serving: Serving) -> None:
    async with world(serving, remote={"labels": Labels({"region": "eu"})}) as it:
        for require in ("external=false", "region=us", "region=eu, external=false", "nobody=has-this"):
            refused = await chat(it, "far", headers={"x-penstock-require": require})
            assert error(refused).startswith(
                "403 data_rule `far` may not get this request: x-penstock-require requires"
            )
        twice = await chat(
            it, "far", headers=[("x-penstock-require", "region=eu"), ("x-penstock-require", "external=false")]
        )
        assert twice.status_code == 403, "a header that is sent twice counts twice"
        assert not it.behind.engine.seen
        assert (await chat(it, "far", headers={"x-penstock-require": "region=ch|eu, external=true"})).status_code == 200
        assert (await chat(it, headers=HOME)).headers["x-penstock-model"] == "tiny"
        assert (await chat(it, headers={"x-penstock-require": "region=eu"})).status_code == 403, "tiny is nowhere"
        for malformed in ("external", "external=", "a b=c", "external=false;region=eu", ",", "=false"):
            reply = await chat(it, "far", headers={"x-penstock-require": malformed})
            assert reply.status_code == 400 and reply.json()["error"]["param"] == "x-penstock-require", malformed


async def test_a_fallback_without_the_label_is_not_asked(serving: Serving) -> None:
    async with world(serving, served={"fallback": ("far",)}, engine_wait_s=0.2) as it:
        await it.front.parts.registry.route("tiny").model.backend.close()
        down = await chat(it, headers=HOME)
        assert error(down).startswith("503 engine_unavailable"), "what is permitted is down"
        assert (await it.front.client.post("/v1/completions", json={"model": "tiny", "prompt": "hi"}, headers=HOME)
                ).status_code == 503  # fmt: skip
        assert not it.behind.engine.seen
        assert (await chat(it)).headers["x-penstock-route"] == "fallback"


async def test_a_fallback_may_have_what_the_model_may_not(serving: Serving) -> None:
    options = {"remote": {"labels": Labels({"region": "eu"})}, "served": {"fallback": ("far",)}}
    async with world(serving, **options) as it:
        reply = await chat(it, headers={"x-penstock-require": "region=eu"})
        assert reply.headers["x-penstock-model"] == "far" and not it.front.engine.seen


async def test_overflow_stays_within_the_rule(serving: Serving, text: TextModel) -> None:
    busy = ScriptedEngine(text, lambda request: [65] * 200, step_s=0.005)
    async with world(serving, None, busy, served={"fallback": ("far",), "overflow_at": 1}) as it:
        base = asyncio.create_task(chat(it, max_tokens=100))
        await eventually(lambda: len(busy.seen) == 1)
        assert (await chat(it, headers=HOME, max_tokens=1)).headers["x-penstock-model"] == "tiny"
        assert not it.behind.engine.seen
        await base


async def test_a_route_takes_the_model_that_may_have_the_request(serving: Serving) -> None:
    routes = (RouteConfig(name="auto", small="tiny", large="far", default="large", enabled=False),)
    async with world(serving, routes=routes, guardrails=(SECRET,)) as it:
        assert (await chat(it, "auto")).headers["x-penstock-model"] == "far"
        before = len(it.behind.engine.seen)
        for told in ({"headers": HOME}, {"text": "what is project Bluebird?"}):
            assert (await chat(it, "auto", **told)).headers["x-penstock-model"] == "tiny"  # type: ignore[arg-type]
        assert (await chat(it, "auto", headers={"x-penstock-require": "region=eu"})).status_code == 403
        assert len(it.behind.engine.seen) == before


async def test_a_marked_request_never_leaves(serving: Serving, text: TextModel) -> None:
    async with world(serving, guardrails=(SECRET,), served={"fallback": ("far",)}) as it:
        it.front.parts.registry.remotes["far"].text = text
        for body in (
            {"messages": [{"role": "system", "content": "Of bluebird."}, {"role": "user", "content": "hi"}]},
            {"messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "function", "function": {
                "name": "f", "description": "about bluebird", "parameters": {"type": "object", "properties": {}}}}]},
        ):  # fmt: skip
            refused = await it.front.client.post("/v1/chat/completions", json={"model": "far", **body})
            assert error(refused).startswith("403 data_rule") and "guardrail secret requires external=false" in error(
                refused
            )
        for prompt in ("a bluebird", text.encode("a bluebird", special=False)):
            refused = await it.front.client.post("/v1/completions", json={"model": "far", "prompt": prompt})
            assert refused.status_code == 403, refused.text
        assert not it.behind.engine.seen
        assert (await chat(it, "far", "a blackbird")).status_code == 200
        assert (await chat(it, text="a bluebird")).headers["x-penstock-model"] == "tiny"


async def test_moderators_of_others_do_not_see_it(serving: Serving) -> None:
    said = {"results": [{"flagged": False, "categories": {}, "category_scores": {}}]}
    async with recorder(said) as moderator:
        rules = tuple(
            GuardrailConfig(
                name=name, kind="model", url=moderator.url, on_error=on_error, tenants=("default",), stage=stage
            )
            for name, on_error, stage in (("in", "refuse", "input"), ("out", "allow", "output"))
        )
        async with world(serving, guardrails=rules) as it:
            refused = await chat(it, headers=HOME)
            assert error(refused).startswith("403 data_rule The model of the rule `in`, which must check this request")
            judged = await it.front.client.post("/v1/moderations", json={"input": "hi"}, headers=HOME)
            assert judged.status_code == 403
            assert not moderator.bodies and not it.front.engine.seen
            assert (await chat(it)).status_code == 200 and moderator.bodies
        del moderator.bodies[:]
        async with world(serving, guardrails=rules[1:]) as it:
            assert (await chat(it, headers=HOME)).status_code == 200, "the rule lets failures pass"
            assert not moderator.bodies
        chats = GuardrailConfig(name="far", kind="model", model="far", stage="input", timeout_s=60.0)
        async with world(serving, guardrails=(chats,)) as it:
            assert (await chat(it, headers=HOME)).status_code == 403 and not it.behind.engine.seen


async def test_the_judge_does_not_see_it(serving: Serving) -> None:
    async with world(serving, judge=JudgeConfig(rate=1.0, model="far")) as it:
        assert (await chat(it, headers=HOME)).status_code == 200
        assert (await chat(it, text="judge this one")).status_code == 200
        await eventually(lambda: bool(it.behind.engine.seen))
        texts = [it.front.parts.registry.route("tiny").model.text.decode(one.prompt) for one in it.behind.engine.seen]
        assert texts and all("judge this one" in one for one in texts)


async def test_tools_of_others_are_not_called(serving: Serving, text: TextModel) -> None:
    call = '<tool_call>{"name": "look", "arguments": {"what": "birds"}}</tool_call>'
    async with recorder({"found": 1}) as tool:
        document = {
            "openapi": "3.0.0", "info": {"title": "t", "version": "1"}, "servers": [{"url": tool.url}],
            "paths": {"/look": {"post": {"operationId": "look", "requestBody": {"content": {"application/json": {
                "schema": {"type": "object", "properties": {"what": {"type": "string"}}}}}}, "responses": {}}}},
        }  # fmt: skip
        outside = ToolServerConfig(name="out", openapi=json.dumps(document))
        inside = ToolServerConfig(name="ours", openapi=json.dumps(document), labels=(("external", "false"),))
        engine = ScriptedEngine(text, call, max_model_len=4096)
        async with serving(engine, tool_servers=(outside, inside), tools=_tools(), guardrails=(SECRET,)) as it:
            ask = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 200}
            named = await it.client.post("/v1/chat/completions", json={**ask, "server_tools": ["out"]}, headers=HOME)
            assert error(named).startswith("403 data_rule `out` may not get this request")
            assert not tool.bodies and not engine.seen
            every = await it.client.post("/v1/chat/completions", json={**ask, "server_tools": ["*"]}, headers=HOME)
            assert every.status_code == 200, every.text
            assert "look" in text.decode(engine.seen[0].prompt), "ours is offered"


def _tools() -> Any:
    from penstock.config.context import ToolsConfig

    return ToolsConfig(max_steps=2, networks=("127.0.0.0/8",))


async def test_rules_of_tiers_regions_tenants_and_keys_and_the_audit_log(serving: Serving, tmp_path: Path) -> None:
    tiers = (TierConfig(name="free", require=(("external", "false"),)), TierConfig(name="standard"))
    rules = RoutingConfig(regions=(RegionRuleConfig(tenants=("pinned",), regions=("eu",)),))
    stored = {"store_url": f"sqlite:///{tmp_path / 'state.db'}", "tiers": tiers, "default_tier": "standard"}
    async with world(serving, routing=rules, **stored) as it:
        admin = {"authorization": "Bearer " + await _key(it, "ops", scopes=["inference", "admin"])}
        client = it.front.client
        for tenant in ("free", "pinned", "acme", "open"):
            body = {"id": tenant, "tier": "free" if tenant == "free" else ""}
            assert (await client.post("/v1/admin/tenants", json=body, headers=admin)).status_code == 200
        wrong = await client.patch("/v1/admin/tenants/acme", json={"require": {"Region": "eu"}}, headers=admin)
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "require"
        changed = await client.patch("/v1/admin/tenants/acme", json={"require": {"external": False}}, headers=admin)
        assert changed.json()["require"] == {"external": "false"}
        keys = {tenant: await _key(it, tenant, admin) for tenant in ("free", "pinned", "acme", "open")}
        keys["one key"] = await _key(it, "open", admin, require={"external": "false"})
        whose = {"free": "tier free", "pinned": "routing.regions[0]", "acme": "tenant acme", "one key": "key psk_"}
        for name, rule in whose.items():
            sent = {"authorization": f"Bearer {keys[name]}"}
            assert rule in error(await chat(it, "far", headers=sent))
            assert (await chat(it, "far", headers={**sent, "x-penstock-require": "external=true"})).status_code == 403
        assert not it.behind.engine.seen
        assert (await chat(it, "far", headers={"authorization": f"Bearer {keys['open']}"})).status_code == 200
        entries = await until(
            lambda: _audit(client, admin, outcome="refused"), lambda found: len(found) == 2 * len(whose)
        )
        assert {entry["name"] for entry in entries} == {"far"} and all(entry["request_id"] for entry in entries)
        assert {entry["tenant"] for entry in entries} == {"free", "pinned", "acme", "open"}
        acme = await _audit(client, admin, tenant="acme", outcome="refused")
        assert "tenant acme requires external=false" in acme[0]["rule"] and acme[0]["key_id"].startswith("psk_")
        assert [one["kind"] for one in await _audit(client, admin, outcome="changed")] == ["key", "tenant"]
        assert (
            await client.get("/v1/admin/audit", headers={"authorization": f"Bearer {keys['acme']}"})
        ).status_code == 403
        await client.patch("/v1/admin/tenants/acme", json={"require": {}}, headers=admin)
        assert (await chat(it, "far", headers={"authorization": f"Bearer {keys['acme']}"})).status_code == 200


async def _key(it: World, tenant: str, headers: Any = None, **body: Any) -> str:
    client = it.front.client
    if headers is None:
        assert (await client.post("/v1/admin/tenants", json={"id": tenant})).status_code == 200
    made = await client.post("/v1/admin/keys", json={"tenant": tenant, **body}, headers=headers)
    assert made.status_code == 200, made.text
    return str(made.json()["key"])


async def _audit(client: httpx.AsyncClient, headers: Any, **query: Any) -> list[dict[str, Any]]:
    reply = await client.get("/v1/admin/audit", params=query, headers=headers)
    assert reply.status_code == 200, reply.text
    found: list[dict[str, Any]] = reply.json()["data"]
    return found


async def test_lines_of_a_batch_have_the_demand_of_its_request(serving: Serving, tmp_path: Path) -> None:
    async with world(serving, store_url=f"sqlite:///{tmp_path / 'state.db'}") as it:
        body = {"model": "far", "messages": [{"role": "user", "content": "hi"}]}
        line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
        client = it.front.client
        file = await client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("b.jsonl", json.dumps(line))})
        asked = {"input_file_id": file.json()["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        assert (await client.post("/v1/batches", json=asked, headers={"x-penstock-require": "oops"})).status_code == 400
        batch = (await client.post("/v1/batches", json=asked, headers=HOME)).json()

        async def shown() -> Any:
            return (await client.get(f"/v1/batches/{batch['id']}")).json()

        ended = await until(shown, lambda one: one["status"] == "completed")
        errors = (await client.get(f"/v1/files/{ended['error_file_id']}/content")).text
        assert "data_rule" in errors and not it.behind.engine.seen


async def test_pools_and_replicas_have_labels_too(serving: Serving, text: TextModel) -> None:
    near = ReplicaSet("near", [InProcessBackend(ScriptedEngine(text))], placer=Placer(labels=Labels({"region": "eu"})))
    more = ServedModel("near", text, near)
    async with serving(more=[more], models=(ModelSettings("tiny", ""), ModelSettings("near", ""))) as it:
        ask = {"messages": [{"role": "user", "content": "hi"}], "model": "near"}
        fine = await it.client.post("/v1/chat/completions", json=ask, headers={"x-penstock-require": "region=eu"})
        assert fine.status_code == 200 and fine.headers["x-penstock-region"] == "eu"
        wrong = await it.client.post("/v1/chat/completions", json=ask, headers={"x-penstock-require": "region=us"})
        assert wrong.status_code == 403


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/api/chat", "/v1/embeddings"])
async def test_other_endpoints_keep_the_rule(serving: Serving, path: str) -> None:
    async with world(serving) as it:
        body: dict[str, Any] = {"model": "far", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
        if path in ("/v1/responses", "/v1/embeddings"):
            body = {"model": "far", "input": "hi"}
        reply = await it.front.client.post(path, json=body, headers=HOME)
        assert reply.status_code in (403, 404), reply.text
        assert not it.behind.engine.seen
