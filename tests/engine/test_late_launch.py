"""Launches are put off by an estimate; where it is wrong, nothing may wait for it.

A device is simulated: steps take modelled time on it, one after the other, and the host's clock goes on only while it
waits or launches. The engine, its scheduler and its estimates are the real ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.engine.batch import Batch
from penstock.engine.config import EngineConfig
from penstock.engine.core import Engine
from penstock.engine.kv.allocator import BlockAllocator
from penstock.engine.kv.pool import BlockPool
from penstock.engine.pace import Pace
from penstock.engine.request import EngineInfo, Request, SamplingParams
from penstock.engine.runner.runner import Runner
from penstock.engine.runner.step import PendingStep
from penstock.engine.scheduler import Scheduler
from penstock.engine_host.server import LOOK_S

READ_S, TOKEN_S, LAUNCH_S = 0.004, 30e-6, 0.0005
BUDGET = 8448


@dataclass
class Device:
    """Of an 8B model on a large GPU, about."""

    now: float = 0.0
    free_at: float = 0.0
    idle_s: float = 0.0
    """How long it had nothing to do between two steps of one prompt."""

    def run(self, batch: Batch) -> PendingStep:
        self.now += LAUNCH_S
        began = max(self.now, self.free_at)
        if batch.chunks[0].start:
            self.idle_s += began - self.free_at
        self.free_at = began + READ_S + TOKEN_S * (batch.num_tokens - batch.num_decodes)
        step = PendingStep(batch, cast(Any, None), [chunk for chunk in batch.chunks if chunk.samples])
        step.tokens = cast(Any, SimpleNamespace(tolist=lambda: [7] * len(step.chunks)))
        step.began, step.event = _Point(self, began), _Point(self, self.free_at)
        return step


@dataclass
class _Point:
    device: Device
    at: float = field(default=0.0)

    def synchronize(self) -> None:
        self.device.now = max(self.device.now, self.at)

    def query(self) -> bool:
        return self.device.now >= self.at

    def elapsed_time(self, end_event: Any) -> float:
        return 1e3 * (float(end_event.at) - self.at)


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def engine(device: Device) -> Engine:
    scheduler = Scheduler(
        BlockAllocator(BlockPool(4096), 16),
        max_running=64,
        token_budget=BUDGET,
        max_model_len=60_000,
        pace=Pace(0.03, yields_s=0.25),
    )
    info = EngineInfo("m", "i", 60_000, 100, 16, 4096, 64, "cuda:0", "bfloat16")
    runner = SimpleNamespace(run=device.run, backend=SimpleNamespace(memory=None))
    return Engine(
        EngineConfig(model="m"), info, scheduler, cast(Runner, runner), overlap=True, clock=lambda: device.now
    )


def first_token(engine: Engine, device: Device, tokens: int, outputs: int = 4) -> float:
    """Seconds until the first token of a lone prompt, as the process that hosts an engine runs it."""
    begun, first = device.now, 0.0
    request = Request(f"{tokens}-{begun}", [1] * tokens, SamplingParams(max_tokens=outputs), cache_salt=str(begun))
    engine.submit(request)
    while engine.has_work:
        while engine.spare_s() >= LOOK_S:
            device.now += LOOK_S
        output = engine.step()
        if output is not None and not first:
            first = device.now - begun
    device.now += 0.05
    return first


@pytest.mark.parametrize("outputs", [1, 4])
@pytest.mark.parametrize("tokens", [128, 1000, 8000])
def test_a_prompt_that_is_longer_than_those_before_is_not_late(
    engine: Engine, device: Device, tokens: int, outputs: int
) -> None:
    for _ in range(3):
        first_token(engine, device, 16)
    took = first_token(engine, device, tokens, outputs)
    assert took < READ_S + TOKEN_S * tokens + 2 * LAUNCH_S + LOOK_S


def test_the_first_long_prompt_takes_as_long_as_the_second(engine: Engine, device: Device) -> None:
    for _ in range(3):
        first_token(engine, device, 16)
    device.idle_s = 0.0
    first = first_token(engine, device, 30_000)
    assert device.idle_s < 4 * (LOOK_S + LAUNCH_S)
    assert first < first_token(engine, device, 30_000) + 4 * (LOOK_S + LAUNCH_S)


def test_the_estimate_of_a_prompt_step_has_the_time_of_reading_weights(engine: Engine, device: Device) -> None:
    for _ in range(3):
        first_token(engine, device, 16)
    assert engine.scheduler.pace.expected(0, [(0, 1024)]) == pytest.approx(READ_S + TOKEN_S * 1024, rel=0.2)
