"""The server benchmark against a real gateway with a real (tiny, random) engine behind it."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from penstock.bench import serve as bench
from penstock.bench import shapes
from penstock.bench.commands.app import app
from penstock.engine.config import EngineConfig
from penstock.engine.core import Engine
from penstock.engine.loading.random_checkpoint import RandomCheckpoint
from penstock.errors import PenstockError
from penstock.gateway.process.main import serve
from penstock.gateway.process.settings import GatewaySettings, ModelSettings
from penstock.routing.registry import ModelRegistry, ServedModel
from penstock.testing.in_process_backend import InProcessBackend
from penstock.text import TextModel
from tests.ports import free_port
from tests.scripted import make_text

QUIET = Console(file=io.StringIO())
SMALL = bench.ServeBenchSettings(concurrency=4, requests=10, input_len=24, output_len=6, timeout_s=60)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return make_text(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def engine(text: TextModel) -> Engine:
    config = shapes.named("smollm2-135m") | {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": text.vocab_size,
        "max_position_embeddings": 256,
    }
    settings = EngineConfig(model="tiny", device="cpu", dtype="float32", threads=1, num_blocks=128)
    return Engine.load(settings, checkpoint=RandomCheckpoint(config))


@asynccontextmanager
async def server(engine: Engine, text: TextModel, **settings: Any) -> AsyncIterator[str]:
    port = free_port()
    gateway = GatewaySettings(models=(ModelSettings("tiny", ""),), port=port, drain_s=0.2, **settings)
    stop = asyncio.Event()
    listening: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    model = ServedModel("tiny", text, InProcessBackend(engine))
    task = asyncio.create_task(serve(gateway, ModelRegistry([model]), stop, listening.set_result))
    await asyncio.wait((task, listening), return_when=asyncio.FIRST_COMPLETED)
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        stop.set()
        await task


async def test_every_request_is_counted_and_timed(engine: Engine, text: TextModel) -> None:
    async with server(engine, text) as url:
        name, tally = await bench.measure(replace(SMALL, url=url, vocab_size=text.vocab_size), None, QUIET)
    assert name == "tiny"
    assert not tally.errors
    assert (len(tally.ttft), len(tally.latency), len(tally.per_token)) == (10, 10, 10)
    assert (tally.prompt_tokens, tally.output_tokens) == (240, 60)
    assert all(0 < first <= whole for first, whole in zip(tally.ttft, tally.latency, strict=True))
    assert tally.cached_tokens == 0


async def test_a_second_run_with_the_same_seed_is_seen_to_reuse_the_cache(engine: Engine, text: TextModel) -> None:
    settings = replace(SMALL, vocab_size=text.vocab_size, seed=7)
    async with server(engine, text) as url:
        await bench.measure(replace(settings, url=url), None, QUIET)
        _, again = await bench.measure(replace(settings, url=url), None, QUIET)
        _, fresh = await bench.measure(replace(settings, url=url, seed=8), None, QUIET)
    assert again.cached_tokens == 10 * 16
    assert fresh.cached_tokens == 0


async def test_refused_requests_are_errors_with_their_reason(engine: Engine, text: TextModel) -> None:
    settings = replace(SMALL, vocab_size=text.vocab_size, input_len=255, output_len=6, warm_up=0)
    async with server(engine, text) as url:
        _, tally = await bench.measure(replace(settings, url=url), None, QUIET)
    ((what, count),) = tally.errors.items()
    assert count == 10
    assert what.startswith("HTTP 400 context_length_exceeded: This model's maximum context length is 256 tokens")
    assert not tally.latency


async def test_a_server_that_refuses_even_the_warm_up_ends_the_run(engine: Engine, text: TextModel) -> None:
    async with server(engine, text) as url:
        with pytest.raises(PenstockError, match="every warm-up request failed: HTTP 404 model_not_found"):
            await bench.measure(replace(SMALL, url=url, model="absent"), None, QUIET)


async def test_the_command_prints_a_table_and_writes_json(engine: Engine, text: TextModel, tmp_path: Path) -> None:
    file = tmp_path / "out" / "result.json"
    arguments = ["serve", "-c", "2", "-n", "4", "--input-len", "20", "--output-len", "5", "--seed", "3"]
    async with server(engine, text) as url:
        command = [*arguments, "--url", url, "--vocab-size", str(text.vocab_size), "--json", str(file)]
        result = await asyncio.to_thread(CliRunner().invoke, app, command)
    assert result.exit_code == 0, result.output
    for word in ("TTFT", "ITL", "E2E", "p99", "output tok/s", "4 succeeded, 0 failed"):
        assert word in result.output
    document = json.loads(file.read_text())
    assert document["benchmark"] == "serve"
    assert document["results"]["succeeded"] == 4
    assert document["machine"]["cores"] >= 1


async def test_an_open_loop_sends_when_due_and_counts_from_then(engine: Engine, text: TextModel) -> None:
    settings = replace(SMALL, vocab_size=text.vocab_size, rate=20.0, pattern="constant", requests=12, seed=21)
    async with server(engine, text) as url:
        _, tally = await bench.measure(replace(settings, url=url), None, QUIET)
        alone = replace(settings, url=url, rate=2000.0, most_in_flight=1, seed=22)
        _, crowded = await bench.measure(alone, None, QUIET)
    assert not tally.errors and len(tally.served) == 12
    assert sorted(request.due for request in tally.served) == pytest.approx([n / 20 for n in range(12)])
    assert tally.seconds > 11 / 20
    # One at a time, though all were due at once: the last waited for all others, and its time says so.
    assert crowded.late == 11 and not crowded.errors
    longest = max(crowded.served, key=lambda request: request.end)
    assert longest.latency > 0.7 * longest.end
    assert "11 requests were due" in bench.warnings(alone, crowded)[0]


async def test_a_trace_is_played_with_its_own_lengths(engine: Engine, text: TextModel, tmp_path: Path) -> None:
    trace, page, file = tmp_path / "trace.csv", tmp_path / "out" / "report.html", tmp_path / "result.json"
    trace.write_text("at,input_len,output_len\n0,20,3\n0.1,30,1\n0.2,10,5\n0.3,250,90\n")
    async with server(engine, text) as url:
        command = ["serve", "--url", url, "--trace", str(trace), "--speed", "2", "--seed", "31", "--slo-ttft", "60000"]
        command += ["--vocab-size", str(text.vocab_size), "--html", str(page), "--json", str(file)]
        result = await asyncio.to_thread(CliRunner().invoke, app, command)
    assert result.exit_code == 1, result.output  # the last one is too long for the model
    assert "4 requests of trace.csv" in result.output and "3 succeeded, 1 failed" in result.output
    assert "75% of all within TTFT 60,000 ms" in result.output
    results = json.loads(file.read_text())["results"]
    assert results["goodput"]["share"] == 0.75 and results["succeeded"] == 3
    html = page.read_text()
    for word in ("<svg", "in flight", "TTFT", "context_length_exceeded", "trace.csv"):
        assert word in html
    assert "http://www.w3.org" in html and html.count("http") == html.count("http://www.w3.org") + html.count(url)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--rate", "1", "--trace", "x"], "exclude each other"),
        (["--rate", "1", "-c", "4"], "for a closed loop"),
        (["--most-in-flight", "4"], "for an open loop"),
        (["--arrivals", "constant"], "needs --rate"),
        (["--rate", "1", "--burst", "3"], "needs --arrivals burst"),
        (["--speed", "2"], "needs --trace"),
        (["--trace", "x", "--output-len", "3"], "its own lengths"),
    ],
)
def test_options_that_do_not_go_together_are_refused(arguments: list[str], complaint: str) -> None:
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 2
    assert complaint in " ".join(result.output.replace("│", " ").split())


def test_nobody_there_is_one_readable_line() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    result = CliRunner().invoke(app, ["serve", "--url", url])
    assert result.exit_code == 2
    assert "error: no connection to 127.0.0.1" in result.output
    assert "Traceback" not in result.output
