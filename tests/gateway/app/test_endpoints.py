"""R-API-3, 4, 9: models, tokenize, health, metrics, documents; draining."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

import penstock
from penstock.gateway.api.endpoints import ENDPOINTS
from penstock.gateway.api.reply_schemas import REPLIES
from penstock.protocol.errors import EngineLost
from penstock.text import TextModel
from tests.gateway.conftest import Serving, events, eventually, until
from tests.scripted import ScriptedEngine


async def test_models(serving: Serving, text: TextModel) -> None:
    async with serving() as gateway:
        listing = (await gateway.client.get("/v1/models")).json()
        assert listing["object"] == "list"
        [model] = listing["data"]
        assert (model["id"], model["object"], model["owned_by"]) == ("tiny", "model", "penstock")
        assert isinstance(model["created"], int)
        assert model["context_window"] == 512
        assert model["aliases"] == ["small"]
        assert model["capabilities"]["chat"] is True
        assert (await gateway.client.get("/v1/models/tiny")).json() == model
        assert (await gateway.client.get("/v1/models/tiny")).json()["vocab_size"] == text.vocab_size
        assert (await gateway.client.get("/v1/models/small")).json()["id"] == "tiny"


async def test_what_a_client_needs_to_know_of_the_tokenizer(serving: Serving, text: TextModel) -> None:
    async with serving() as gateway:
        body = (await gateway.client.get("/tokenizer_info")).json()
        assert body == {
            "object": "tokenizer",
            "model": "tiny",
            "bos_token": None,
            "eos_token": "<|end|>",
            "pad_token": None,
            "chat_template": text.template_source,
            "vocab_size": text.vocab_size,
            "model_max_length": 512,
        }
        assert (await gateway.client.get("/tokenizer_info", params={"model": "none"})).status_code == 404


async def test_tokenize_and_detokenize(serving: Serving, text: TextModel) -> None:
    async with serving() as gateway:
        body = (await gateway.client.post("/v1/tokenize", json={"model": "tiny", "prompt": "héy"})).json()
        assert body["tokens"] == text.encode("héy")
        assert body["count"] == 4
        assert body["max_model_len"] == 512
        back = await gateway.client.post("/v1/detokenize", json={"model": "tiny", "tokens": body["tokens"]})
        assert back.json()["text"] == "héy"
        messages = [{"role": "user", "content": "hi"}]
        chat = await gateway.client.post(
            "/v1/tokenize", json={"model": "tiny", "messages": messages, "max_tokens": 1000}
        )
        reply = chat.json()
        assert text.decode(reply["tokens"], skip_special=False) == "<|user|>hi<|end|><|assistant|>"
        # Prices of the fixture: 1 per million in, 2 per million out.
        assert reply["estimated_cost"] == {"input": 5e-6, "output": 2e-3, "total": pytest.approx(2.005e-3)}
        assert reply["fits"] is False
        assert not gateway.engine.seen


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("tokenize", {}, "prompt"),
        ("tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ("tokenize", {"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
        (
            "tokenize",
            {"messages": [{"role": "user", "content": "x"}], "add_special_tokens": True},
            "add_special_tokens",
        ),
        ("detokenize", {}, "tokens"),
        ("detokenize", {"tokens": [99999]}, "tokens"),
        ("detokenize", {"tokens": ["x"]}, "tokens[0]"),
    ],
)
async def test_tokenize_refusals(serving: Serving, path: str, body: dict[str, object], param: str) -> None:
    async with serving() as gateway:
        reply = await gateway.client.post(f"/v1/{path}", json={"model": "tiny", **body})
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == param


async def test_readiness_is_a_real_token_and_is_cached(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.gateway.api.operations.readiness.PROBE_FRESH_S", 60.0)
    async with serving() as gateway:
        assert (await gateway.client.get("/health/live")).json()["status"] == "ok"
        for _ in range(5):
            reply = await gateway.client.get("/health/ready")
            assert reply.status_code == 200
            assert reply.json()["models"]["tiny"]["ready"] is True
        assert len(gateway.engine.seen) == 1
        assert gateway.engine.seen[0].params.max_tokens == 1


async def test_readiness_fails_when_the_engine_produces_nothing(
    serving: Serving, text: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.gateway.api.operations.readiness.PROBE_LIMIT_S", 0.1)
    engine = ScriptedEngine(text)
    engine.hold = True
    async with serving(engine) as gateway:
        reply = await gateway.client.get("/health/ready")
        assert reply.status_code == 503
        assert "no token" in reply.json()["models"]["tiny"]["problem"]
        await eventually(lambda: engine.load_snapshot().running == 0)


async def test_liveness_fails_when_an_engine_is_stuck(
    serving: Serving, text: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stuck(ScriptedEngine):
        def step(self) -> None:
            time.sleep(0.01)  # busy, and not one step completed

    monkeypatch.setattr("penstock.gateway.api.operations.health.STUCK_S", 0.2)
    async with serving(Stuck(text)) as gateway:
        task = asyncio.create_task(gateway.chat())
        await until(lambda: gateway.client.get("/health/live"), lambda reply: reply.status_code == 503)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_metrics_under_the_names_autoscalers_scrape(serving: Serving) -> None:
    async with serving() as gateway:
        await gateway.chat()
        await gateway.chat(model="nope")
        reply = await gateway.client.get("/metrics")
        assert reply.headers["content-type"].startswith("text/plain")
        samples = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(reply.text)
            for sample in family.samples
        }
        labels = (("engine", "0"), ("model_name", "tiny"))
        assert samples["vllm:num_requests_running", labels] == 0
        assert samples["vllm:num_requests_waiting", labels] == 0
        assert samples["vllm:kv_cache_usage_perc", labels] == 0
        assert samples["vllm:generation_tokens_total", labels] == 14
        assert samples["vllm:prompt_tokens_total", labels] == 5
        for name in ("prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total"):
            assert ("vllm:" + name, labels) in samples
        for name in ("drafts", "draft_tokens", "accepted_tokens"):
            assert samples[f"vllm:spec_decode_num_{name}_total", labels] == 0
        assert samples["vllm:request_success_total", (*labels[:1], ("finished_reason", "stop"), *labels[1:])] == 1
        for name in (
            "time_to_first_token_seconds",
            "e2e_request_latency_seconds",
            "request_queue_time_seconds",
            "request_prefill_time_seconds",
            "request_decode_time_seconds",
            "request_prompt_tokens",
            "request_generation_tokens",
            "request_time_per_output_token_seconds",
            "request_inference_time_seconds",
            "request_prefill_kv_computed_tokens",
            "request_max_num_generation_tokens",
            "request_params_n",
            "request_params_max_tokens",
        ):
            assert samples[f"vllm:{name}_count", labels] == 1, name
        assert samples["vllm:request_params_n_sum", labels] == 1
        assert samples["vllm:request_max_num_generation_tokens_sum", labels] == 14
        assert samples["vllm:request_prefill_kv_computed_tokens_sum", labels] == 5 - 3
        for reason in ("capacity", "deferred"):
            assert samples["vllm:num_requests_waiting_by_reason", (*labels, ("reason", reason))] == 0
        assert samples["vllm:engine_sleep_state", (*labels, ("sleep_state", "awake"))] == 1
        assert samples["vllm:iteration_tokens_total_count", labels] >= 14
        gaps = samples["vllm:inter_token_latency_seconds_count", labels]
        assert gaps <= 13, "tokens that arrive together have no gap between them"
        info = (("block_size", "16"), *labels, ("num_gpu_blocks", "64"))
        assert samples["vllm:cache_config_info", info] == 1
        route = "/v1/chat/completions"
        count = "penstock_http_requests_total"
        assert samples[count, (("method", "POST"), ("route", route), ("status", "200"))] == 1
        assert samples[count, (("method", "POST"), ("route", route), ("status", "404"))] == 1
        assert samples["penstock_http_requests_in_flight", (("route", route),)] == 0


async def test_errors_are_counted_also_of_streams_that_had_begun(serving: Serving, text: TextModel) -> None:
    engine = ScriptedEngine(text, "word " * 20_000, step_s=0.005, max_model_len=10**6)
    async with serving(engine) as gateway:
        await gateway.chat(model="nope")
        broken = asyncio.create_task(gateway.chat(stream=True))
        await eventually(lambda: engine.load_snapshot().generation_tokens > 3)
        gateway.parts.registry.route("tiny").model.backend._went_down(EngineLost())  # type: ignore[attr-defined]
        assert "engine_lost" in (await broken).text
        count = 'penstock_errors_total{route="/v1/chat/completions",status='
        assert await gateway.metric(count + '"404",code="model_not_found"}') == 1
        assert await gateway.metric(count + '"503",code="engine_lost"}') == 1


async def test_scrapers_that_ask_for_openmetrics_get_it(serving: Serving) -> None:
    async with serving() as gateway:
        await gateway.chat()
        reply = await gateway.client.get("/metrics", headers={"accept": "application/openmetrics-text;version=1.0.0"})
        assert reply.headers["content-type"].startswith("application/openmetrics-text")
        names = {family.name for family in openmetrics_families(reply.text)}
        assert {"vllm:generation_tokens", "vllm:time_to_first_token_seconds"} <= names


async def test_documents(serving: Serving) -> None:
    async with serving() as gateway:
        document = (await gateway.client.get("/openapi.json")).json()
        chat = document["paths"]["/v1/chat/completions"]["post"]
        reference = chat["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        schema = document["components"]["schemas"][reference.rpartition("/")[2]]
        assert {"messages", "model", "temperature", "top_k"} <= set(schema["properties"])
        assert {"/v1/completions", "/v1/models", "/v1/tokenize", "/health/ready", "/metrics"} <= set(document["paths"])
        handlers = {endpoint.handler.__name__ for endpoint in ENDPOINTS}
        assert set(REPLIES.schemas) <= handlers, "replies of endpoints that are gone"
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                where = f"{method} {path}"
                named = {given["name"] for given in operation["parameters"] if given["in"] == "path"}
                assert named == set(re.findall(r"{(\w+)}", path)), where
                assert {"200", "202"} & set(operation["responses"]) and "default" in operation["responses"], where
                assert operation["summary"] and operation["tags"], where
        usage = document["paths"]["/v1/usage"]["get"]
        assert {given["name"] for given in usage["parameters"]} >= {"by", "since", "until", "tenant"}
        assert {"bearer", "x-api-key"} == set(document["components"]["securitySchemes"])
        page = await gateway.client.get("/docs")
        assert page.status_code == 200
        assert "x-request-id" in page.headers
        assert "/v1/chat/completions" in page.text and "ChatRequest" in page.text
        assert "http://" not in page.text and "https://" not in page.text and "<script" not in page.text, "it is whole"


async def test_draining_refuses_new_requests_and_finishes_running_ones(serving: Serving, text: TextModel) -> None:
    engine = ScriptedEngine(text, "word " * 20)
    engine.hold = True
    async with serving(engine, drain_s=60.0) as gateway:
        running = asyncio.create_task(gateway.chat(stream=True))
        await eventually(lambda: bool(engine.seen))
        gateway.stop.set()
        await eventually(lambda: gateway.parts.drain.active)
        reply = await gateway.chat()
        assert reply.status_code == 503
        assert reply.headers["x-penstock-reason"] == "draining"
        assert int(reply.headers["retry-after"]) >= 1
        ready = await gateway.client.get("/health/ready")
        assert ready.status_code == 503
        assert (await gateway.client.get("/health/live")).status_code == 200
        engine.hold = False
        done = await running
        assert events(done.text)[-1] == "[DONE]"


async def test_what_outlives_the_drain_is_cut_with_an_error(serving: Serving, text: TextModel) -> None:
    engine = ScriptedEngine(text, "word " * 20_000, step_s=0.01, max_model_len=10**6)
    async with serving(engine, drain_s=0.2) as gateway:
        running = asyncio.create_task(gateway.chat(stream=True))
        await eventually(lambda: bool(engine.seen))
        gateway.stop.set()
        last = json.loads(events((await running).text)[-1])
        assert "shutting down" in last["error"]["message"]
    assert engine.load_snapshot().running == 0


@pytest.mark.slow
async def test_a_client_that_does_not_read_cannot_hold_up_the_end(serving: Serving, text: TextModel) -> None:
    engine = ScriptedEngine(text, lambda request: [10] * 30_000, max_model_len=10**6)
    async with serving(engine, drain_s=0.1, time_limit_s=None) as gateway:
        stuck = socket.socket()
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.connect(("127.0.0.1", gateway.port))
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True, "logprobs": True}
        data = json.dumps(body).encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            f"content-length: {len(data)}\r\n\r\n"
        )
        stuck.sendall(head.encode() + data)
        await eventually(lambda: bool(engine.seen) and engine.load_snapshot().running == 0, within=60)
        started = time.monotonic()
        gateway.stop.set()
    assert time.monotonic() - started < 60, "it hangs"
    stuck.close()


def test_the_gateway_does_not_import_torch() -> None:
    """It costs seconds at start and hundreds of megabytes, in every worker."""
    code = "import penstock.gateway.process.main, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def test_what_other_servers_answer_first_needs_no_key_and_names_no_model(
    serving: Serving, text: TextModel, tmp_path: Path
) -> None:
    async with serving(store_url=f"sqlite:///{tmp_path / 'state.db'}") as gateway:
        await gateway.client.post("/v1/admin/tenants", json={"id": "acme"})
        await gateway.client.post("/v1/admin/keys", json={"tenant": "acme"})
        assert (await gateway.client.get("/v1/models")).status_code == 401
        for path in ("/", "/health", "/ping", "/version"):
            whole = await gateway.client.get(path)
            head = await gateway.client.head(path)
            assert (whole.status_code, head.status_code) == (200, 200), path
            assert head.content == b"" and head.headers["content-length"] == str(len(whole.content))
            assert "tiny" not in whole.text
        assert (await gateway.client.get("/health")).json() == {"status": "ok"}
        assert (await gateway.client.get("/version")).json() == {"version": penstock.__version__}
        assert (await gateway.client.head("/v1/models")).status_code == 401
        backend = gateway.parts.registry.route("tiny").model.backend
        backend._went_down(EngineLost())  # type: ignore[attr-defined]
        assert (await gateway.client.get("/ping")).status_code == 503


async def test_head_is_answered_wherever_get_is(serving: Serving) -> None:
    async with serving() as gateway:
        for path in ("/v1/models", "/v1/models/tiny", "/metrics", "/openapi.json", "/docs", "/health/ready"):
            head = await gateway.client.head(path)
            assert head.status_code == 200 and head.content == b"", path
            assert int(head.headers["content-length"]) > 0
        assert (await gateway.client.head("/v1/models/nope")).status_code == 404
        refused = await gateway.client.head("/v1/completions")
        assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
        assert (await gateway.client.post("/v1/models", json={})).headers["allow"] == "GET, HEAD"
