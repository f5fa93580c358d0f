"""Files by their URL: from which hosts, how much, and what is not followed; against a real server."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from penstock.config import load
from penstock.config.input_files import InputFilesConfig
from penstock.errors import ConfigError
from penstock.gateway.generation.file_urls import MOST_REDIRECTS, FileUrls, NotFetched
from penstock.telemetry.exposition import MetricRegistry
from penstock.tools.execution.addresses import Addresses

CSV = b"name,age\nAnn,41\n"


class Web:
    """A server of files; `asked`: the paths and headers that it was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.never = threading.Event()
        web = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                web.asked.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
                path, _, query = self.path.partition("?")
                if path == "/to":
                    self.send_response(302)
                    self.send_header("location", query)
                    self.send_header("set-cookie", "seen=1")
                    self.send_header("content-length", "0")
                    self.end_headers()
                elif path == "/loop":
                    self.send_response(307)
                    self.send_header("location", "/loop")
                    self.end_headers()
                elif path == "/no-url":
                    self.send_response(302)
                    self.send_header("location", "https:////[x")
                    self.end_headers()
                elif path == "/endless":
                    self.send_response(200)
                    self.end_headers()
                    try:
                        while True:
                            self.wfile.write(b"x" * 1000)
                    except OSError:
                        return
                elif path == "/silent":
                    web.never.wait()
                elif path == "/people.csv":
                    self.send_response(200)
                    for header in query.split("&"):
                        name, _, value = header.partition("=")
                        if name:
                            self.send_header(name, value)
                    self.send_header("content-length", str(len(CSV)))
                    self.end_headers()
                    self.wfile.write(CSV)
                else:
                    self.send_error(404)

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        self.config = InputFilesConfig(
            url_hosts=(f"127.0.0.1:{self.port}",), url_networks=("127.0.0.0/8",), url_plain_http=True
        )
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        self.never.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def web() -> Iterator[Web]:
    made = Web()
    yield made
    made.close()


@asynccontextmanager
async def urls(config: InputFilesConfig, **more: Any) -> AsyncIterator[FileUrls]:
    made = FileUrls(dataclasses.replace(config, **more), MetricRegistry())
    yield made
    await made.close()


async def test_a_file_with_its_name_and_nothing_but_its_url_is_sent(web: Web) -> None:
    async with urls(web.config) as files:
        found = await files.fetch(f"{web.url}/people.csv?content-type=text/csv;charset=utf-8", 100)
        assert (found.name, found.media_type, found.body) == ("people.csv", "text/csv", CSV)
        again = await files.fetch(f"{web.url}/to?/people.csv", len(CSV))
        assert again.body == CSV and again.name == "people.csv"
        await files.fetch(f"{web.url}/people.csv", 100)
        names = {name for _, headers in web.asked for name in headers}
        assert names == {"host", "accept", "accept-encoding", "connection", "user-agent"}, "no cookies either"


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/none", "status 404"),
        ("/people.csv?content-type=image/png", "image/png, which models here cannot read"),
        ("/people.csv?content-encoding=gzip", "compresses it"),
        ("/endless", "more than 100 bytes"),
        ("/loop", f"more than {MOST_REDIRECTS} times"),
        ("/no-url", "not valid"),
        ("/to?https://example.org/x", "not fetched from example.org"),
        ("/to?http://localhost/x", "not fetched from localhost"),
        ("/to?file:///etc/passwd", "must begin with https:// or http://"),
        ("/to?http://ann:secret@127.0.0.1/", "user name"),
    ],
)
async def test_what_is_not_a_file_for_a_model(web: Web, path: str, why: str) -> None:
    async with urls(web.config) as files:
        with pytest.raises(NotFetched, match=why):
            await files.fetch(web.url + path, 100)
        with pytest.raises(NotFetched, match="more than 3 bytes"):
            await files.fetch(f"{web.url}/people.csv", 3)


@pytest.mark.parametrize("url", ["https://[::1", "https://a:b/", "http://\u2100\uff0e["])
async def test_what_is_no_url(web: Web, url: str) -> None:
    async with urls(web.config) as files:
        with pytest.raises(NotFetched, match="not valid"):
            await files.fetch(url, 100)


