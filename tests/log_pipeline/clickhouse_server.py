"""ClickHouse as a server that can be killed: its real engine (chdb, which has no port of its own) behind HTTP.

    PYTHON-OF-THE-PART -m tests.log_pipeline.clickhouse_server PORT FOLDER

It understands what `clickhouse_connect` sends: a query, or an insert in the Native format, with settings as parameters.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from tests import parts
from tests.ports import free_port

NOT_SETTINGS = {
    "query", "database", "session_id", "client_protocol_version", "compress", "decompress", "wait_end_of_query",
    "query_id", "enable_http_compression", "send_progress_in_http_headers", "http_headers_progress_interval_ms",
    "session_timeout", "session_check", "role",
}  # fmt: skip

INSERT = re.compile(rb"\s*INSERT INTO [^\n]*\s+FORMAT Native(?=\n)", re.I)


def main(port: int, folder: str) -> None:
    import chdb

    def answer(query: str, settings: dict[str, str], data: bytes) -> bytes:
        connection = chdb.connect(folder)  # settings hold for a connection
        try:
            for name, value in settings.items():
                connection.query(f"SET {name} = '{value}'")
            if data:
                with tempfile.NamedTemporaryFile(suffix=".native") as file:
                    file.write(data)
                    file.flush()
                    connection.query(re.sub(r"FORMAT Native\s*$", f"FROM INFILE '{file.name}' FORMAT Native", query))
                return b""
            shape = re.search(r"\sFORMAT\s+(\w+)\s*$", query)
            text = query[: shape.start()] if shape else query
            return bytes(connection.query(text, shape[1] if shape else "TabSeparated").bytes() or b"")
        finally:
            connection.close()

    keep = chdb.connect(folder)  # the engine lives as long as one connection

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._reply(200, b"Ok.\n")

        def do_POST(self) -> None:
            given = dict(parse_qsl(urlsplit(self.path).query))
            body = self._body()
            query, data = (given["query"], body) if "query" in given else (body.decode("utf-8", "replace"), b"")
            if insert := INSERT.match(body):  # followed by the data
                query, data = insert[0].decode(), body[insert.end() :].lstrip(b"\n")
            settings = {name: value for name, value in given.items() if name not in NOT_SETTINGS}
            try:
                self._reply(200, answer(query, settings, data))
            except Exception as error:
                self._reply(500, str(error).encode())

        def _body(self) -> bytes:
            if self.headers.get("transfer-encoding") == "chunked":
                found = b""
                while size := int(self.rfile.readline(), 16):
                    found += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
                return found
            return self.rfile.read(int(self.headers.get("content-length", 0)))

        def _reply(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.send_header("x-clickhouse-timezone", "UTC")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            return

    print("ready", keep is not None, flush=True)
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


class ClickHouseServer:
    """Starts on the same port and data every time."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"clickhouse://127.0.0.1:{self.port}/default?compress=false"

    def start(self) -> None:
        self._process = subprocess.Popen(
            [parts.python("chdb"), "-m", "tests.log_pipeline.clickhouse_server", str(self.port), str(self.folder)],
            cwd=parts.ROOT, env={**os.environ, "PYTHONPATH": str(parts.ROOT), "TZ": "UTC"},
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        deadline = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/ping", timeout=5).read()
                return
            except OSError:
                assert self._process.poll() is None and time.monotonic() < deadline, "it does not start"
                time.sleep(0.1)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextmanager
def clickhouse_server(folder: Path) -> Iterator[ClickHouseServer]:
    server = ClickHouseServer(folder)
    try:
        server.start()
        yield server
    finally:
        server.kill()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
