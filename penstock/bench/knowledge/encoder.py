"""The encoder as the gateway uses it: an engine in a process of its own, asked over ZeroMQ."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from penstock.backends.embedder import Embedder
from penstock.backends.encoder import EncoderBackend
from penstock.gateway.rag.library import EncoderEmbedder
from penstock.interpreter import module


class MeasuredEmbedder(EncoderEmbedder):
    """Knows the process that computes for it."""

    def __init__(self, encoder: Embedder, pid: int) -> None:
        super().__init__(encoder)
        self.pid = pid


@asynccontextmanager
async def encoder(name: str = "minilm", weights: str = "auto") -> AsyncIterator[MeasuredEmbedder]:
    """The encoder called `name`, in the given form."""
    with tempfile.TemporaryDirectory(prefix="ps-") as folder:
        endpoint, config = f"ipc://{folder}/e", _written(Path(folder), name, weights)
        command = (*module("penstock"), "engine", name, "--config", config, "--endpoint", endpoint)
        process = await asyncio.create_subprocess_exec(*command, "--log-level", "warning")
        embedder = Embedder(name, name, EncoderBackend(endpoint), wait_s=300)
        try:
            yield MeasuredEmbedder(embedder, process.pid)
        finally:
            await embedder.close()
            process.terminate()
            await process.wait()


def _written(folder: Path, name: str, weights: str) -> str:
    """A configuration with this encoder."""
    file = folder / "config.yaml"
    file.write_text(f"encoders: [{{source: {name}, name: {name}, weights: {weights}}}]\n", encoding="utf-8")
    return str(file)
