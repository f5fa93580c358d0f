"""Checks of a request's head that the parser leaves to us: versions, `Host`, framing, expectations, forms of targets.

Invariant: a request that passes has exactly one meaning to every server on its way (RFC 9112), so that nothing can be
smuggled past a proxy in front. Upgrades, which are optional for a server, are ignored: the answer is HTTP/1.1.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import httptools

from penstock.gateway.http.refusal import (
    CODING,
    CONNECT,
    EXPECTATION,
    FRAMING,
    MOST_HEADERS,
    NO_HOST,
    TARGET,
    TOO_LARGE,
    VERSION,
    Refusal,
)

if TYPE_CHECKING:
    from penstock.gateway.http.request import Request

_HOST = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._~!$&'()*+,;=:[]%"


def refusal(request: Request, limit: int) -> Refusal | None:
    """What refuses a head; None when it is in order. `limit`: its most bytes. Notes in the
    request what follows from the head."""
    headers = request.headers
    if len(headers) > MOST_HEADERS:
        return TOO_LARGE
    if len(request.target) + sum(map(len, chain.from_iterable(headers))) + 4 * len(headers) > limit:
        return TOO_LARGE
    version = request.version
    if version not in ("1.1", "1.0"):
        return VERSION
    given = dict(headers)
    host = given.get(b"host")
    if host is None:
        if version == "1.1":
            return NO_HOST
    elif host.translate(None, _HOST) or (len(given) < len(headers) and _repeated(request, b"host")):
        return NO_HOST
    coding = given.get(b"transfer-encoding")
    if coding is not None:
        if version == "1.0":
            return FRAMING  # a proxy that speaks HTTP/1.0 does not know where this body ends
        if coding.lower() != b"chunked":
            return CODING
    expected = given.get(b"expect")
    if expected is not None and version == "1.1":
        if expected.lower() != b"100-continue":
            return EXPECTATION
        request.expects = True
    request.upgrades = b"upgrade" in given
    if request.method == "CONNECT":
        return CONNECT  # whatever its target: parsers differ on whether it has a body
    return None if request.target.startswith(b"/") else _other_form(request)


def _repeated(request: Request, name: bytes) -> bool:
    return sum(given == name for given, _ in request.headers) > 1


def _other_form(request: Request) -> Refusal | None:
    """A target that is no path: `*` of OPTIONS, or a whole URL, as clients send it to proxies."""
    target = request.target
    if target == b"*" and request.method == "OPTIONS":
        return None
    try:
        url = httptools.parse_url(target)
    except httptools.HttpParserInvalidURLError:
        return TARGET
    if url.schema is None or url.schema.lower() not in (b"http", b"https") or not url.host or url.userinfo:
        return TARGET
    path = url.path or b"/"
    request.target = path if url.query is None else path + b"?" + url.query
    # The host of a URL counts, not the header (RFC 9112, 3.2.2).
    host = (b"[" + url.host + b"]" if b":" in url.host else url.host) + (b":%d" % url.port if url.port else b"")
    request.headers = [(b"host", host), *(header for header in request.headers if header[0] != b"host")]
    return None


def framing(request: Request) -> bytes:
    """The header that says where the body ends; nothing if there is no body."""
    for name, value in request.headers:
        if name in (b"content-length", b"transfer-encoding") and value.strip() != b"0":
            return name + b": " + value + b"\r\n"
    return b""
