"""What never becomes a request is refused in the API's error shape, in words that help whoever set the client up."""

from __future__ import annotations

import asyncio
import json

import pytest

from penstock.gateway.http.refusal import TOO_MANY, TOO_SLOW
from tests.gateway.conftest import eventually
from tests.gateway.http.test_hostile_clients import GET, HEAD_LIMIT, MovedClock, listening
from tests.gateway.http.test_listener import POST, say

LARGE = b"x-big: " + b"a" * HEAD_LIMIT + b"\r\n"


def parts(answer: bytes) -> tuple[int, dict[str, str], bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    line, *fields = head.decode().split("\r\n")
    return int(line.split()[1]), dict(field.split(": ", 1) for field in fields), body


@pytest.mark.parametrize(
    ("sent", "status", "code", "words"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "bad_request", "http:// instead of https://"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505, "http_version_not_supported", "versions 1.1"),
        (b"BREW / HTTP/1.1\r\nhost: x\r\n\r\n", 400, "bad_request", "Invalid method"),
        (b"GET / HTTP/1.1\r\nhost: x\r\nno colon\r\n\r\n", 400, "bad_request", "Invalid header token"),
        (b"GET / HTTP/1.1\r\n\r\n", 400, "bad_request", "`Host`"),
        (GET % (b"/", b"host: y\r\n"), 400, "bad_request", "`Host`"),
        (GET % (b"ftp://x/", b""), 400, "bad_request", "must be a path"),
        (GET % (b"/", LARGE), 431, "headers_too_large", "server.header_limit"),
        (POST + b"content-length: 1\r\ncontent-length: 2\r\n\r\na", 400, "bad_request", "where the body"),
        (POST + b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\na", 400, "bad_request", "where the body"),
        (
            POST + b"transfer-encoding: gzip, chunked\r\n\r\n",
            501,
            "transfer_encoding_not_supported",
            "Content-Encoding",
        ),
        (POST + b"content-length: 1\r\nexpect: cake\r\n\r\na", 417, "expectation_failed", "100-continue"),
        (b"CONNECT a:443 HTTP/1.1\r\nhost: a\r\n\r\n", 501, "connect_not_supported", "proxy"),
    ],
)
async def test_every_refusal_says_what_to_do(sent: bytes, status: int, code: str, words: str) -> None:
    async with listening() as (app, port, _):
        found, fields, body = parts(await say(port, sent))
        error = json.loads(body)["error"]
        assert (found, error["code"], error["param"]) == (status, code, None) and words in error["message"], error
        assert fields["content-type"] == "application/json" and fields["connection"] == "close"
        assert int(fields["content-length"]) == len(body) and not app.seen
        assert fields["x-request-id"].startswith("req_")


async def test_a_refusal_has_the_request_id_that_the_log_has(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "penstock.http")
    async with listening() as (_, port, _):
        sent = b"x-request-id: mine.1\r\nexpect: cake\r\n"
        _, fields, _ = parts(await say(port, GET % (b"/", sent)))
        assert fields["x-request-id"] == "mine.1"
        await say(port, GET % (b"/", b"x-request-id: not mine\r\nexpect: cake\r\n"))
    ids = [(record.__dict__["request_id"], record.__dict__["code"]) for record in caplog.records]
    assert ids[0] == ("mine.1", "expectation_failed") and ids[1][0].startswith("req_")


async def test_a_refused_head_request_gets_no_body() -> None:
    async with listening() as (_, port, _):
        status, fields, body = parts(await say(port, b"HEAD / HTTP/1.1\r\nhost: x\r\nexpect: cake\r\n\r\n"))
        assert status == 417 and int(fields["content-length"]) > 0 and body == b""


async def test_a_client_that_is_too_slow_or_one_too_many_is_told_so() -> None:
    async with listening(room=1) as (_, port, listener):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nhost: ")
        await writer.drain()
        status, fields, body = parts(await say(port, GET % (b"/", b"")))
        assert (status, fields["retry-after"]) == (503, "1")
        assert json.loads(body)["error"]["message"] == TOO_MANY.message
        await eventually(lambda: all(connection._coming is not None for connection in listener._shared.open))
        MovedClock(listener).move(70.0)
        status, _, body = parts(await reader.read())
        assert status == 408 and json.loads(body)["error"]["message"] == TOO_SLOW.message
        writer.close()
