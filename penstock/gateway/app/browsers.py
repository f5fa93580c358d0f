"""Keeps web pages of other origins away from a server without keys.

While there is no key, whoever reaches the port is the administrator, and so would be every web page that is open in a
browser on this machine. A request without a key is therefore answered only if no foreign page can have sent it:

- its `Host` is a loopback name or a configured one, so a name that an attacker points at 127.0.0.1 (DNS rebinding) is
  refused;
- its `Origin` and `Sec-Fetch-Site`, which browsers add and pages cannot forge, are those of a page of this server or of
  a configured origin;
- what changes state is sent in a way that a page of another origin needs a preflight for: as `application/json`, or,
  from a page of this server, with the header `x-penstock-console`.

Programs send neither `Origin` nor `Sec-Fetch-Site` and only have to say `application/json`; a few endpoints that change
nothing do without, for programs that never say it. With keys none of this is
needed: they travel in a header that the browser never adds by itself, and there are no cookies.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache

from penstock.gateway.app.exchange import JSON, Exchange
from penstock.protocol.address import is_loopback
from penstock.protocol.errors import UnsupportedMediaType, UntrustedPage

CONSOLE_HEADER = b"x-penstock-console"
"""The console sends it with every request. A page of another origin cannot, without a preflight that fails."""
_SAFE = frozenset(("GET", "HEAD", "OPTIONS"))
_OWN = frozenset((b"same-origin", b"none"))
"""`Sec-Fetch-Site` of a page of this server, and of what the user typed or bookmarked."""
_HOSTS = 1024


class BrowserGuard:
    """Decides whether a request may use the server without a key."""

    def __init__(self, hosts: Collection[str] = (), origins: Collection[str] = ()) -> None:
        """`hosts`: names besides those of the loopback interface under which this server is reached. `origins`: those
        that CORS lets in. `*` is not enough without a key, except for pages of this machine (a front end in
        development)."""
        self._any_local = "*" in origins
        self._origins = frozenset(origin.rstrip("/").lower().encode() for origin in origins)
        names = frozenset(host.lower() for host in hosts)
        self._trusts = lru_cache(_HOSTS)(lambda host: is_local(name := host_name(host)) or name in names)

    def check(self, exchange: Exchange, *, json_only: bool) -> None:
        """Raises `UntrustedPage` unless the request comes from a program or a trusted page. `json_only`: its body must
        say that it is JSON."""
        host = exchange.header(b"host")
        if host is not None and not self._trusts(host):
            raise UntrustedPage(
                f"This server has no keys yet, so it answers only as localhost, not as {_shown(host)}. Use "
                "http://127.0.0.1, name the host in `server.trusted_hosts`, or create a key (`penstock keys create`).",
                code="untrusted_host",
            )
        origin = exchange.header(b"origin")
        site = exchange.header(b"sec-fetch-site")
        from_page = origin is not None or site is not None
        if from_page:
            if origin is not None and self._lets_in(origin):
                from_page = False  # like a program: its operator has named it
            elif (origin is not None and not _same(origin, host)) or (site is not None and site not in _OWN):
                raise UntrustedPage(
                    f"This server has no keys yet, so pages of {_shown(origin or b'another site')} may not use it. "
                    "Name the origin in `server.cors_origins`, or create a key (`penstock keys create`)."
                )
        if exchange.method not in _SAFE:
            _check_body(exchange, from_page=from_page, json_only=json_only)

    def _lets_in(self, origin: bytes) -> bool:
        if origin.lower() in self._origins:
            return True
        return self._any_local and is_local(host_name(_authority(origin)))


def _check_body(exchange: Exchange, *, from_page: bool, json_only: bool) -> None:
    kind = exchange.header(b"content-type")
    if kind == JSON or (kind is not None and kind.partition(b";")[0].strip().lower() == JSON):
        return
    if from_page and exchange.header(CONSOLE_HEADER) is None:
        raise UntrustedPage(
            "This server has no keys yet, so a web page must send `content-type: application/json`, or the header "
            f"`{CONSOLE_HEADER.decode()}`, with what changes anything."
        )
    if json_only and _has_body(exchange):
        raise UnsupportedMediaType("Send the body as `content-type: application/json`.", param="content-type")


def _has_body(exchange: Exchange) -> bool:
    length = exchange.header(b"content-length")
    return exchange.header(b"transfer-encoding") is not None or (length is not None and length.strip(b"0") != b"")


def host_name(host: bytes) -> str:
    """The name in a `Host` header, without its port, in lower case."""
    text = host.decode("latin-1").strip().lower()
    if text.startswith("["):
        return text[: text.find("]") + 1]
    return text.partition(":")[0]


def is_local(name: str) -> bool:
    """Whether a name in a `Host` header means this machine whatever a DNS server says."""
    return is_loopback(name.removesuffix("."))


def _authority(origin: bytes) -> bytes:
    return origin.partition(b"://")[2]


def _same(origin: bytes, host: bytes | None) -> bool:
    """Whether a page of `origin` was served under `host`."""
    scheme, _, authority = origin.lower().partition(b"://")
    if host is None or not authority or scheme not in (b"http", b"https"):
        return False
    port = b":80" if scheme == b"http" else b":443"
    return authority.removesuffix(port) == host.lower().removesuffix(port)


def _shown(name: bytes) -> str:
    return name[:128].decode("latin-1").encode("ascii", "backslashreplace").decode()
