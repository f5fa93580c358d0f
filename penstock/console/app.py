"""ASGI middleware that serves the console: it answers `/console/…` and passes everything else to the gateway."""

from __future__ import annotations

from penstock.console.assets import Asset, Assets
from penstock.gateway.app.exchange import Receive, Send
from penstock.gateway.http.connections import Application
from penstock.gateway.http.request import Scope

Headers = list[tuple[bytes, bytes]]

ROOT = "/console/"
_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""`unsafe-eval`: Vue compiles templates in the browser. Text from a model is never used as a template."""
_ALWAYS: Headers = [
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
]


class Console:
    """An ASGI application that wraps another one."""

    def __init__(self, inner: Application) -> None:
        self._inner = inner
        self._assets = Assets()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in ("GET", "HEAD"):
            await self._inner(scope, receive, send)
            return
        path: str = scope["path"]
        if path == "/console" or (path == "/" and _wants_a_page(scope)):
            await _reply(scope, send, 307, [(b"location", ROOT.encode())])
        elif path.startswith(ROOT):
            await self._serve(scope, send, path.removeprefix(ROOT) or "index.html")
        else:
            await self._inner(scope, receive, send)

    async def _serve(self, scope: Scope, send: Send, name: str) -> None:
        asset = await self._assets.get(name)
        if asset is None:
            await _reply(
                scope, send, 404, [(b"content-type", b"text/plain; charset=utf-8")], b"There is no such page.\n"
            )
            return
        # Browsers revalidate every time, which costs a few bytes while the file is unchanged: updates show at once.
        headers: Headers = [
            (b"etag", asset.tag.encode()),
            (b"cache-control", b"no-cache"),
            (b"vary", b"accept-encoding"),
        ]
        if asset.tag in _header(scope, b"if-none-match"):
            await _reply(scope, send, 304, headers)
            return
        await _reply(scope, send, 200, *_encoded(scope, asset, headers))


def _encoded(scope: Scope, asset: Asset, headers: Headers) -> tuple[Headers, bytes]:
    headers = [*headers, (b"content-type", asset.media_type.encode())]
    if asset.compressed is not None and "gzip" in _header(scope, b"accept-encoding"):
        return [*headers, (b"content-encoding", b"gzip"), (b"vary", b"accept-encoding")], asset.compressed
    return headers, asset.body


def _wants_a_page(scope: Scope) -> bool:
    """Whether the client is a browser, which accepts HTML; other clients get the API's own reply for `/`."""
    return "text/html" in _header(scope, b"accept")


def _header(scope: Scope, name: bytes) -> str:
    return ", ".join(value.decode("latin-1") for key, value in scope["headers"] if key == name)


async def _reply(scope: Scope, send: Send, status: int, headers: Headers, body: bytes = b"") -> None:
    length = [] if status == 304 else [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*_ALWAYS, *headers, *length]})
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})
