"""Real tools for tests: an HTTP API in a thread of this process, and an MCP server in a process of its own."""

from __future__ import annotations

import json
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from penstock.config.context import ToolServerConfig

LOOPBACK = ("127.0.0.0/8",)
WEATHER_API: dict[str, Any] = {
    "openapi": "3.1.0",
    "info": {"title": "Weather", "version": "1"},
    "paths": {
        "/cities/{city}/weather": {
            "get": {
                "operationId": "get_weather",
                "summary": "The weather of a city",
                "parameters": [
                    {"name": "city", "in": "path", "required": True, "schema": {"type": "string"}},
                    {"name": "units", "in": "query", "schema": {"enum": ["metric", "imperial"]}},
                    {"name": "X-Mood", "in": "header", "schema": {"type": "string"}},
                ],
            }
        },
        "/notes": {
            "post": {
                "operationId": "add_note",
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Note"}}},
                },
            }
        },
        "/misbehave": {
            "get": {
                "operationId": "misbehave",
                "parameters": [{"name": "how", "in": "query", "required": True, "schema": {"type": "string"}}],
            }
        },
    },
    "components": {
        "schemas": {
            "Note": {
                "type": "object",
                "properties": {"text": {"type": "string"}, "tags": {"type": "array", "items": {"type": "string"}}},
                "required": ["text"],
            }
        }
    },
}


class WeatherServer(ThreadingHTTPServer):
    """Knows the weather, keeps notes, and misbehaves when asked to."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.seen: list[tuple[str, str, dict[str, str], Any]] = []
        self.most_at_once = self.at_once = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def config(self, **more: Any) -> ToolServerConfig:
        return ToolServerConfig(**{"name": "weather", "openapi": json.dumps(WEATHER_API), "url": self.url, **more})


class _Handler(BaseHTTPRequestHandler):
    server: WeatherServer

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))

    def _answer(self, body: Any) -> None:
        server, url = self.server, urlsplit(self.path)
        with server.lock:
            server.seen.append((self.command, self.path, dict(self.headers), body))
            server.at_once += 1
            server.most_at_once = max(server.most_at_once, server.at_once)
        try:
            query = {name: values[0] for name, values in parse_qs(url.query).items()}
            self._reply(url.path, query, body)
        finally:
            with server.lock:
                server.at_once -= 1

    def _reply(self, path: str, query: dict[str, str], body: Any) -> None:
        how = query.get("how")
        if how == "late":
            time.sleep(1.0)
        if how == "redirect":
            self._send(302, b"", {"location": "http://169.254.169.254/latest/meta-data"})
        elif how == "gzip":
            self._send(200, b"\x1f\x8b", {"content-encoding": "gzip"})
        elif how == "fail":
            self._send(500, b'{"detail": "broken"}')
        elif how == "huge":
            self._send(200, b"x" * 5_000_000)
        elif path == "/notes":
            self._send(201, json.dumps({"stored": body}).encode())
        else:
            city = unquote(path.split("/")[2]) if path.startswith("/cities/") else ""
            time.sleep(0.05)
            self._send(200, json.dumps({"city": city, "weather": "sunny", **query}).encode())

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        try:
            self.send_response(status)
            for name, value in {"content-length": str(len(body)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)
        except OSError:
            self.close_connection = True  # whoever asked has heard enough

    def log_message(self, format: str, *args: Any) -> None:
        """Tests are quiet."""


@contextmanager
def weather(tls: ssl.SSLContext | None = None) -> Iterator[WeatherServer]:
    server = WeatherServer()
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


MCP_SERVER = '''
import asyncio, os, sys
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("desk")

@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)

@server.tool()
async def sleep(seconds: float) -> str:
    """Sleep."""
    await asyncio.sleep(seconds)
    return "slept"

@server.tool()
def fail() -> str:
    """Fail."""
    raise ToolError("no luck")

@server.tool()
def crash() -> str:
    """End the process."""
    os._exit(3)

@server.tool()
def big(size: int) -> str:
    """Much to read."""
    return "x" * size

@server.tool()
def secret() -> str:
    """What the environment holds."""
    return os.environ.get("DESK_TOKEN", "nothing") + os.environ.get("HIDDEN", "")

if len(sys.argv) > 1:
    server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
else:
    server.run("stdio")
'''


def desk(**more: Any) -> ToolServerConfig:
    """An MCP server over standard streams."""
    return ToolServerConfig(**{"name": "desk", "command": (sys.executable, "-c", MCP_SERVER), **more})
