"""Adapters from an S3 prefix: a real HTTP server that speaks as much of S3 as is used."""

from __future__ import annotations

import http.server
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from penstock.errors import SourceError
from penstock.sources.model_cache import MANIFEST, Slot
from penstock.sources.object_store import fetch_files

NAMES = ("adapter_config.json", "adapter_model.safetensors")
KEYS = {
    "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    "AWS_REGION": "us-east-1",
}


class Store(http.server.ThreadingHTTPServer):
    files: dict[str, tuple[bytes, str]]
    served: list[tuple[str, int, str | None]]
    status: int | None = None
    """What every request is answered with."""
    cut = False
    """Whether bodies end early."""


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        store = self.server
        assert isinstance(store, Store)
        body, tag = store.files.get(self.path, (b"", ""))
        known, asked = self.path in store.files, self.headers.get("If-None-Match")
        status = store.status or (404 if not known else 304 if tag and asked == tag else 200)
        store.served.append((self.path, status, self.headers.get("Authorization")))
        self.send_response(status)
        if tag:
            self.send_header("ETag", tag)
        self.send_header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
        self.send_header("Content-Length", str(len(body) if status == 200 else 0))
        self.end_headers()
        if status == 200:
            with suppress(ConnectionError):  # who asked may want no more of it
                self.wfile.write(body[: len(body) // 2] if store.cut else body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    server = Store(("127.0.0.1", 0), Handler)
    server.files = {f"/bucket/a/b/{name}": (name.encode(), f'"{name}-1"') for name in NAMES}
    server.served = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    for name in (*KEYS, "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_files_are_fetched_once_and_again_when_they_change(store: Store, tmp_path: Path) -> None:
    slot = Slot(tmp_path, "x")
    folder = fetch_files("s3://bucket/a/b/", NAMES, slot)
    assert [(folder / name).read_text() for name in NAMES] == list(NAMES)
    fetch_files("s3://bucket/a/b", NAMES, slot)
    assert [status for _, status, _ in store.served] == [200, 200, 304, 304]
    store.files[f"/bucket/a/b/{NAMES[1]}"] = (b"new", '"2"')
    folder = fetch_files("s3://bucket/a/b", NAMES, slot)
    assert [(folder / name).read_text() for name in NAMES] == [NAMES[0], "new"]
    assert all(authorization is None for _, _, authorization in store.served), "no keys, no signature"


def test_a_folder_whose_files_have_not_changed_is_left_alone(store: Store, tmp_path: Path) -> None:
    """Others may be reading it."""
    slot = Slot(tmp_path, "x")
    names = (*NAMES, "tokenizer.json")
    with (fetch_files("s3://bucket/a/b", names, slot, optional=True) / NAMES[0]).open("rb") as read:
        fetch_files("s3://bucket/a/b", names, slot, optional=True)
        assert os.fstat(read.fileno()).st_nlink == 1 and not slot.partial.exists()
    store.files["/bucket/a/b/tokenizer.json"] = (b"{}", "")
    for _ in range(2):  # a store that gives no ETag
        folder = fetch_files("s3://bucket/a/b", names, slot, optional=True)
        assert sorted(file.name for file in folder.glob("[a-z]*.[js]*")) == sorted((*names, MANIFEST))
    del store.files[f"/bucket/a/b/{NAMES[1]}"]
    assert not (fetch_files("s3://bucket/a/b", names, slot, optional=True) / NAMES[1]).exists()


def test_of_a_file_that_is_too_large_only_the_beginning_is_fetched(store: Store, tmp_path: Path) -> None:
    store.files["/bucket/a/b/tokenizer.json"] = (b"x" * (5 << 20), '"1"')
    folder = fetch_files("s3://bucket/a/b", ("tokenizer.json",), Slot(tmp_path, "x"), most_bytes=1000)
    assert (folder / "tokenizer.json").stat().st_size == 1001


def test_what_is_missing_or_misspelt_is_said(store: Store, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"it has no adapter_config\.json"):
        fetch_files("s3://bucket/elsewhere", NAMES, Slot(tmp_path, "x"))
    with pytest.raises(SourceError, match="write s3://BUCKET/PREFIX"):
        fetch_files("s3://bucket", NAMES, Slot(tmp_path, "x"))


def test_requests_are_signed_where_there_are_keys(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    fetch_files("s3://bucket/a/b", NAMES, Slot(tmp_path, "x"))
    authorization = store.served[0][2] or ""
    assert authorization.startswith("AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/")


def test_an_object_that_is_cut_short_is_not_kept(store: Store, tmp_path: Path) -> None:
    store.cut = True
    with pytest.raises(SourceError, match="cannot be fetched"):
        fetch_files("s3://bucket/a/b", NAMES, Slot(tmp_path, "x"))
    assert not Slot(tmp_path, "x").complete()


def test_refused_access_says_which_variables_to_check(store: Store, tmp_path: Path) -> None:
    store.status = 403
    with pytest.raises(SourceError, match="access is refused; check the AWS_ variables"):
        fetch_files("s3://bucket/a/b", NAMES, Slot(tmp_path, "x"))


def test_a_store_that_fails_is_asked_a_few_times_and_then_given_up(store: Store, tmp_path: Path) -> None:
    store.status = 500
    with pytest.raises(SourceError, match=r"500 Internal Server Error; try again later$"):
        fetch_files("s3://bucket/a/b", NAMES, Slot(tmp_path, "x"))
    assert 1 < len(store.served) < 10


def test_no_network_is_clear_and_nobody_hangs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{unused.getsockname()[1]}")
        started = time.monotonic()
        with pytest.raises(SourceError, match=r"s3://bucket/a/b cannot be fetched: .*error sending request"):
            fetch_files("s3://bucket/a/b", NAMES, Slot(tmp_path, "x"))
        assert time.monotonic() - started < 60


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(SourceError, match="make extras EXTRAS=s3"):
        fetch_files("s3://bucket/a/b", NAMES, Slot(tmp_path, "x"))
