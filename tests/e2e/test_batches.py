"""Batches on a real server with the real default model: the official client, and the command line."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import openai
import pytest
from typer.testing import CliRunner

from penstock.cli.app import app
from penstock.storage import open_database
from tests.e2e.conftest import MODEL, Server
from tests.e2e.diary import read_diary
from tests.e2e.drill import drill


def line(id: str, model: str = MODEL, **body: object) -> str:
    content = {"model": model, "messages": [{"role": "user", "content": "What is the capital of France?"}], **body}
    return json.dumps({"custom_id": id, "method": "POST", "url": "/v1/chat/completions", "body": content}) + "\n"


@pytest.mark.slow
def test_the_sdk_and_the_command_line(server: Server, tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text(line("a", temperature=0, max_tokens=12) + line("b", max_tokens=4) + line("c", n=999))

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["batch", *arguments, "--url", server.url])
        assert result.exit_code == 0, (result.output, result.exception)
        return result.output

    said = run("submit", str(questions), "--wait")
    assert "completed" in said and "2 of 3 answered, 1 failed" in said
    id = said.split()[0]
    assert id in run("list") and run("status", id) == said
    run("fetch", id, "--output", str(tmp_path / "answers.jsonl"))
    assert "Paris" in (tmp_path / "answers.jsonl").read_text()
    assert json.loads(run("fetch", id, "--errors"))["custom_id"] == "c"
    assert CliRunner().invoke(app, ["batch", "cancel", id, "--url", server.url]).exit_code != 0

    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    batch = client.batches.retrieve(id)
    assert batch.request_counts is not None and batch.request_counts.completed == 2 and batch.output_file_id
    assert client.files.content(batch.output_file_id).text == (tmp_path / "answers.jsonl").read_text()


@pytest.mark.slow
async def test_a_gateway_killed_in_a_batch_loses_no_line_and_bills_none_twice(tmp_path: Path) -> None:
    lines = 400
    with drill(tmp_path) as running:
        content = "".join(line(str(number), "tiny", max_tokens=30) for number in range(lines)).encode()
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        file = client.files.create(file=("in.jsonl", content), purpose="batch")
        made = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        for done in (50, 150, 250):
            counts = made.request_counts
            while counts is None or counts.completed < done:
                await asyncio.sleep(0.01)
                counts = client.batches.retrieve(made.id).request_counts
            running.kill_gateway()
            running.ready()
        deadline = time.monotonic() + 600
        while (batch := client.batches.retrieve(made.id)).status != "completed":
            assert time.monotonic() < deadline, batch
            await asyncio.sleep(0.1)
        assert batch.output_file_id is not None
        output = client.files.content(batch.output_file_id).text.splitlines()
        ids = [json.loads(text)["custom_id"] for text in output]
        assert ids == [str(number) for number in range(lines)]  # each once, in order
        database = await open_database(running.store)
        ((requests, tokens),) = await database.fetch("SELECT COUNT(*), SUM(completion_tokens) FROM charges_settled")
        assert (requests, tokens) == (lines, lines * 30)
        assert await database.fetch("SELECT 1 FROM charges_progress") == []
        await database.close()
    # Only what was cut off ran again.
    runs = [id for id in read_diary(running.diary(1)) if not id.startswith("ready")]
    assert lines <= len(runs) <= lines + 3 * 8