async def test_private_addresses_are_not_reached_whatever_the_host_is_called(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    anywhere = dataclasses.replace(web.config, url_hosts=("*", f"*:{web.port}"), url_networks=())
    async with urls(anywhere) as files:
        for host in ("127.0.0.1", "localhost", "[::1]", "169.254.169.254", "0.0.0.0"):
            with pytest.raises(NotFetched, match="private address"):
                await files.fetch(f"http://{host}:{web.port}/people.csv", 100)
    assert web.asked == []
    # The check is made for every redirect: the second name has an address that is not allowed.
    resolve = Addresses.resolve

    async def resolved(self: Addresses, host: str, port: int) -> str:
        return "127.0.0.1" if host == "public.example" else await resolve(self, host, port)

    monkeypatch.setattr(Addresses, "resolve", resolved)
    async with urls(anywhere) as files:
        there = f"http://public.example:{web.port}"
        assert (await files.fetch(f"{there}/people.csv", 100)).body == CSV
        with pytest.raises(NotFetched, match="private address"):
            await files.fetch(f"{there}/to?http://127.0.0.1:{web.port}/people.csv", 100)


async def test_only_hosts_that_are_named_may_be_in_private_networks(web: Web) -> None:
    """Anybody can give a name to an address in there."""
    async with urls(web.config, url_hosts=(f"*:{web.port}",)) as files:
        with pytest.raises(NotFetched, match="private address"):
            await files.fetch(f"{web.url}/people.csv", 100)
        assert web.asked == []
    async with urls(web.config, url_hosts=(f"*:{web.port}", f"127.0.0.1:{web.port}")) as files:
        assert (await files.fetch(f"{web.url}/people.csv", 100)).body == CSV
        with pytest.raises(NotFetched, match="private address"):
            await files.fetch(f"{web.url}/to?http://127.0.0.2:{web.port}/people.csv", 100)


async def test_which_hosts_are_allowed(web: Web) -> None:
    hosts = ("docs.example.org", "*.example.com", "files.example.net:8443", "xn--strae-oqa.example")
    async with urls(InputFilesConfig(url_hosts=hosts)) as files:
        for url in (
            "https://docs.example.org/a",
            "https://DOCS.example.org./a",
            "https://a.b.example.com/",
            "https://files.example.net:8443/a",
            "https://stra\u00dfe.example/",
            "https://xn--strae-oqa.example/",
        ):
            files._checked(url)
        for url in (
            "https://example.org/",
            "https://example.com/",
            "https://evilexample.com/",
            "https://docs.example.org:444/",
            "https://files.example.net/",
            "https://docs.example.org.evil.net/",
            "https://strasse.example/",
        ):
            with pytest.raises(NotFetched, match="not fetched from"):
                files._checked(url)
        with pytest.raises(NotFetched, match="must begin with https://"):
            files._checked("http://docs.example.org/a")
        with pytest.raises(NotFetched, match="8,192 characters"):
            files._checked("https://docs.example.org/" + "a" * 9000)
    assert not FileUrls(InputFilesConfig(), MetricRegistry()).enabled


async def test_a_server_that_does_not_answer_is_given_up(web: Web) -> None:
    async with urls(web.config, url_timeout_s=0.1) as files:
        with pytest.raises(NotFetched, match=r"within 0\.1 seconds"):
            await files.fetch(f"{web.url}/silent", 100)
    async with urls(web.config, url_timeout_s=60) as files:
        assert files._named is not None
        files._named.timeout = httpx.Timeout(0.1)  # a step of the client is over time first
        with pytest.raises(NotFetched, match="within 60 seconds"):
            await files.fetch(f"{web.url}/silent", 100)


@pytest.mark.parametrize("host", ["https://example.org", "a b", "*x.org", "x/*", "", "x:0", "x:123456"])
def test_what_is_no_host(host: str) -> None:
    with pytest.raises(ConfigError, match=r"input_files\.url_hosts"):
        load(flags={"input_files.url_hosts": f'["{host}"]'}, environ={})
