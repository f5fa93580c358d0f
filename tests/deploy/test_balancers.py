"""The generated configurations of balancers, each with the real program, TLS and two gateways behind it."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from penstock.fleet.balancers.envoy import envoy
from penstock.fleet.balancers.front import Front, Gateway, Sticky
from penstock.fleet.balancers.haproxy import haproxy
from penstock.fleet.balancers.nginx import nginx
from penstock.text import TextModel
from tests import parts
from tests.deploy.test_proxies import NAME, certificate
from tests.gateway.conftest import Running, Serving, eventually
from tests.ports import free_port
from tests.scripted import ScriptedEngine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WORDS = "one two three four five six seven eight nine ten " * 4
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 60}

Command = Callable[[Front, Path], list[str]]


def _found(program: str) -> str:
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"{program} is not installed")
    return path


def with_haproxy(front: Front, folder: Path) -> list[str]:
    file = folder / "haproxy.cfg"
    file.write_text(haproxy(front))
    return [_found("haproxy"), "-db", "-f", str(file)]


def with_nginx(front: Front, folder: Path) -> list[str]:
    file = folder / "nginx.conf"
    rest = f"pid {folder}/pid;\ndaemon off;\nerror_log {folder}/error.log;\nevents {{}}\n"
    file.write_text(f"{rest}http {{ access_log off;\n{nginx(front)}\n}}")
    return [_found("nginx"), "-c", str(file)]


def with_envoy(front: Front, folder: Path) -> list[str]:
    file = folder / "envoy.yaml"
    file.write_text(envoy(front, free_port()))
    return [parts.program("envoy", "envoy"), "--log-level", "warning", "--use-dynamic-base-id", "-c", str(file)]


class Balanced:
    """A balancer with two gateways behind it."""

    def __init__(self, port: int, client: httpx.AsyncClient, gateways: list[Running], folder: Path) -> None:
        self.port = port
        self.gateways = gateways
        self.folder = folder
        self._client = client

    async def stream(self, session: str = "") -> tuple[int, str]:
        """Status and text of a streamed answer."""
        headers = {"host": NAME} | ({"x-session-id": session} if session else {})
        url = f"https://127.0.0.1:{self.port}/v1/chat/completions"
        async with self._client.stream(
            "POST", url, json=BODY, headers=headers, extensions={"sni_hostname": NAME}
        ) as reply:
            return reply.status_code, "".join([piece async for piece in reply.aiter_text()])

    @property
    def seen(self) -> list[int]:
        """Requests of clients that each gateway's engine has had; a readiness probe asks for one token."""
        engines = [gateway.engine for gateway in self.gateways]
        return [sum(request.params.max_tokens > 1 for request in engine.seen) for engine in engines]


@asynccontextmanager
async def balanced(
    command: Command, serving: Serving, text: TextModel, folder: Path, sticky: Sticky = "none", step_s: float = 0.02
) -> AsyncIterator[Balanced]:
    trusted = certificate(folder)
    engines = [ScriptedEngine(text, WORDS, step_s=step_s) for _ in range(2)]
    settings = {"trusted_hosts": (NAME,), "drain_s": 60.0, "drain_delay_s": 6.0}
    async with serving(engines[0], **settings) as one, serving(engines[1], **settings) as two:
        port = free_port()
        combined = folder / "both.pem"
        front = Front(
            tuple(Gateway("127.0.0.1", gateway.port) for gateway in (one, two)),
            port=port,
            name=NAME,
            certificate=str(combined if command is with_haproxy else folder / "fullchain.pem"),
            key=str(folder / "privkey.pem"),
            sticky=sticky,
        )
        log = (folder / "balancer.log").open("w")
        process = await asyncio.create_subprocess_exec(*command(front, folder), stdout=log, stderr=subprocess.STDOUT)
        try:
            async with httpx.AsyncClient(verify=trusted, timeout=300) as client:
                found = Balanced(port, client, [one, two], folder)
                await _up(found, process)
                yield found
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()
            log.close()


