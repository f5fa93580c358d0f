"""The life of an engine process: what is checked before loading, what is reported, how a signal ends it."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.engine.encoder.config import EncoderEngineConfig
from penstock.engine.request import EngineInfo
from penstock.engine_host.process import EngineProcess
from penstock.errors import ConfigError
from penstock.protocol.transport import Listener


@pytest.fixture
def endpoint() -> Iterator[str]:
    # Not tmp_path: its names are too long for a socket.
    with tempfile.TemporaryDirectory(prefix="ps-") as name:
        yield f"ipc://{name}/engine"


@pytest.fixture
def handlers() -> Iterator[None]:
    """Signal handlers as they were."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def test_an_endpoint_in_use_is_found_before_anything_is_loaded(endpoint: str) -> None:
    def find() -> EncoderEngineConfig:
        raise AssertionError("nothing may be loaded")

    @contextmanager
    def serving(info: EngineInfo, where: str) -> Iterator[None]:
        yield

    process = EngineProcess(endpoint, None, 1.0, progress=lambda phase, fraction: None, serving=serving)
    with Listener(endpoint), pytest.raises(ConfigError, match="another engine listens here"):
        process.run_encoder(find, watchdog_s=60.0)


def test_progress_and_readiness_are_reported_and_a_signal_drains(
    encoder_model: Path, endpoint: str, handlers: None
) -> None:
    phases: list[str] = []
    told: list[str] = []

    @contextmanager
    def serving(info: EngineInfo, where: str) -> Iterator[None]:
        told.append(f"{info.model} is ready")
        # Delivered on the main thread, while the server waits for messages.
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        yield
        told.append("stopped")

    process = EngineProcess(endpoint, None, 1.0, progress=lambda phase, _: phases.append(phase), serving=serving)
    config = EncoderEngineConfig(str(encoder_model), name="minilm", threads=1)
    assert process.run_encoder(lambda: config, watchdog_s=60.0) == 0
    assert told == ["minilm is ready", "stopped"]
    assert phases[0] == "import" and len(set(phases)) > 1
