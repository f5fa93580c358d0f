"""How the replicas of one model differ: their pool, role, grid of devices, and device.

The replicas of a model, or of each of its pools, are numbered, and roles, grids and devices are given out in turn. So
the number of replicas of each variant follows from the configuration and the number of replicas, wherever they run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from dataclasses import dataclass

from penstock.config.models import ModelConfig
from penstock.engine.config import EngineConfig

BESIDES = (
    *(
        "source",
        "draft_model",
        "adapters",
        "adapter_rank",
        "adapter_experts",
        "adapter_rows",
        "adapter_tokens",
        "adapter_vectors",
        "adapter_memory",
        "watchdog_s",
        "stream_interval_s",
        "time_slice",
    ),
    "placement",
)
"""Settings that an engine process reads besides those of `EngineConfig`."""


@dataclass(frozen=True, slots=True, order=True)
class Variant:
    """What a replica has of its own; empty: as the model has it."""

    pool: str = ""
    role: str = ""
    grid: str = ""
    """As TENSORxPIPELINE."""
    device: str = ""

    def __str__(self) -> str:
        parts = (f"pool {self.pool}" if self.pool else "", self.role, self.grid, self.device)
        return ", ".join(part for part in parts if part)

    def of(self, model: ModelConfig) -> ModelConfig:
        """The model with the settings of this variant."""
        found = model.in_pool(self.pool)
        if self.grid:
            tensor, _, pipeline = self.grid.partition("x")
            found = dataclasses.replace(found, tensor_parallel=int(tensor), pipeline_parallel=int(pipeline))
        if self.device:
            found = dataclasses.replace(found, device=self.device)
        return dataclasses.replace(found, replica_roles=(), replica_grids=(), replica_devices=())


PLAIN = Variant()


def slot(model: str, variant: Variant = PLAIN) -> str:
    """Names the replicas of one variant of a model, also to people."""
    return f"{model} ({variant})" if variant != PLAIN else model


def variant(model: ModelConfig, pool: str, number: int) -> Variant:
    """That of replica `number` of a pool, or of a model without pools."""
    found = model.in_pool(pool)
    devices, grids = found.replica_devices, found.replica_grids
    return Variant(
        pool,
        found.role(number) if found.replica_roles else "",
        grids[number % len(grids)] if grids else "",
        devices[number % len(devices)] if devices else "",
    )


def variant_at(model: ModelConfig, index: int) -> Variant:
    """That of replica `index` of the whole model: replicas are numbered through its pools."""
    return variant(model, model.pool_of(index), model.place_in_pool(index))


def variants(model: ModelConfig, pool: str, count: int) -> Counter[Variant]:
    """How many replicas there are of each variant when a pool has `count`."""
    return Counter(variant(model, pool, number) for number in range(count))


def revision(model: ModelConfig, pool: str = "") -> str:
    """Changes with every setting that an engine of the model reads, and with no other."""
    found = model.in_pool(pool)
    engine, own = ({field.name for field in dataclasses.fields(each)} for each in (EngineConfig, ModelConfig))
    names = (engine & own) | set(BESIDES)
    read = {name: getattr(found, name) for name in names}
    text = json.dumps(read, sort_keys=True, default=dataclasses.asdict)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def whole_revision(model: ModelConfig) -> str:
    """Changes with the revision of any of its pools."""
    if not model.pools:
        return revision(model)
    text = " ".join(f"{pool.name}={revision(model, pool.name)}" for pool in model.pools)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
