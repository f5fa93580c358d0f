"""Models from a hub: resumed after a cut, checked by hash, and a clear, quick error when there is no network."""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from penstock.errors import SourceError
from penstock.sources.hub import HubSource, RemoteFile, choose_files
from penstock.sources.hub_config import hub_config
from penstock.sources.resolve import resolve

WEIGHTS = os.urandom(500_000)
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"pickled",
    "README.md": b"words",
    "onnx/model.onnx": b"other",
}


class Hub(ThreadingHTTPServer):
    """A hub with one repository, and the faults a test asks for."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = dict(FILES)
        self.commit = "c0ffee" + "0" * 34
        self.cut_after: int | None = None
        """Drop the connection after this many bytes of a body."""
        self.cuts_left = 10**9
        self.ranges = True
        self.server_errors = 0
        """Bodies still to be refused with HTTP 503."""
        self.served: dict[str, bytes] = {}
        """Bodies that differ from what the listing announces."""
        self.redirect: str | None = None
        self.token: str | None = None
        self.requests: list[tuple[str, str | None, str | None]] = []
        """Path, Range, Authorization."""


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        hub = self.server
        authorization = self.headers.get("Authorization")
        hub.requests.append((self.path, self.headers.get("Range"), authorization))
        if hub.token is not None and authorization != f"Bearer {hub.token}":
            self.send_error(401)
        elif self.path.startswith("/api/models/org/name/revision/main"):
            siblings = [sibling(*item) for item in hub.files.items()]
            self.reply(json.dumps({"id": "org/name", "sha": hub.commit, "siblings": siblings}))
        elif match := re.fullmatch(r"/org/name/resolve/\w+/(.+)", self.path):
            if hub.server_errors > 0:
                hub.server_errors -= 1
                self.send_error(503)
            elif hub.redirect is not None:
                self.send_response(302)
                self.send_header("Location", f"{hub.redirect}{self.path}")
                self.end_headers()
            else:
                self.body(hub.served.get(match[1], hub.files[match[1]]))
        else:
            self.send_error(404)

    def reply(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def body(self, data: bytes) -> None:
        hub = self.server
        start = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if start and hub.ranges:
            data = data[int(start[1]) :]
            self.send_response(206)
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if hub.cut_after is not None and len(data) > hub.cut_after and hub.cuts_left > 0:
            hub.cuts_left -= 1
            self.wfile.write(data[: hub.cut_after])
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self.wfile.write(data)


def sibling(name: str, data: bytes) -> dict[str, object]:
    if len(data) > 1000:
        digest = hashlib.sha256(data).hexdigest()
        return {"rfilename": name, "size": len(data), "lfs": {"sha256": digest, "size": len(data), "pointerSize": 130}}
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    return {"rfilename": name, "size": len(data), "blobId": blob}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    # The library writes, and so resumes, whole chunks, and pauses for a second before it resumes.
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1 << 14)
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def bodies(hub: Hub, name: str) -> list[str | None]:
    return [requested for path, requested, _ in hub.requests if path.endswith(name)]


def test_only_what_an_engine_needs_is_fetched(hub: Hub) -> None:
    seen: list[tuple[str, int, int | None]] = []
    path = resolve("hf:org/name", lambda *update: seen.append(update))
    assert {file.name for file in path.iterdir()} == {
        "config.json",
        "tokenizer.json",
        "model.safetensors",
        "penstock.json",
    }
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    assert ("downloading model.safetensors", len(WEIGHTS), len(WEIGHTS)) in seen
    count = len(hub.requests)
    assert resolve("hf:org/name") == path
    assert len(hub.requests) == count, "a cached model needs no network"


def test_a_gateway_fetches_the_text_part_and_uses_a_whole_model_when_there_is_one(hub: Hub) -> None:
    text = resolve("hf:org/name", weights=False)
    assert sorted(path.name for path in text.iterdir()) == ["config.json", "penstock.json", "tokenizer.json"]
    assert resolve("hf:org/name", weights=False) == text
    whole = resolve("hf:org/name")
    assert (whole / "model.safetensors").read_bytes() == WEIGHTS
    assert resolve("hf:org/name", weights=False) == whole


def test_a_configuration_is_read_without_the_weights(hub: Hub) -> None:
    hub.files["config.json"] = b'{"hidden_size": 64}'
    assert hub_config("hf:org/name") == {"hidden_size": 64}
    assert bodies(hub, "config.json") and not bodies(hub, "model.safetensors")
    hub.files["config.json"] = b"{"
    with pytest.raises(SourceError, match=r"config.json of hf:org/name is not JSON"):
        hub_config("hf:org/name")
    del hub.files["config.json"]
    with pytest.raises(SourceError, match=r"hf:org/name has no config.json; fetch the model with `penstock pull`"):
        hub_config("hf:org/name")


def test_a_cut_connection_is_continued_where_it_stopped(hub: Hub) -> None:
    hub.cut_after = 100_000
    path = resolve("hf:org/name")
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    requested = bodies(hub, "model.safetensors")
    assert requested[0] is None
    starts = [int(str(text)[6:-1]) for text in requested[1:]]
    assert len(starts) >= 4
    assert starts == sorted(starts)
    assert starts[0] > 0


def test_a_later_attempt_continues_what_an_earlier_one_left(hub: Hub) -> None:
    class Stop(Exception):
        pass

    def interrupt(label: str, done: int, total: int | None) -> None:
        if label == "downloading model.safetensors" and done > 100_000:
            raise Stop

    with pytest.raises(Stop):
        resolve("hf:org/name", interrupt)
    hub.requests.clear()
    path = resolve("hf:org/name")
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    assert bodies(hub, "config.json") == [], "whole files are not fetched again"
    (again,) = bodies(hub, "model.safetensors")
    assert again is not None and int(again[6:-1]) > 0


def test_parts_of_another_commit_are_not_continued(hub: Hub) -> None:
    class Stop(Exception):
        pass

    def interrupt(label: str, done: int, total: int | None) -> None:
        if label == "downloading model.safetensors" and done > 100_000:
            raise Stop

    with pytest.raises(Stop):
        resolve("hf:org/name", interrupt)
    hub.commit = "decade" + "0" * 34
    hub.files["model.safetensors"] = os.urandom(500_000)
    path = resolve("hf:org/name")
    assert (path / "model.safetensors").read_bytes() == hub.files["model.safetensors"]


def test_a_server_without_ranges_starts_over(hub: Hub) -> None:
    hub.ranges = False
    hub.cut_after, hub.cuts_left = 100_000, 2
    path = resolve("hf:org/name")
    assert (path / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_bytes_that_do_not_match_the_announced_hash_are_not_kept(hub: Hub, tmp_path: Path, name: str) -> None:
    hub.served[name] = bytes(len(FILES[name]))
    with pytest.raises(SourceError, match=rf"{name} of hf:org/name arrived damaged"):
        resolve("hf:org/name")
    assert not [path for path in (tmp_path / "cache/models").iterdir() if not path.name.endswith(".partial")]
    hub.served.clear()
    assert (resolve("hf:org/name") / name).read_bytes() == FILES[name]


def test_a_file_of_another_length_than_announced_is_not_kept(hub: Hub) -> None:
    hub.served["config.json"] = b"{}"
    with pytest.raises(SourceError, match=r"config\.json of hf:org/name arrived damaged"):
        resolve("hf:org/name")


def test_server_errors_are_retried_a_few_times(hub: Hub) -> None:
    hub.server_errors = 3
    assert (resolve("hf:org/name") / "model.safetensors").read_bytes() == WEIGHTS
    hub.server_errors = 10**9
    with pytest.raises(SourceError, match="HTTP 503 for hf:org/name; try again later"):
        resolve("hf:org/name", refresh=True)
    assert len(bodies(hub, "config.json")) < 20


def test_a_hub_that_keeps_failing_is_given_up(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.sources.hub.ATTEMPTS", 2)
    hub.cut_after = 0
    with pytest.raises(SourceError, match="hf:org/name cannot be fetched"):
        resolve("hf:org/name")


def test_the_token_opens_gated_models_and_stays_with_the_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "secret"
    with pytest.raises(SourceError, match=r"HTTP 401.*HF_TOKEN"):
        resolve("hf:org/name")
    storage = Hub()
    thread = threading.Thread(target=storage.serve_forever, args=(0.02,))
    thread.start()
    try:
        hub.redirect = f"http://127.0.0.1:{storage.server_port}"
        monkeypatch.setenv("HF_TOKEN", "secret")
        assert (resolve("hf:org/name") / "model.safetensors").read_bytes() == WEIGHTS
        assert storage.requests
        assert all(authorization is None for _, _, authorization in storage.requests)
    finally:
        storage.shutdown()
        thread.join()
        storage.server_close()


def test_a_repository_that_does_not_exist(hub: Hub) -> None:
    with pytest.raises(SourceError, match=r"hf:org/other at revision 'main' does not exist"):
        resolve("hf:org/other")


def test_no_network_is_clear_and_nobody_hangs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
        monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
        started = time.monotonic()
        with pytest.raises(SourceError, match=r"no answer from .*HF_ENDPOINT.*local path"):
            resolve("hf:org/name")
        assert time.monotonic() - started < 60


def test_a_model_larger_than_the_disk_is_not_begun(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    class Disk:
        free = 1000

    monkeypatch.setattr("penstock.sources.model_cache.shutil.disk_usage", lambda _: Disk)
    with pytest.raises(SourceError, match="PENSTOCK_CACHE"):
        resolve("hf:org/name")
    assert bodies(hub, "model.safetensors") == []


def listed(*names: str) -> list[RemoteFile]:
    return [RemoteFile(name, 1, None) for name in names]


def chosen(source: HubSource, *names: str) -> list[str]:
    return [file.path for file in choose_files(listed(*names), source)]


def test_which_files_are_chosen() -> None:
    sharded = ("config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors")
    source = HubSource("org/name")
    assert chosen(source, *sharded, "consolidated.safetensors", "original/x.pth", "model.gguf") == list(sharded)
    ggufs = ("LICENSE", "config.json", "m-Q2_K.gguf", "m-Q4_K_M.gguf", "m-Q8_0.gguf", "mmproj-F16.gguf")
    assert chosen(source, *ggufs) == ["LICENSE", "m-Q4_K_M.gguf"]
    assert chosen(HubSource("org/name", choice="q8_0"), *ggufs) == ["LICENSE", "m-Q8_0.gguf"]
    assert chosen(HubSource("org/name", choice="m-Q2_K.gguf"), *ggufs) == ["LICENSE", "m-Q2_K.gguf"]
    assert chosen(source, "only.gguf") == ["only.gguf"]
    adapter = ("adapter_config.json", "adapter_model.safetensors")
    assert chosen(source, "README.md", *adapter, "training_args.bin") == list(adapter)
    with pytest.raises(SourceError, match=r"which GGUF file\?.*a-x\.gguf, b-y\.gguf"):
        chosen(source, "a-x.gguf", "b-y.gguf")
    with pytest.raises(SourceError, match="no safetensors or GGUF weights"):
        chosen(source, "config.json", "pytorch_model.bin")


def test_pickled_weights_are_fetched_for_drafters_only() -> None:
    names = listed("config.json", "pytorch_model.bin", "README.md")
    source = HubSource("org/head")
    assert [file.path for file in choose_files(names, source, pickled=True)] == ["config.json", "pytorch_model.bin"]
    with pytest.raises(SourceError, match="no safetensors or GGUF weights"):
        choose_files(names, source)
