"""R-API-10: a model comes and goes while the server runs, with other clients on it all the time."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import MODEL, Server

SMALL = {"max_model_len": 256, "kv_memory": "16MiB", "aliases": ["deux"]}


def ask(server: Server, model: str) -> httpx.Response:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"model": model, "messages": messages, "max_tokens": 12, "temperature": 0}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=180)


def load(server: Server, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/admin/models", json=body, timeout=300)


@pytest.mark.slow
def test_a_model_is_loaded_used_and_unloaded(server: Server, default_model: Path) -> None:
    states: set[str] = set()
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.1):
            models = httpx.get(f"{server.url}/v1/admin/models").json()["data"]
            states.update(model["state"] for model in models if model["id"] == "second")

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        loaded = load(server, source=str(default_model), name="second", options=SMALL)
    finally:
        over.set()
        watcher.join()
    assert loaded.status_code == 200, loaded.text
    assert loaded.json()["id"] == "second" and loaded.json()["context_window"] == 256
    assert "loading" in states, "its progress could be seen"
    for name in ("second", "deux", MODEL):
        reply = ask(server, name)
        assert reply.status_code == 200 and "Paris" in reply.json()["choices"][0]["message"]["content"]
    assert len(server.children("second")) == 1
    taken = load(server, source=str(default_model), name="deux")
    assert taken.status_code == 400 and taken.json()["error"]["code"] == "name_taken"
    gone = httpx.delete(f"{server.url}/v1/admin/models/second", timeout=180)
    assert gone.json() == {"id": "second", "object": "model", "deleted": True}
    assert ask(server, "deux").status_code == 404 and ask(server, MODEL).status_code == 200
    assert not server.children("second")


def test_what_cannot_be_loaded_or_unloaded_says_why_and_hurts_nobody(server: Server, default_model: Path) -> None:
    source = str(default_model)
    for body, word in (
        ({"source": "/nowhere"}, "neither an alias nor a path"),
        ({"source": source, "name": "odd", "options": {"devce": "cpu"}}, "did you mean"),
        ({"source": source, "name": "odd", "options": {"aliases": [MODEL]}}, "already taken"),
        ({"source": source, "name": "odd", "options": {"time_slice": "a"}}, "time_slice"),
    ):
        refused = load(server, **body)
        assert refused.status_code == 400 and word in refused.json()["error"]["message"], refused.text
    assert load(server, source=source, name=MODEL).json()["error"]["code"] == "name_taken"
    only = httpx.delete(f"{server.url}/v1/admin/models/{MODEL}")
    assert only.status_code == 400 and "only model" in only.json()["error"]["message"]
    assert httpx.delete(f"{server.url}/v1/admin/models/nothing").status_code == 404
    assert ask(server, MODEL).status_code == 200
