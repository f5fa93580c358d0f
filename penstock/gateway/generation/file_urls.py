"""Files that a request names by their URL, fetched from hosts that the configuration allows.

URLs come from tenants: connections go only to addresses that `Addresses` allows, after names are resolved; every
redirect is checked like the URL itself; nothing of the request but its URL is sent, and no more than the files of a
request may have is read, within one time limit.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from urllib.parse import unquote

import httpx

from penstock.config.input_files import InputFilesConfig
from penstock.telemetry.exposition import MetricRegistry
from penstock.tools.execution import ToolError
from penstock.tools.execution.addresses import Addresses, PinnedTransport, no_cookies

MOST_REDIRECTS = 5
LONGEST_URL = 8192
_EVERY = "*"
_PORTS = {"https": 443, "http": 80}
_REDIRECTS = (301, 302, 303, 307, 308)
_READABLE = ("pdf", "json", "xml", "yaml", "javascript", "octet-stream")
"""Endings of media types, besides text/*, under which servers send what models read."""


class NotFetched(Exception):
    """There is no file to be had; the reason is for the caller."""


@dataclass(frozen=True, slots=True)
class FetchedFile:
    name: str
    """The last part of the path."""
    media_type: str
    body: bytes


class FileUrls:
    """Fetches files."""

    def __init__(self, config: InputFilesConfig, metrics: MetricRegistry) -> None:
        self._config = config
        self._outcomes = metrics.counter(
            "penstock_input_file_fetches_total", "Files fetched by their URL: fetched, refused or failed.", ("outcome",)
        )
        self._named: httpx.AsyncClient | None = None
        """For hosts that the configuration names; others are public, whatever networks those may be in."""
        self._any: httpx.AsyncClient | None = None
        if config.url_hosts:
            self._named = _client(config, Addresses(config.url_networks, setting="input_files.url_networks"))
            self._any = _client(config, Addresses(setting="input_files.url_hosts"))

    @property
    def enabled(self) -> bool:
        return self._named is not None

    async def close(self) -> None:
        for client in (self._named, self._any):
            if client is not None:
                await client.aclose()

    async def fetch(self, url: str, most: int) -> FetchedFile:
        """The file at `url`; `NotFetched` where it has more than `most` bytes, or cannot be had."""
        limit_s = self._config.url_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                found = await self._follow(url, most)
        except NotFetched:
            self._outcomes.child("refused").inc()
            raise
        except ToolError as error:  # its host may not be reached, or has no address
            self._outcomes.child("refused").inc()
            raise NotFetched(f"{error}.") from error
        except (httpx.InvalidURL, ValueError) as error:  # also of `urllib`, which joins what httpx takes for a URL
            self._outcomes.child("refused").inc()
            raise NotFetched("Its URL, or one that it redirects to, is not valid.") from error
        except (TimeoutError, httpx.TimeoutException) as error:  # the client's limit is the same, for each step
            self._outcomes.child("failed").inc()
            raise NotFetched(f"It did not arrive within {limit_s:g} seconds.") from error
        except (httpx.HTTPError, OSError) as error:
            self._outcomes.child("failed").inc()
            raise NotFetched(f"Its server cannot be reached ({type(error).__name__}).") from error
        self._outcomes.child("fetched").inc()
        return found

    async def _follow(self, url: str, most: int) -> FetchedFile:
        for _ in range(MOST_REDIRECTS + 1):
            at, named = self._checked(url)
            client = self._named if named else self._any
            assert client is not None
            async with client.stream("GET", at) as reply:
                if reply.status_code not in _REDIRECTS:
                    return await _read(reply, at, most)
                url = str(at.join(reply.headers.get("location", "")))
        raise NotFetched(f"Its server redirects more than {MOST_REDIRECTS} times.")

    def _checked(self, url: str) -> tuple[httpx.URL, bool]:
        """The URL, and whether the configuration names its host."""
        if len(url) > LONGEST_URL:
            raise NotFetched(f"Its URL has more than {LONGEST_URL:,} characters.")
        at = httpx.URL(url)
        schemes = ("https", "http") if self._config.url_plain_http else ("https",)
        host = at.raw_host.decode("ascii")
        if at.scheme not in schemes or not host:
            raise NotFetched(f"Its URL must begin with {' or '.join(f'{scheme}://' for scheme in schemes)}.")
        if at.userinfo:
            raise NotFetched("Its URL must not have a user name or a password.")
        port = at.port or _PORTS[at.scheme]
        allowing = [pattern for pattern in self._config.url_hosts if _allows(pattern, at.scheme, host, port)]
        if not allowing:
            where = host if port == _PORTS[at.scheme] else f"{host}:{port}"
            raise NotFetched(f"Files are not fetched from {where} (`input_files.url_hosts`).")
        return at, any(pattern.partition(":")[0] != _EVERY for pattern in allowing)


def _client(config: InputFilesConfig, addresses: Addresses) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        # Connections are not kept: those of different names at one address must not be mixed up.
        transport=PinnedTransport(addresses, keep_alive=False),
        trust_env=False,
        timeout=config.url_timeout_s,
        cookies=no_cookies(),
        headers={"user-agent": "Penstock-Files", "accept-encoding": "identity"},
    )


def _allows(pattern: str, scheme: str, named: str, port: int) -> bool:
    """Whether an entry of `url_hosts` allows a URL of the host `named` (other alphabets: as `xn--...`). Without a port
    it allows the usual one only."""
    host, _, wanted = pattern.lower().partition(":")
    if port != (int(wanted) if wanted else _PORTS[scheme]):
        return False
    named = named.lower().rstrip(".")
    return host == _EVERY or named == host or (host.startswith("*.") and named.endswith(host[1:]))


async def _read(reply: httpx.Response, url: httpx.URL, most: int) -> FetchedFile:
    if reply.status_code != 200:
        raise NotFetched(f"Its server replied with status {reply.status_code}.")
    media_type = reply.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type and not media_type.startswith("text/") and not media_type.endswith(_READABLE):
        raise NotFetched(f"It is {media_type[:64]}, which models here cannot read.")
    if reply.headers.get("content-encoding", "identity").lower() != "identity":
        raise NotFetched("Its server compresses it, which was not asked for.")
    length = reply.headers.get("content-length", "")
    size = int(length[:20]) if length.isdecimal() else 0
    pieces: list[bytes] = []
    if size <= most:
        size = 0
        async for piece in reply.aiter_raw():
            size += len(piece)
            if size > most:
                break
            pieces.append(piece)
    if size > most:
        raise NotFetched(f"It has more than {most:,} bytes, which is what this request may still read.")
    name = unquote(url.path.rpartition("/")[2])
    return FetchedFile(name, media_type, b"".join(pieces))
