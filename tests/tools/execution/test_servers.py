"""Calls of HTTP and MCP tools always end in time, with a result that the model can read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from penstock.config.context import ToolServerConfig
from penstock.errors import ConfigError
from penstock.identity.access import Access
from penstock.storage import open_database
from penstock.tools.execution import ToolError, ToolRegistry
from penstock.tools.execution.mcp import RETRY_S, McpTools
from penstock.tools.execution.openapi import operations
from penstock.tools.execution.specs import ToolSpec, ToolSpecStore
from tests.ports import free_port
from tests.tools.execution.parts import LOOPBACK, MCP_SERVER, WEATHER_API, WeatherServer, desk, weather


async def call(registry: ToolRegistry, name: str, **arguments: Any) -> tuple[str, bool]:
    (offer,) = (await registry.offers(Access("acme"), [name])).values()
    outcome = await registry.call(offer, arguments)
    return outcome.text, outcome.ok


@pytest.fixture
def api() -> Any:
    with weather() as server:
        yield server


@pytest.fixture
async def registry(api: WeatherServer) -> AsyncIterator[ToolRegistry]:
    config = api.config(timeout_s=30, max_bytes=1000, headers=("X-Key: ${PATH}",))
    found = ToolRegistry([config], networks=LOOPBACK)
    yield found
    await found.close()


async def test_arguments_go_where_the_document_says(registry: ToolRegistry, api: WeatherServer) -> None:
    text, ok = await call(registry, "weather.get_weather", city="São Paulo/..?x", units="metric")
    assert ok and json.loads(text) == {"city": "São Paulo/..?x", "weather": "sunny", "units": "metric"}
    method, path, headers, body = api.seen[0]
    assert (method, body) == ("GET", None) and "/.." not in path
    assert headers["X-Key"].startswith("/"), "a header may come from the environment"
    text, ok = await call(registry, "weather.add_note", text="buy milk", tags=["a"])
    assert ok and json.loads(text) == {"stored": {"text": "buy milk", "tags": ["a"]}}


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("redirect", "redirects elsewhere"),
        ("gzip", "compressed"),
        ("fail", 'HTTP 500. {"detail": "broken"}'),
    ],
)
async def test_what_goes_wrong_is_told(registry: ToolRegistry, how: str, words: str) -> None:
    text, ok = await call(registry, "weather.misbehave", how=how)
    assert not ok and words in text


async def test_an_answer_that_does_not_come_is_told(api: WeatherServer) -> None:
    registry = ToolRegistry([api.config(timeout_s=0.5)], networks=LOOPBACK)
    text, ok = await call(registry, "weather.misbehave", how="late")
    assert not ok and "no answer within 0.5 s" in text
    await registry.close()


async def test_a_result_is_bounded(registry: ToolRegistry) -> None:
    text, ok = await call(registry, "weather.misbehave", how="huge")
    assert ok and len(text) < 1100 and "more than 1,000 bytes" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({}, "`city` is missing"), ({"city": ".."}, "may not be"), ({"city": "x", "zip": 1}, "unknown argument `zip`"),
     ({"city": {"a": 1}}, "an object cannot"), ({"city": "x", "X-Mood": "☀"}, "ASCII"),
     ({"city": "x", "X-Mood": "a\r\nX-Other: b"}, "cannot be reached")],
)  # fmt: skip
async def test_wrong_arguments_reach_no_server(
    registry: ToolRegistry, api: WeatherServer, arguments: dict[str, Any], words: str
) -> None:
    text, ok = await call(registry, "weather.get_weather", **arguments)
    assert not ok and words in text and not api.seen


async def test_a_private_address_is_refused_unless_it_is_allowed(api: WeatherServer) -> None:
    registry = ToolRegistry([api.config()])
    text, ok = await call(registry, "weather.get_weather", city="Rome")
    assert not ok and "private address" in text and not api.seen
    await registry.close()
    gone = ToolRegistry([api.config(url="http://127.0.0.1:9")], networks=LOOPBACK)
    text, ok = await call(gone, "weather.get_weather", city="Rome")
    assert not ok and "cannot be reached" in text
    await gone.close()


async def test_tenants_see_their_own_servers_and_allowed_functions(api: WeatherServer) -> None:
    mine = api.config(tenants=("acme",), allow=("get_weather",))
    theirs = api.config(name="theirs", tenants=("rival",))
    everybody = api.config(name="everybody", allow=("get_weather", "add_note"))
    registry = ToolRegistry([mine, theirs, everybody], networks=LOOPBACK)
    available = await registry.available(Access("acme"))
    assert {name: [f.name for f in functions] for name, functions in available.items()} == {
        "weather": ["get_weather"],
        "everybody": ["get_weather", "add_note"],
    }
    assert set(await registry.offers(Access("acme"), ["*"])) == {
        "weather.get_weather",
        "everybody.get_weather",
        "add_note",
    }
    for name in ("theirs", "theirs.get_weather", "nowhere", "weather.add_note", "weather.nothing"):
        with pytest.raises(ToolError):
            await registry.offers(Access("acme"), [name])
    await registry.close()


def test_documents_that_cannot_be_used_are_refused() -> None:
    def document(**operation: Any) -> dict[str, Any]:
        return {"paths": {"/x": {"get": operation}}}

    for wrong, words in (
        ({}, "no `paths`"),
        ({"paths": {"/x": {}}}, "0 operations"),
        (document(parameters=[{"name": "a", "in": "cookie"}]), "cookie"),
        (document(parameters=[{"$ref": "other.yaml#/x"}]), "points outside"),
        (document(parameters=[{"$ref": "#/nothing"}]), "cannot be resolved"),
        (document(requestBody={"content": {"text/xml": {}}}), "not JSON"),
        ({"paths": {"/x": {"get": {"operationId": "a"}, "put": {"operationId": "a"}}}}, "two operations"),
    ):
        with pytest.raises(ToolError, match=words):
            operations(wrong)
    recursive = {"type": "object", "properties": {"child": {"$ref": "#/components/schemas/Tree"}}}
    body = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Tree"}}}}
    (found,) = operations({**document(requestBody=body), "components": {"schemas": {"Tree": recursive}}})
    assert found.function.name == "get_x" and "child" in found.places
    bomb = {f"S{i}": {"type": "object", "properties": {f"p{j}": {"$ref": f"#/components/schemas/S{i + 1}"}
            for j in range(20)}} for i in range(8)}  # fmt: skip
    schema = {"$ref": "#/components/schemas/S0"}
    with pytest.raises(ToolError, match="too large"):
        operations(
            {
                **document(requestBody={"content": {"application/json": {"schema": schema}}}),
                "components": {"schemas": {**bomb, "S8": {"type": "string"}}},
            }
        )


def test_a_configuration_that_cannot_work_is_said_at_the_start(tmp_path: Path) -> None:
    for config, words in (
        (ToolServerConfig(name="a b", openapi="{}"), "Expected|name"),
        (ToolServerConfig(name="a"), "give one of"),
        (ToolServerConfig(name="a", openapi=str(tmp_path / "missing.yaml")), "missing.yaml"),
        (ToolServerConfig(name="a", openapi='{"paths": {"/x": {"get": {}}}}'), "not the URL"),
        (ToolServerConfig(name="a", mcp_url="http://x", headers=("nonsense",)), "Name: value"),
        (ToolServerConfig(name="a", mcp_url="http://x", headers=("K: ${NOT_THERE_AT_ALL}",)), "NOT_THERE"),
    ):
        with pytest.raises(ConfigError, match=words):
            ToolRegistry([config])
    document = tmp_path / "api.yaml"
    document.write_text("servers: [{url: 'https://example.com'}]\npaths:\n  /x:\n    get: {operationId: look}\n")
    ToolRegistry([ToolServerConfig(name="a", openapi=str(document))])


async def test_an_mcp_server_over_standard_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DESK_TOKEN", "t0ken")
    monkeypatch.setenv("HIDDEN", "must not be seen")
    registry = ToolRegistry([desk(env=("DESK_TOKEN",), timeout_s=60)])
    try:
        functions = {function.name: function for function in (await registry.available(Access("acme")))["desk"]}
        assert set(functions) == {"add", "sleep", "fail", "crash", "big", "secret"}
        assert functions["add"].description == "Add two numbers." and functions["add"].parameters
        assert await call(registry, "desk.add", a=2, b=3) == ("5", True)
        assert await call(registry, "desk.secret") == ("t0ken", True)
        text, ok = await call(registry, "desk.fail")
        assert not ok and "no luck" in text
        server = registry._servers["desk"].server
        assert isinstance(server, McpTools)
        patience, server._timeout_s = server._timeout_s, 0.5
        text, ok = await call(registry, "desk.sleep", seconds=600)
        assert not ok and "within 0.5 s" in text
        server._timeout_s = patience
        both = await asyncio.gather(call(registry, "desk.add", a=1, b=1), call(registry, "desk.add", a=2, b=2))
        assert [text for text, _ in both] == ["2", "4"]
    finally:
        await registry.close()


@pytest.mark.slow
async def test_an_mcp_server_that_dies_is_started_again() -> None:
    registry = ToolRegistry([desk()])
    try:
        assert await call(registry, "desk.add", a=2, b=3) == ("5", True)
        (offer,) = (await registry.offers(Access("acme"), ["desk.crash"])).values()
        assert not (await registry.call(offer, {})).ok
        await asyncio.sleep(RETRY_S)
        assert await call(registry, "desk.add", a=3, b=3) == ("6", True), "it is started again"
    finally:
        await registry.close()


async def test_an_mcp_server_that_does_not_start_is_an_error_of_its_own() -> None:
    registry = ToolRegistry([desk(command=(sys.executable, "-c", "raise SystemExit(3)"))])
    with pytest.raises(ToolError, match="desk"):
        await registry.offers(Access("acme"), ["desk"])
    assert await registry.available(Access("acme")) == {"desk": ()}
    await registry.close()


@pytest.mark.slow
async def test_an_mcp_server_over_http_at_a_checked_address() -> None:
    port = free_port()
    process = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", MCP_SERVER, str(port)], stderr=subprocess.DEVNULL
    )
    try:
        config = ToolServerConfig(name="desk", mcp_url=f"http://localhost:{port}/mcp")
        allowed, refused = ToolRegistry([config], networks=LOOPBACK), ToolRegistry([config])
        for _ in range(1000):  # a busy machine takes long to import
            try:
                with socket.create_connection(("127.0.0.1", port), 0.1):
                    break
            except OSError:
                await asyncio.sleep(0.05)
        assert await call(allowed, "desk.add", a=20, b=22) == ("42", True)
        text, ok = await call(allowed, "desk.big", size=200_000)
        assert ok and text.endswith("[cut: the result has 200,000 bytes]") and len(text) < 33_000
        with contextlib.suppress(ToolError):  # more than is taken: the connection ends
            assert not (await call(allowed, "desk.big", size=4_000_000))[1]
        await asyncio.sleep(RETRY_S)
        assert await call(allowed, "desk.add", a=1, b=1) == ("2", True)
        with pytest.raises(ToolError):
            await refused.offers(Access("acme"), ["desk"])
        await allowed.close()
        await refused.close()
    finally:
        process.kill()
        process.wait()


async def test_servers_in_the_store_are_seen_by_every_gateway(tmp_path: Path, api: WeatherServer) -> None:
    database = await open_database(f"sqlite:///{tmp_path / 'x.db'}")
    store = ToolSpecStore(database)
    await store.prepare()
    here, there = (ToolRegistry([], store, networks=LOOPBACK, fresh_s=0.0) for _ in range(2))
    spec = ToolSpec(name="weather", openapi=WEATHER_API, url=api.url, headers={"X-Key": "hush"}, allow=["get_weather"])
    assert [function.name for function in await here.register(spec)] == ["get_weather"]
    assert (await call(there, "weather.get_weather", city="Oslo"))[1]
    assert "hush" not in json.dumps(spec.described())
    for wrong in (
        ToolSpec(name="x"),
        ToolSpec(name="x", openapi=WEATHER_API),
        ToolSpec(name="x", openapi=WEATHER_API, url=api.url, allow=["nothing"]),
    ):
        with pytest.raises(ToolError):
            await here.register(wrong)
    assert await here.remove("weather") and not await here.remove("weather")
    with pytest.raises(ToolError):
        await there.offers(Access("acme"), ["weather"])
    for registry in (here, there):
        await registry.close()
    await database.close()
