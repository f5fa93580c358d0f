"""One server for all these tests: the real gateway on a real port over the real default model and the real encoder, all
on threads of this process, so that it is up in a few seconds; and the official SDK as its client."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from penstock.backends.embedder import Embedder
from penstock.backends.encoder import EncoderBackend
from penstock.config.encoders import EncoderConfig
from penstock.config.routing import AdmissionConfig
from penstock.engine.config import EngineConfig
from penstock.gateway.process.main import serve
from penstock.gateway.process.settings import GatewaySettings, ModelSettings
from penstock.routing.encoders import Encoders
from penstock.routing.registry import ModelRegistry, ServedModel
from penstock.testing.in_process_backend import InProcessBackend
from penstock.text import load_text
from tests.ports import free_port

MODEL, ENCODER = "smollm2-135m", "minilm"
WINDOW = 1024


@pytest.fixture(scope="package")
def url(default_model: Path, encoder_endpoint: str) -> Iterator[str]:
    port, up = free_port(), threading.Event()
    failed: list[BaseException] = []
    stop: list[Callable[[], None]] = []
    config = EngineConfig(
        str(default_model), name=MODEL, max_model_len=WINDOW, max_running=16, kv_memory=2**27, threads=1
    )
    text = load_text(default_model)

    async def main() -> None:
        end, loop = asyncio.Event(), asyncio.get_running_loop()
        stop.append(lambda: loop.call_soon_threadsafe(end.set))
        backend = await asyncio.to_thread(InProcessBackend.load_engine, config)
        encoder = Embedder(ENCODER, ENCODER, EncoderBackend(encoder_endpoint), wait_s=120)
        registry = ModelRegistry([ServedModel(MODEL, text, backend, aliases=("default",))], ())
        patient = AdmissionConfig(wait_s=120.0, shed_from=1.0)
        settings = GatewaySettings(
            port=port, models=(ModelSettings(MODEL, ""),), drain_s=0.2, time_limit_s=None, admission=patient
        )
        encoders = Encoders([encoder], [EncoderConfig(name=ENCODER)])
        await serve(settings, registry, end, lambda _: up.set(), encoders=encoders)

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            failed.append(error)
        finally:
            up.set()

    thread = threading.Thread(target=run, name="compat server", daemon=True)
    thread.start()
    up.wait(300)
    if failed:
        raise failed[0]
    yield f"http://127.0.0.1:{port}"
    stop[0]()
    thread.join(30)


@pytest.fixture(scope="package")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=180, max_retries=0) as client:
        yield client


@pytest.fixture(scope="package")
def http(url: str) -> Iterator[httpx.Client]:
    """For what the SDK would refuse to send, and for paths it does not know."""
    with httpx.Client(base_url=url, timeout=180) as client:
        yield client


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]
