"""Putting an engine to sleep and waking it: its process stays, its memory is free for others.

On CUDA the weights move to host memory and come back from there; the KV cache is forgotten. On CPU, where the
weights are in host memory already, and with several ranks, the whole engine is let go and loaded again when it is
wanted: the checkpoint is in the page cache then. Either way what it has cached and counted starts anew.
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
from penstock.engine.config import EngineConfig
from penstock.engine.core import Engine
from penstock.engine.models.model_config import ModelConfig
from penstock.engine.request import EngineInfo, Load, Request, StepOutput
from penstock.engine.sleep.offload import Parked, park
from penstock.engine.startup.device import pick_device
from penstock.engine.startup.part import open_weights
from penstock.errors import ReplicaLost


@dataclass(slots=True)
class Dormant:
    """What stands in for an engine that sleeps: it is described, and does nothing."""

    info: EngineInfo
    parked: Parked | None = None
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

    def load_snapshot(self) -> Load:
        return Load()


class Slumber:
    """Sends one engine to sleep and brings it back."""

    def __init__(self, config: EngineConfig, load: Callable[[EngineConfig], Engine]) -> None:
        self._config = config
        self._load = load

    def unborn(self) -> Dormant:
        """An engine that has not been loaded yet, as far as its checkpoint tells what it will be."""
        config = self._config
        model = ModelConfig.from_hf(open_weights(config, None).config)
        window = min(config.max_model_len or model.max_positions, model.max_positions)
        name = config.name or Path(config.model).name
        device = str(pick_device(config.device))
        return Dormant(EngineInfo(name, "", window, model.vocab_size, config.block_size, 0, 0, device, config.dtype))

    def sleep(self, engine: Engine) -> Dormant:
        """`engine` must have no work, and must not be used afterwards."""
        if engine.runner.kv.device.type == "cuda" and engine.ranks is None:
            return Dormant(engine.info, parked=park(engine))
        specs = None
        if engine.adapters is not None:
            specs = tuple(AdapterSpec(s.name, s.source, s.pinned) for s in engine.adapters.statuses())
        engine.close()
        return Dormant(engine.info, specs=specs)

    def collect(self) -> None:
        """Once nobody refers to an engine that was put to sleep: give the memory it left to the system."""
        gc.collect()  # its parts refer to each other
        if sys.platform == "linux":
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
            if trim is not None:
                trim(0)  # glibc keeps what is free for itself otherwise

    def wake(self, dormant: Dormant) -> Engine:
        """The engine again; whatever it is loaded from must still be there."""
        if dormant.parked is not None:
            return dormant.parked.restore()
        config = self._config
        if dormant.specs is not None:
            config = dataclasses.replace(config, adapters=dormant.specs)
        return self._load(config)
