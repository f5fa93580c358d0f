"""R-OBS-2: timelines, spans over OTLP to a real receiver, exemplars, the log of slow requests; whose they are."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli.app import app
from penstock.config.schema import TelemetryConfig
from penstock.errors import ConfigError
from penstock.gateway.app.tracing import RequestTracing
from penstock.identity import IdentityStore
from penstock.storage import open_database
from penstock.telemetry.logging import configure
from penstock.telemetry.metrics import Metrics
from penstock.text import TextModel
from tests.gateway.conftest import Running, Serving, events, eventually, until
from tests.scripted import ScriptedEngine

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="make extras EXTRAS=otel to test traces")
from tests.telemetry.collector import attributes, collector

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
SECRET = "the prompt itself"


@pytest.fixture
def logged() -> Iterator[io.StringIO]:
    root, project = logging.getLogger(), logging.getLogger("penstock")
    before = root.handlers[:], root.level, project.level
    stream = io.StringIO()
    configure("json", "info", stream)
    yield stream
    root.handlers[:], root.level = before[0], before[1]
    project.setLevel(before[2])


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.telemetry.tracing.SEND_EVERY_S", 0.05)


def lines(stream: io.StringIO, logger: str) -> list[dict[str, Any]]:
    return [line for line in map(json.loads, stream.getvalue().splitlines()) if line["logger"] == logger]


async def chat(gateway: Running, headers: dict[str, str] | None = None, **body: Any) -> Any:
    body = {"model": "small", "messages": [{"role": "user", "content": SECRET}], **body}
    return await gateway.client.post("/v1/chat/completions", json=body, headers=headers)


async def test_a_timeline_covers_a_request_from_its_first_byte_to_its_last(serving: Serving, text: TextModel) -> None:
    async with serving(ScriptedEngine(text, step_s=0.004)) as gateway:
        reply = await chat(gateway, {"x-request-id": "mine"}, stream=True)
        found = (await gateway.client.get("/v1/traces/mine")).json()
        assert (found["request_id"], found["status"], found["completion_tokens"]) == ("mine", 200, 14)
        phases = {phase["name"]: phase for phase in found["phases"]}
        order = ["authenticate", "receive", "prepare", "limits", "admission", "queue", "prefill", "decode"]
        assert [phase["name"] for phase in found["phases"] if phase["name"] in order] == order
        assert phases["queue"]["duration_ms"] == 1 and phases["prefill"]["duration_ms"] == 2, "the engine's own clock"
        assert 13 * 4 <= phases["decode"]["duration_ms"] <= found["total_latency_ms"]
        assert phases["decode"]["detail"]["completion_tokens"] == 14
        end = max(phase["start_ms"] + phase["duration_ms"] for phase in found["phases"])
        assert end <= found["total_latency_ms"] + 1
        assert SECRET not in json.dumps(found)
        listing = (await gateway.client.get("/v1/traces?limit=1")).json()["data"]
        assert [entry["request_id"] for entry in listing] == ["mine"]
        assert events(reply.text)[-1] == "[DONE]"
        for query, status in (("limit=0", 400), ("limit=x", 400), ("what=1", 400)):
            assert (await gateway.client.get(f"/v1/traces?{query}")).status_code == status
        assert (await gateway.client.get("/v1/traces/other")).status_code == 404


async def test_the_command_prints_a_request_as_bars(serving: Serving, text: TextModel) -> None:
    async with serving(ScriptedEngine(text, step_s=0.02)) as gateway:
        await chat(gateway, {"x-request-id": "mine"})

        async def command(*words: str) -> tuple[int, str]:
            url = f"http://127.0.0.1:{gateway.port}"
            result = await asyncio.to_thread(CliRunner().invoke, app, ["trace", *words, "--url", url])
            return result.exit_code, result.output + str(result.exception or "")

        code, shown = await command("mine")
        assert code == 0
        rows = {row.split()[0]: row for row in shown.splitlines() if "█" in row}
        assert rows["decode"].count("█") > 2 * rows["prefill"].count("█") > 0
        assert rows["decode"].index("█") > rows["receive"].index("█")
        code, shown = await command()
        assert code == 0 and "mine" in shown and "decode" in shown
        code, shown = await command("mine", "-o", "json")
        assert json.loads(shown)["request_id"] == "mine"
        code, shown = await command("other")
        assert code != 0 and "No timeline" in shown


async def test_the_newest_are_kept_and_no_more(serving: Serving) -> None:
    async with serving(telemetry=TelemetryConfig(recent_requests=2)) as gateway:
        for name in ("a", "b", "c"):
            await chat(gateway, {"x-request-id": name})
        listing = (await gateway.client.get("/v1/traces")).json()["data"]
        assert [entry["request_id"] for entry in listing] == ["c", "b"]


async def test_a_tenant_sees_its_own_requests_only(serving: Serving, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'keys.db'}"
    database = await open_database(url)
    store = IdentityStore(database)
    await store.prepare()
    keys = {}
    for tenant in ("acme", "umbrella"):
        await store.create_tenant(tenant)
        keys[tenant] = (await store.create_key(tenant))[1].text
    keys["admin"] = (await store.create_key("acme", scopes=("admin", "inference")))[1].text
    await database.close()
    async with serving(store_url=url) as gateway:
        bearer = {who: {"authorization": f"Bearer {key}"} for who, key in keys.items()}
        await chat(gateway, {**bearer["acme"], "x-request-id": "same"})
        await chat(gateway, {**bearer["umbrella"], "x-request-id": "same"}, max_tokens=2)

        async def seen(who: str) -> Any:
            return (await gateway.client.get("/v1/traces/same", headers=bearer[who])).json()

        assert (await seen("acme"))["completion_tokens"] == 14
        assert (await seen("umbrella"))["completion_tokens"] == 2
        listing = (await gateway.client.get("/v1/traces", headers=bearer["umbrella"])).json()["data"]
        assert [entry["tenant"] for entry in listing] == ["umbrella"]
        listing = (await gateway.client.get("/v1/traces", headers=bearer["admin"])).json()["data"]
        assert {entry["tenant"] for entry in listing} == {"acme", "umbrella"}
        assert (await gateway.client.get("/v1/traces")).status_code == 401


async def test_spans_reach_a_collector_with_the_names_of_the_conventions(serving: Serving) -> None:
    with collector() as received:
        telemetry = TelemetryConfig(otlp_endpoint=received.url, otlp_headers=("x-token=secret",))
        async with serving(telemetry=telemetry) as gateway:
            sent = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1", "x-session-id": "s1"}
            reply = await chat(gateway, sent, stream=True)
            response_id = json.loads(events(reply.text)[0])["id"]
            await eventually(lambda: len(received.spans()) > 0)
            unsampled = {"traceparent": f"00-{TRACE[::-1]}-{PARENT}-00"}
            await chat(gateway, unsampled)
            sent_ones = 'penstock_traced_requests_total{outcome="sent"}'
            await until(lambda: gateway.metric(sent_ones), lambda count: count == 1)
            accept = {"accept": "application/openmetrics-text"}
            metrics = (await gateway.client.get("/metrics", headers=accept)).text
        spans = received.spans()
        assert received.headers[0]["x-token"] == "secret"
        assert {span.trace_id.hex() for span in spans} == {TRACE}
        root = next(span for span in spans if span.name == "chat small")
        assert (root.parent_span_id.hex(), root.trace_state) == (PARENT, "vendor=1")
        children = {span.name: span for span in spans if span is not root}
        phases = {"authenticate", "receive", "prepare", "limits", "admission", "queue", "prefill", "decode", "stream"}
        assert phases <= set(children)
        for child in children.values():
            assert child.parent_span_id == root.span_id
            assert root.start_time_unix_nano <= child.start_time_unix_nano <= child.end_time_unix_nano
            assert child.end_time_unix_nano <= root.end_time_unix_nano + 1_000_000
        about = attributes(root)
        expected = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "penstock",
            "gen_ai.request.model": "small",
            "gen_ai.response.model": "tiny",
            "gen_ai.response.id": response_id,
            "gen_ai.conversation.id": "s1",
            "gen_ai.usage.output_tokens": 14,
            "gen_ai.usage.cache_read.input_tokens": 3,
            "gen_ai.response.finish_reasons": ["stop"],
            "http.response.status_code": 200,
            "penstock.request_id": reply.headers["x-request-id"],
        }
        assert {name: about.get(name) for name in expected} == expected
        assert SECRET.encode() not in b"".join(request.SerializeToString() for request in received.requests)
        exemplars = [row for row in metrics.splitlines() if "time_to_first_token" in row and "# {" in row]
        assert len(exemplars) == 1 and TRACE in exemplars[0], "from the histogram to the trace"


async def test_latencies_are_pushed_under_the_names_of_the_conventions(serving: Serving) -> None:
    with collector() as received:
        telemetry = TelemetryConfig(otlp_endpoint=received.url, otlp_metrics_s=0.05)
        async with serving(telemetry=telemetry) as gateway:
            for _ in range(3):
                await chat(gateway)
        found = received.metrics()
        names = {"request.duration", "time_to_first_token", "time_per_output_token"}
        assert set(found) == {f"gen_ai.server.{name}" for name in names} | {"gen_ai.client.token.usage"}
        [first] = found["gen_ai.server.time_to_first_token"].histogram.data_points
        assert first.count == sum(first.bucket_counts) == 3
        assert len(first.bucket_counts) == len(first.explicit_bounds) + 1
        assert attributes(first)["gen_ai.request.model"] == "tiny"
        usage = found["gen_ai.client.token.usage"].histogram.data_points
        assert {attributes(point)["gen_ai.token.type"]: point.sum for point in usage}["output"] == 3 * 14
        resource = received.pushes[-1].resource_metrics[0].resource
        assert {"service.name", "service.instance.id"} <= set(attributes(resource))


@pytest.mark.parametrize("wrong", [{"otlp_endpoint": "collector:4318"}, {"otlp_headers": ("secret",)}])
def test_an_address_that_cannot_be_is_said_at_the_start(wrong: dict[str, Any]) -> None:
    config = TelemetryConfig(**{"otlp_endpoint": "http://collector:4318", **wrong})
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        RequestTracing(config, Metrics(list))


async def test_an_error_is_an_error_in_its_span(serving: Serving) -> None:
    with collector() as received:
        async with serving(telemetry=TelemetryConfig(otlp_endpoint=received.url)) as gateway:
            await chat(gateway, model="nope")
            await eventually(lambda: len(received.spans()) > 0)
        [root] = [span for span in received.spans() if not span.parent_span_id]
        assert attributes(root)["error.type"] == "404"


async def test_a_collector_that_is_away_holds_up_nobody(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.telemetry.tracing.CLOSE_S", 0.2)
    async with serving(telemetry=TelemetryConfig(otlp_endpoint="http://127.0.0.1:9")) as gateway:
        for _ in range(3):
            assert (await chat(gateway)).status_code == 200


async def test_what_is_logged_carries_the_request_and_no_text(
    serving: Serving, text: TextModel, logged: io.StringIO
) -> None:
    async with serving(ScriptedEngine(text, step_s=0.004), telemetry=TelemetryConfig(slow_request_s=0.0)) as gateway:
        sent = {"x-request-id": "mine", "traceparent": f"00-{TRACE}-{PARENT}-01"}
        await chat(gateway, sent)
    [line] = lines(logged, "penstock.request")
    assert (line["request_id"], line["trace_id"]) == ("mine", TRACE)
    [slow] = lines(logged, "penstock.slow")
    assert slow["request_id"] == "mine"
    assert slow["queue_ms"] == 1 and slow["prefill_ms"] == 2
    assert {"receive_ms", "prepare_ms", "limits_ms", "admission_ms", "decode_ms", "reply_ms"} <= set(slow)
    assert SECRET not in logged.getvalue() and "Hello, world!" not in logged.getvalue()


async def test_a_quick_request_is_not_called_slow(serving: Serving, logged: io.StringIO) -> None:
    async with serving() as gateway:
        await chat(gateway)
    assert not lines(logged, "penstock.slow")


async def test_text_is_recorded_only_on_demand(serving: Serving, logged: io.StringIO) -> None:
    with collector() as received:
        telemetry = TelemetryConfig(record_text=True, otlp_endpoint=received.url)
        async with serving(telemetry=telemetry) as gateway:
            await chat(gateway)
            await eventually(lambda: len(received.spans()) > 0)
        [line] = lines(logged, "penstock.request")
        assert SECRET in line["prompt"][0] and line["completion"] == ["Hello, world!"]
        root = next(span for span in received.spans() if not span.parent_span_id)
        assert SECRET in attributes(root)["gen_ai.input.messages"]
        assert "Hello, world!" in attributes(root)["gen_ai.output.messages"]
