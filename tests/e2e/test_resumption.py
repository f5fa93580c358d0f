"""`kill -9` of a gateway under running streams: clients reconnect to another gateway and lose nothing."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.drill import Drill, drill
from tests.e2e.test_settlement import settled
from tests.gateway.conftest import eventually
from tests.ports import free_port

STREAMS = 3


@dataclass
class Follower:
    """A client of one stream."""

    path: str
    body: dict[str, Any]
    text: str = ""
    last: str = "new"
    usage: dict[str, int] | None = None
    done: bool = False

    async def follow(self, url: str) -> int:
        """Returns the status; whatever breaks off leaves the text so far."""
        with suppress(httpx.HTTPError):
            async with (
                httpx.AsyncClient(base_url=url, timeout=180) as client,
                client.stream("POST", self.path, json=self.body, headers={"last-event-id": self.last}) as reply,
            ):
                async for line in reply.aiter_lines():
                    if line.startswith("id: "):
                        self.last = line.removeprefix("id: ")
                    elif line.startswith("data: {"):
                        event = json.loads(line.removeprefix("data: "))
                        for choice in event.get("choices", ()):
                            self.text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
                        self.usage = event.get("usage") or self.usage
                    elif line == "data: [DONE]":
                        self.done = True
                return reply.status_code
        return 0


def request(number: int) -> Follower:
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 500, "stream": True, "temperature": 0}
    body["stream_options"] = {"include_usage": True}
    if number % 2:
        return Follower("/v1/completions", {**body, "prompt": "x" * (10 + number)})
    return Follower("/v1/chat/completions", {**body, "messages": [{"role": "user", "content": "x" * (10 + number)}]})


def second_gateway(running: Drill) -> tuple[subprocess.Popen[bytes], str]:
    port = free_port()
    command = (
        *(sys.executable, "-m", "penstock", "gateway", "-e", f"tiny=ipc://{running.folder / 'engine'}"),
        *("--config", str(running.folder / "penstock.yaml"), "--port", str(port), "--log-level", "error"),
    )
    process = subprocess.Popen(command)
    Drill(running.folder, port).ready()
    return process, f"http://127.0.0.1:{port}"


@pytest.mark.slow
async def test_streams_go_on_at_another_gateway_and_are_charged_once(tmp_path: Path) -> None:
    with drill(tmp_path) as running:
        other, url = await asyncio.to_thread(second_gateway, running)
        try:
            clients = [request(number) for number in range(STREAMS)]
            reading = [asyncio.create_task(client.follow(running.url)) for client in clients]
            await eventually(lambda: all(len(client.text) > 20 for client in clients), 30)
            assert running.gateway is not None
            running.gateway.kill()
            await asyncio.gather(*reading)
            assert not any(client.done for client in clients)
            cut = [len(client.text) for client in clients]
            foreign = request(1)
            foreign.body["prompt"] += "y"
            foreign.last = clients[1].last
            assert await foreign.follow(url) == 404, "another request cannot claim it"
            made_up = request(1)
            made_up.last = "0" * 32 + ".5"
            assert await made_up.follow(url) == 404
            assert await asyncio.gather(*(client.follow(url) for client in clients)) == [200] * STREAMS
            assert all(client.done for client in clients)
            assert all(len(client.text) > before for client, before in zip(clients, cut, strict=True))
            whole = [request(number) for number in range(STREAMS)]
            await asyncio.gather(*(client.follow(url) for client in whole))
            assert [client.text for client in clients] == [client.text for client in whole]
            rows = await settled(running)
        finally:
            other.kill()
            other.wait()
    assert len(rows) == 2 * STREAMS, "one charge per stream"
    by_id = {row[0]: row for row in rows}
    for client, reference in zip(clients, whole, strict=True):
        assert client.usage == reference.usage or client.usage is not None
        id, _, prompt, completion, cost, settled_by, cached = by_id[client.last.partition(".")[0]]
        assert client.usage is not None and settled_by == "end", id
        assert (prompt, completion) == (client.usage["prompt_tokens"], client.usage["completion_tokens"])
        assert cost == (prompt - cached) * 1000 + cached * 500 + completion * 2000
