"""The server's encoder as the gateway has it: an engine in a process of its own, asked over ZeroMQ."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from penstock.backends.embedder import Embedder
from penstock.backends.encoder import EncoderBackend
from penstock.gateway.knowledge import EncoderEmbedder


@asynccontextmanager
async def encoder(name: str = "minilm") -> AsyncIterator[EncoderEmbedder]:
    with tempfile.TemporaryDirectory(prefix="ps-") as folder:
        endpoint = f"ipc://{folder}/e"
        command = (sys.executable, "-m", "penstock", "engine", name, "--endpoint", endpoint, "--log-level", "warning")
        process = await asyncio.create_subprocess_exec(*command)
        embedder = Embedder(name, name, EncoderBackend(endpoint), wait_s=300)
        try:
            yield EncoderEmbedder(embedder)
        finally:
            await embedder.close()
            process.terminate()
            await process.wait()
