"""Replies to what never became a request: a head that cannot be read or means two things, a client that is too slow.

They come from the connection itself, before any endpoint is known, so they have the plain shape of the API's errors.
Whoever reads one is a person whose client or proxy is set up wrongly: each says what was wrong and what to do.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

MOST_HEADERS = 256
"""Header fields of a request, and fields after a chunked body."""


@dataclass(frozen=True, slots=True)
class Refusal:
    status: bytes
    """The status line after the version; further headers may follow it."""
    message: str
    code: str
    type: str = "invalid_request_error"

    def reply(self, request_id: str, *, head_only: bool = False) -> bytes:
        """The whole reply, after which the connection ends. `head_only`: it answers a HEAD request."""
        error = {"message": self.message, "type": self.type, "param": None, "code": self.code}
        body = msgspec.json.encode({"error": error})
        head = (
            b"HTTP/1.1 " + self.status + b"\r\ncontent-type: application/json\r\n"
            b"x-request-id: %b\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % (request_id.encode(), len(body))
        )
        return head if head_only else head + body


def _bad(message: str) -> Refusal:
    return Refusal(b"400 Bad Request", message, "bad_request")


def malformed(problem: str = "") -> Refusal:
    """`problem`: in the words of the parser, which never repeat what the client sent."""
    what = f" ({problem})" if problem else ""
    return _bad(f"This is not a valid HTTP request{what}. Check the client, or the proxy in front of this server.")


TLS = _bad("This port speaks plain HTTP, not TLS: use http:// instead of https://, or put a proxy with TLS in front.")
NO_HOST = _bad("A request must have exactly one valid `Host` header.")
TARGET = _bad("The target of the request must be a path, or a URL that begins with http:// or https://.")
FRAMING = _bad(
    "It is not clear where the body of this request ends: send either one `Content-Length` or "
    "`Transfer-Encoding: chunked`, the latter not with HTTP 1.0."
)
SMALL_CHUNKS = _bad("The chunks of the body are so small that there is more framing than body; send larger ones.")
TOO_LARGE = Refusal(
    b"431 Request Header Fields Too Large",
    f"The headers of the request (or the trailers of its body) are larger than `server.header_limit`, or more than "
    f"{MOST_HEADERS}; send less, for example fewer cookies.",
    "headers_too_large",
)
VERSION = Refusal(
    b"505 HTTP Version Not Supported",
    "This server speaks HTTP of the versions 1.1 and 1.0; for others, put a proxy in front.",
    "http_version_not_supported",
)
CODING = Refusal(
    b"501 Not Implemented",
    "Of transfer encodings, only `chunked` is understood; compress a body with `Content-Encoding: gzip` instead.",
    "transfer_encoding_not_supported",
)
CONNECT = Refusal(
    b"501 Not Implemented",
    "This server is no proxy: CONNECT is not possible. Take its address out of the client's proxy settings.",
    "connect_not_supported",
)
EXPECTATION = Refusal(
    b"417 Expectation Failed", "Of expectations, only `Expect: 100-continue` is understood.", "expectation_failed"
)
TOO_SLOW = Refusal(
    b"408 Request Timeout",
    "The request did not arrive within `server.receive_s` seconds; send it again.",
    "request_timeout",
)
TOO_MANY = Refusal(
    b"503 Service Unavailable\r\nretry-after: 1",
    "This server, or this client's address, has as many connections as it may have; close some, or try again.",
    "too_many_connections",
    "overloaded",
)
FAILED = Refusal(b"500 Internal Server Error", "The server failed on this request.", "server_error", "server_error")
