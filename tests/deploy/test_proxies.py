"""The shipped proxy configurations, with the real proxies and a certificate of our own: tokens arrive one by one."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from penstock.text import TextModel
from tests.deploy.prometheus import ROOT
from tests.gateway.conftest import Serving
from tests.ports import free_port
from tests.scripted import ScriptedEngine

pytestmark = pytest.mark.slow
SHIPPED = ROOT / "deploy" / "proxy"
NAME = "llm.example.com"


def nginx(shipped: str, folder: Path, port: int, behind: int) -> tuple[str, list[str]]:
    server = shipped.replace("443", str(port)).replace("/etc/ssl/penstock", str(folder)).replace(":8000", f":{behind}")
    rest = f"pid {folder}/pid;\ndaemon off;\nerror_log {folder}/error.log;\nevents {{}}\n"
    return f"{rest}http {{ access_log off;\n{server}\n}}", ["nginx", "-c"]


def haproxy(shipped: str, folder: Path, port: int, behind: int) -> tuple[str, list[str]]:
    text = shipped.replace(":443", f"127.0.0.1:{port}").replace("/etc/ssl/penstock", str(folder))
    return text.replace("127.0.0.1:8000", f"127.0.0.1:{behind}"), ["haproxy", "-db", "-f"]


def caddy(shipped: str, folder: Path, port: int, behind: int) -> tuple[str, list[str]]:
    own = f"tls {folder}/fullchain.pem {folder}/privkey.pem\n\treverse_proxy"
    text = shipped.replace(NAME, f"https://{NAME}:{port}", 1).replace("reverse_proxy", own)
    options = "{\n\tadmin off\n\tauto_https off\n}\n"
    return options + text.replace(":8000", f":{behind}"), ["caddy", "run", "--adapter", "caddyfile", "--config"]


def certificate(folder: Path) -> ssl.SSLContext:
    key, chain = folder / "privkey.pem", folder / "fullchain.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={NAME}"]
    command += ["-addext", f"subjectAltName=DNS:{NAME}", "-keyout", str(key), "-out", str(chain)]
    subprocess.run(command, check=True, capture_output=True)
    (folder / "both.pem").write_text(chain.read_text() + key.read_text())
    return ssl.create_default_context(cafile=str(chain))


@pytest.mark.parametrize(
    ("file", "adapted"),
    [("nginx.conf", nginx), ("haproxy.cfg", haproxy), ("Caddyfile", caddy)],
    ids=["nginx", "haproxy", "caddy"],
)
async def test_streams_pass_a_proxy_token_by_token(
    file: str, adapted: Callable[..., tuple[str, list[str]]], serving: Serving, text: TextModel, tmp_path: Path
) -> None:
    if shutil.which(adapted.__name__) is None:
        pytest.skip(f"{adapted.__name__} is not installed")
    trusted = certificate(tmp_path)
    engine = ScriptedEngine(text, "one two three four five six", step_s=0.05)
    async with serving(engine, trusted_hosts=(NAME,)) as running:
        port = free_port()
        settings, command = adapted((SHIPPED / file).read_text(), tmp_path, port, running.port)
        path = tmp_path / file
        path.write_text(settings)
        proxy = await asyncio.create_subprocess_exec(*command, str(path), stderr=subprocess.PIPE)
        try:
            pieces = await through(port, trusted)
        finally:
            proxy.terminate()
            _, said = await proxy.communicate()
        assert len(pieces) >= 10, f"{len(pieces)} pieces: {said.decode()[-500:]}"
        assert b"".join(pieces).rstrip().endswith(b"data: [DONE]")


async def through(port: int, trusted: ssl.SSLContext) -> list[bytes]:
    """The pieces in which a stream arrives over TLS."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    async with httpx.AsyncClient(verify=trusted, timeout=180) as client:
        url = f"https://127.0.0.1:{port}/v1/chat/completions"
        extensions = {"sni_hostname": NAME}
        for _ in range(1200):
            try:
                async with client.stream(
                    "POST", url, json=body, headers={"host": NAME}, extensions=extensions
                ) as reply:
                    if reply.status_code == 200:
                        return [piece async for piece in reply.aiter_raw()]
            except httpx.TransportError:
                pass  # not up yet
            await asyncio.sleep(0.1)
    raise AssertionError("the proxy never answered")
