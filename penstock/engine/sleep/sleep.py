"""Putting an engine to sleep and waking it: its process stays, its memory is free for others.

On CUDA the weights move to host memory and back, on every rank; the KV cache is dropped. On CPU, where the weights are
in host memory already, the whole engine is dropped with its ranks and loaded again on waking, when the checkpoint is in
the page cache. Either way caches and counters start anew.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.engine.adapters.spec import AdapterSpec
from penstock.engine.backends.select import pick_device
from penstock.engine.config import EngineConfig
from penstock.engine.core import Engine
from penstock.engine.kv.persistence import SLEEP_S
from penstock.engine.models.families import read_config
from penstock.engine.request import EngineInfo, EngineLoad, Request, StepOutput
from penstock.engine.sleep.offload import OffloadedEngine, offload
from penstock.engine.startup.part import open_weights
from penstock.errors import ReplicaLost


@dataclass(slots=True)
class SleepingEngine:
    """In place of an engine that sleeps: it has a description, and does nothing."""

    info: EngineInfo
    offloaded: OffloadedEngine | None = None
    specs: tuple[AdapterSpec, ...] | None = None
    """The adapters it had; None: those of its configuration."""

    adapters = None
    exchange = None
    has_work = False

    def submit(self, request: Request) -> None:
        raise ReplicaLost(f"{self.info.model} is asleep and was given a request")

    def abort(self, request_id: str) -> None:
        """There is nothing to stop."""

    def unload_adapter(self, name: str) -> None:
        raise ReplicaLost(f"{self.info.model} is asleep and was told to unload an adapter")

    def step(self) -> StepOutput | None:
        return None

    def load_snapshot(self) -> EngineLoad:
        return EngineLoad()


class EngineSleep:
    """Puts one engine to sleep and wakes it."""

    def __init__(self, config: EngineConfig, load: Callable[[EngineConfig], Engine]) -> None:
        self._config = config
        self._load = load

    def not_loaded(self) -> SleepingEngine:
        """An engine that has not been loaded yet, described from its checkpoint."""
        config = self._config
        model = read_config(open_weights(config, None).config)
        window = min(config.max_model_len or model.max_positions, model.max_positions)
        name = config.name or Path(config.model).name
        device = str(pick_device(config.device))
        return SleepingEngine(
            EngineInfo(name, "", window, model.vocab_size, config.block_size, 0, 0, device, config.dtype)
        )

    def sleep(self, engine: Engine) -> SleepingEngine:
        """`engine` must have no work, and must not be used afterwards."""
        if engine.runner.backend.offloads:
            return SleepingEngine(engine.info, offloaded=offload(engine))
        specs = None
        if engine.adapters is not None:
            specs = tuple(AdapterSpec(s.name, s.source, s.pinned, s.owner) for s in engine.adapters.statuses())
        engine.close(SLEEP_S)
        return SleepingEngine(engine.info, specs=specs)

    def collect(self) -> None:
        """Return the memory of an engine that was put to sleep to the system, once nothing refers to it."""
        gc.collect()  # its parts refer to each other
        if sys.platform == "linux":
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
            if trim is not None:
                trim(0)  # glibc keeps what is free for itself otherwise

    def wake(self, sleeping: SleepingEngine) -> Engine:
        """The engine again; the checkpoint it is loaded from must still be there."""
        if sleeping.offloaded is not None:
            return sleeping.offloaded.restore()
        config = self._config
        if sleeping.specs is not None:
            config = dataclasses.replace(config, adapters=sleeping.specs)
        return self._load(config)
