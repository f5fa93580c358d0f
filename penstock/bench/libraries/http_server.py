"""One HTTP server with the application that servers are compared on: the process that `http_servers` starts.

    python -m penstock.bench.libraries.http_server penstock|uvicorn|granian PORT

The application reads a request's body and answers as a gateway does: `/short` with one JSON body, `/stream` with
`EVENTS` server-sent events. Each server runs as it would in production: one process, uvloop, no access log.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

from penstock.gateway.http.connections import Receive, Send
from penstock.gateway.http.request import Scope

EVENTS = 64
PAUSE_S = 0.005
"""Between two events of a stream, as between two steps of an engine: each event is a write of its own."""
EVENT = b'data: {"id":"chatcmpl-1","choices":[{"index":0,"delta":{"content":" water"},"finish_reason":null}]}\n\n'
ANSWER = b'{"id":"chatcmpl-1","choices":[{"index":0,"message":{"role":"assistant","content":"%s"}}]}' % (b"water " * 50)
_JSON = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(ANSWER))]
_SSE = [(b"content-type", b"text/event-stream")]


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        await _lifespan(receive, send)
        return
    while (await receive()).get("more_body"):
        pass
    if scope["path"] == "/stream":
        await send({"type": "http.response.start", "status": 200, "headers": _SSE})
        for _ in range(EVENTS):
            await send({"type": "http.response.body", "body": EVENT, "more_body": True})
            await asyncio.sleep(PAUSE_S)
        await send({"type": "http.response.body", "body": b""})
    else:
        await send({"type": "http.response.start", "status": 200, "headers": _JSON})
        await send({"type": "http.response.body", "body": ANSWER})


async def _lifespan(receive: Receive, send: Send) -> None:
    while (message := await receive())["type"] != "lifespan.shutdown":
        await send({"type": f"{message['type']}.complete"})
    await send({"type": "lifespan.shutdown.complete"})


def serve_penstock(port: int) -> None:
    import uvloop

    from penstock.gateway.http.listener import Listener

    async def failed(error: Exception, scope: Scope, receive: object, send: Send | None) -> None:
        raise error

    async def run() -> None:
        listener = Listener(
            application, failed, "127.0.0.1", port, head_limit=65536, receive_s=60.0, stalled_reader_s=60.0, room=10_000
        )
        await listener.start()
        await asyncio.Event().wait()

    uvloop.run(run())


def serve_uvicorn(port: int) -> None:
    import uvicorn

    uvicorn.run(application, port=port, http="httptools", loop="uvloop", access_log=False, log_level="error")


def serve_granian(port: int) -> None:
    from granian import Granian
    from granian.constants import HTTPModes, Interfaces, Loops

    Granian(
        "penstock.bench.libraries.http_server:application",
        port=port,
        interface=Interfaces.ASGI,
        http=HTTPModes.http1,
        loop=Loops.uvloop,
        workers=1,
        log_enabled=False,
    ).serve()


SERVERS: dict[str, Callable[[int], None]] = {
    "penstock": serve_penstock,
    "uvicorn": serve_uvicorn,
    "granian": serve_granian,
}

if __name__ == "__main__":
    SERVERS[sys.argv[1]](int(sys.argv[2]))