async def _up(balancer: Balanced, process: asyncio.subprocess.Process) -> None:
    for _ in range(1200):
        if process.returncode is not None:
            break
        try:
            if (await balancer.stream())[0] == 200:
                return
        except httpx.TransportError:
            pass  # not up yet
        await asyncio.sleep(0.1)
    raise AssertionError((balancer.folder / "balancer.log").read_text()[-3000:])


each = pytest.mark.parametrize("command", [with_haproxy, with_nginx, with_envoy], ids=["haproxy", "nginx", "envoy"])


@each
async def test_a_client_speaks_http2_and_gets_every_token_as_it_comes(
    command: Command, serving: Serving, text: TextModel, tmp_path: Path
) -> None:
    async with balanced(command, serving, text, tmp_path, step_s=0.05) as balancer:
        url = f"https://{NAME}:{balancer.port}/v1/chat/completions"
        curl = [_found("curl"), "-sS", "-N", "--http2", "--cacert", str(tmp_path / "fullchain.pem"), url]
        curl += ["--resolve", f"{NAME}:{balancer.port}:127.0.0.1", "-d", json.dumps(BODY), "--noproxy", "*"]
        curl += ["-H", "content-type: application/json", "-w", "\nversion %{http_version} %{http_code}\n"]
        process = await asyncio.create_subprocess_exec(*curl, stdout=subprocess.PIPE)
        assert process.stdout is not None
        pieces = []
        while piece := await process.stdout.read(65536):
            pieces.append(piece)
        await process.wait()
        whole = b"".join(pieces).decode()
        assert whole.rstrip().endswith("version 2 200"), whole[-300:]
        assert "data: [DONE]" in whole
        assert len(pieces) >= 10, f"it arrived in {len(pieces)} pieces"


@each
async def test_a_gateway_leaves_under_load_and_no_stream_is_lost(
    command: Command, serving: Serving, text: TextModel, tmp_path: Path
) -> None:
    async with balanced(command, serving, text, tmp_path) as balancer:
        stop = asyncio.Event()
        done: list[tuple[int, str]] = []

        async def client() -> None:
            while not stop.is_set():
                done.append(await balancer.stream())

        clients = [asyncio.create_task(client()) for _ in range(4)]
        await eventually(lambda: min(balancer.seen) >= 3, 60)
        leaving = balancer.gateways[0]
        leaving.stop.set()  # what SIGTERM does
        await eventually(lambda: leaving.parts.drain.active and not leaving.parts.drain.requests, 60)
        before = balancer.seen
        await eventually(lambda: balancer.seen[1] > before[1] + 8, 60)
        stop.set()
        await asyncio.gather(*clients)
        assert [body for status, body in done if status != 200] == []
        assert all(body.rstrip().endswith("data: [DONE]") for _, body in done)
        (text_of_all,) = {_text(body) for _, body in done}
        assert WORDS.startswith(text_of_all) and len(text_of_all) > 50
        assert balancer.seen[0] == before[0], "a gateway that drains gets nothing new"


@each
async def test_a_session_stays_on_its_gateway(
    command: Command, serving: Serving, text: TextModel, tmp_path: Path
) -> None:
    async with balanced(command, serving, text, tmp_path, sticky="session", step_s=0.001) as balancer:
        homes = set()
        for session in range(8):
            before = balancer.seen
            for _ in range(4):
                assert (await balancer.stream(f"session-{session}"))[0] == 200
            more = tuple(now - then for now, then in zip(balancer.seen, before, strict=True))
            assert sorted(more) == [0, 4], f"{more}: one gateway has all of a session"
            homes.add(more)
        assert len(homes) == 2, "sessions are spread over the gateways"


def _text(stream: str) -> str:
    deltas = (json.loads(data) for data in re.findall(r"^data: (\{.*\})$", stream, flags=re.MULTILINE))
    return "".join(choice["delta"].get("content") or "" for delta in deltas for choice in delta["choices"]).strip()
