"""A person's way through it: ingest a folder, ask, get a cited answer; the real model, encoder and CLI."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import MODEL, Server

LEAVE = """# Leave

## Parental leave

Parents receive twelve weeks of paid leave after the birth of a child. Apply four weeks before.

## Sick leave

Call before nine in the morning. A doctor's note is needed from the third day on.
"""
HOURS = "The office opens at eight in the morning and closes at six in the evening.\n"


def ingest(server: Server, *arguments: str | Path) -> str:
    command = [sys.executable, "-m", "penstock", "ingest", *map(str, arguments), "--url", server.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, "COLUMNS": "200"})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_folder_becomes_answers_with_citations(server: Server, tmp_path: Path) -> None:
    folder = tmp_path / "handbook"
    folder.mkdir()
    (folder / "leave.md").write_text(LEAVE)
    (folder / "hours.txt").write_text(HOURS)
    (folder / ".hidden.md").write_text("secret")
    try:
        assert "2 documents in 3 chunks (2 sent, 2 new or changed" in ingest(server, folder)
        asked = {
            "model": MODEL,
            "max_tokens": 48,
            "temperature": 0,
            "messages": [{"role": "user", "content": "When does the office open?"}],
            "rag": {"collection": "handbook"},
        }
        reply = httpx.post(f"{server.url}/v1/chat/completions", json=asked, timeout=300).json()
        message = reply["choices"][0]["message"]
        assert "eight" in message["content"]
        citation = message["annotations"][0]
        span = citation["url_citation"]
        assert message["content"][span["start_index"] : span["end_index"]] == f"[{citation['n']}]"
        chunk = httpx.get(f"{server.url}/v1/collections/handbook/chunks/{citation['chunk_id']}").json()
        assert chunk["text"] == HOURS.strip() and citation["document"] == "hours.txt"
        assert reply["rag"]["sources"][0]["chunk_id"] == citation["chunk_id"]

        (folder / "leave.md").write_text(LEAVE.replace("twelve", "twenty"))
        (folder / "hours.txt").unlink()
        assert "1 documents in 2 chunks (1 sent, 1 new or changed" in ingest(server, folder, "--prune")
        found = httpx.post(f"{server.url}/v1/collections/handbook/search", json={"query": "weeks for parents"}).json()
        assert "twenty weeks" in found["data"][0]["text"]
    finally:
        httpx.delete(f"{server.url}/v1/collections/handbook")
