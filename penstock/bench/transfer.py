"""How fast KV blocks go from one engine process to another, from cache to cache.

One engine is a process of its own, the other runs here behind its real server. The prompt is computed once; then this
engine drops it and asks again; the other one still has it, so only the transfer is measured.
"""

from __future__ import annotations

import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from penstock.bench.engine import BenchError
from penstock.engine.config import EngineConfig, KVDType
from penstock.engine.request import Handover, Request, SamplingParams
from penstock.engine_host.server import EngineServer
from penstock.interpreter import module
from penstock.protocol.codec import decode_from_engine, encode
from penstock.protocol.messages import Hello, Ready, Step, Submit, ToEngine
from penstock.protocol.transport import Listener
from penstock.sources.resolve import resolve

if TYPE_CHECKING:
    from penstock.engine.core import Engine

ANSWER_S = 600.0
REPEAT = 5


@dataclass(frozen=True, slots=True)
class Transfer:
    """Of one prompt's blocks; the median of several times."""

    blocks: int
    bytes: int
    seconds: float
    computing_s: float
    """Seconds of a handover whose blocks had to be computed first."""

    @property
    def bytes_per_s(self) -> float:
        return self.bytes / self.seconds


class _Client:
    """A gateway with one request at a time."""

    def __init__(self, endpoint: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)
        self._send(Hello("bench"))
        while not isinstance(self._receive(), Ready):
            continue

    def ask(self, request: Request) -> None:
        """Wait until its answer is complete."""
        self._send(Submit(request))
        while True:
            message = self._receive()
            for delta in message.output.deltas if isinstance(message, Step) else ():
                if delta.error is not None:
                    raise BenchError(f"the benchmark's request failed: {delta.error}")
                if delta.finish_reason is not None:
                    return

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def _send(self, message: ToEngine) -> None:
        self._socket.send(encode(message))

    def _receive(self) -> object:
        if not self._socket.poll(int(ANSWER_S * 1000)):
            raise BenchError(f"an engine said nothing for {ANSWER_S:.0f} s")
        return decode_from_engine(self._socket.recv())


def measure(model: str, tokens: int, devices: tuple[str, ...] = (), kv_dtype: KVDType = "auto") -> Transfer:
    """`devices`: of the engine that computes and of the one that receives."""
    from penstock.engine.core import Engine

    here = devices[1 % len(devices)] if devices else "auto"
    path = str(resolve(model))
    blocks = 2 * (tokens // 16 + 2)
    window = tokens + 16
    engine = Engine.load(
        EngineConfig(path, device=here, kv_dtype=kv_dtype, max_model_len=window, num_blocks=blocks, role="decode")
    )
    there = devices[0] if devices else "auto"
    with _other(path, there, kv_dtype, window, blocks) as endpoint, _served(engine) as own:
        return _measure(engine, own, Handover(endpoint, least_tokens=1, wait_s=60.0), tokens)


def _measure(engine: Engine, endpoint: str, source: Handover, tokens: int) -> Transfer:
    client = _Client(endpoint)
    try:
        prompt = [(7 * index * index + index) % engine.info.vocab_size for index in range(tokens)]
        assert engine.exchange is not None
        counts, times = engine.exchange.counts, list[float]()
        for attempt in range(REPEAT + 1):
            params = SamplingParams(max_tokens=1, temperature=0.0)
            before, moved = counts.seconds, counts.bytes_in
            client.ask(Request(f"r{attempt}", prompt, params, handover=source))
            times.append(counts.seconds - before)
            if counts.handovers != attempt + 1:
                raise BenchError("a prompt was not handed over; see the log")
            time.sleep(0.05)  # the engine's thread is idle now, and stays so
            engine.scheduler.allocator.pool.forget_all()
        moved = counts.bytes_in - moved
    finally:
        client.close()
    return Transfer(moved // engine.exchange.blocks.piece_bytes, moved, statistics.median(times[1:]), times[0])


@contextmanager
def _served(engine: Engine) -> Iterator[str]:
    with Listener("tcp://127.0.0.1:*") as listener:
        server = EngineServer(engine, listener)
        thread = threading.Thread(target=server.run, name="engine")
        thread.start()
        try:
            yield listener.endpoint
        finally:
            server.stop()
            thread.join()


@contextmanager
def _other(path: str, device: str, kv_dtype: KVDType, max_model_len: int, blocks: int) -> Iterator[str]:
    """`penstock engine --role prefill`; it listens before it has loaded its model."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        endpoint = f"ipc://{folder}/engine"
        options = {"kv_dtype": kv_dtype, "max_model_len": max_model_len, "num_blocks": blocks}
        command = [*module("penstock"), "engine", path, "--endpoint", endpoint, "--role", "prefill"]
        command += ["--device", device, *(f"--set=models.*.{key}={value}" for key, value in options.items())]
        with Path(folder, "log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            _Client(endpoint).close()
            yield endpoint
        finally:
            process.terminate()
            process.wait()
