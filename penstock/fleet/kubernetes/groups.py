"""The engines of a model as StatefulSets: one for all replicas that are alike.

Replicas differ by pool, role, grid, and by whether they may run on spot capacity. A grid over several machines has one
StatefulSet per machine of its placement: pod N of each belongs to replica N, so that no pod needs a template of its own
and no operator is needed. The head's pods are the engines; the others run `penstock join`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from penstock.config.autoscale import AutoscaleConfig
from penstock.config.encoders import EncoderConfig
from penstock.config.models import ModelConfig
from penstock.engine.config import LOCAL, Role
from penstock.fleet.kubernetes.names import dns_label
from penstock.fleet.kubernetes.options import DeviceKind
from penstock.sources.resolve import ALIASES


@dataclass(frozen=True, slots=True)
class Limits:
    """Between which numbers a StatefulSet is scaled, and which share of the model's queue is its."""

    least: int
    most: int
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class EngineGroup:
    """Engines that are alike; one StatefulSet."""

    model: ModelConfig | EncoderConfig
    suffix: str
    """What tells it from other groups of the model."""
    replicas: int
    device: str
    """cpu or cuda."""
    tensor: int = 1
    pipeline: int = 1
    ranks: int = 1
    """Of each pod; a GPU each, unless `gpus` is fewer."""
    gpus: int = 0
    role: Role = "both"
    pool: str = ""
    machine: str = LOCAL
    """Of a placement: LOCAL is the head."""
    spot: bool = False
    limits: Limits | None = None
    """Set when it is scaled automatically."""

    @property
    def label(self) -> str:
        return dns_label(self.model.name) + (f"-{self.suffix}" if self.suffix else "")

    @property
    def is_head(self) -> bool:
        return self.machine == LOCAL

    @property
    def is_encoder(self) -> bool:
        return isinstance(self.model, EncoderConfig)


def device_of(model: ModelConfig | EncoderConfig, asked: DeviceKind) -> str:
    """cpu or cuda, for a pod. `auto` means cuda for a model with several devices or from a hub, unless `asked`."""
    named = {device.partition(":")[0] for device in (model.device, *_devices(model)) if device != "auto"}
    if named:
        return sorted(named)[-1]
    if asked != "auto":
        return asked
    if isinstance(model, EncoderConfig) or model.threads is not None:
        return "cpu"
    ranks = max(math.prod(model.grid(replica)) for replica in range(model.replicas))
    small = model.source in ALIASES or model.source.startswith("pypi:")
    return "cuda" if ranks > 1 or not small else "cpu"


def _devices(model: ModelConfig | EncoderConfig) -> tuple[str, ...]:
    if isinstance(model, EncoderConfig):
        return ()
    pools = (device for pool in model.pools for device in (pool.device or "auto", *pool.replica_devices))
    return (*model.replica_devices, *model.devices, *pools)


def encoder_group(encoder: EncoderConfig, device: str) -> EngineGroup:
    return EngineGroup(encoder, "", 1, device, gpus=1 if device == "cuda" else 0)


def model_groups(model: ModelConfig, device: str, *, scaled: bool) -> Iterator[EngineGroup]:
    """`scaled`: something in the cluster changes the number of replicas."""
    if model.pools:
        for pool in filter(lambda pool: pool.replicas, model.pools):
            alone = replace(model.in_pool(pool.name), pools=(), replicas=pool.replicas)
            for group in model_groups(alone, device, scaled=False):
                suffix = "-".join(filter(None, (dns_label(pool.name), group.suffix)))
                yield replace(group, suffix=suffix, pool=pool.name)
        return
    if model.placement is not None:
        yield from _spread(model, device)
        return
    if scaled and model.autoscale is not None:
        yield from _scaled(model, model.autoscale, device)
        return
    alike = Counter((model.role(index), model.grid(index)) for index in range(model.replicas))
    for (role, (tensor, pipeline)), count in alike.items():
        by_role = role if len({role for role, _ in alike}) > 1 else ""
        by_grid = f"{tensor}x{pipeline}" if len({grid for _, grid in alike}) > 1 else ""
        ranks = tensor * pipeline
        gpus = _gpus(model, device, ranks)
        yield EngineGroup(
            model, "-".join(filter(None, (by_role, by_grid))), count, device, tensor, pipeline, ranks, gpus, role
        )


def _scaled(model: ModelConfig, scale: AutoscaleConfig, device: str) -> Iterator[EngineGroup]:
    """One StatefulSet, or two when some replicas may run on spot capacity."""
    tensor, pipeline = model.grid(0)
    ranks = tensor * pipeline
    whole = EngineGroup(
        model, "", model.first_replicas, device, tensor, pipeline, ranks, _gpus(model, device, ranks),
        limits=Limits(scale.min, scale.max),
    )  # fmt: skip
    above = max(scale.max - scale.spot_base, 0)
    spot = math.floor(above * scale.spot)
    if not spot:
        yield whole
        return
    share = spot / scale.max
    least = min(math.floor(max(scale.min - scale.spot_base, 0) * scale.spot), spot)
    yield replace(
        whole,
        replicas=max(min(whole.replicas - least, scale.max - spot), 0),
        limits=Limits(scale.min - least, scale.max - spot, 1 - share),
    )
    yield replace(whole, suffix="spot", replicas=least, spot=True, limits=Limits(least, spot, share))


def _spread(model: ModelConfig, device: str) -> Iterator[EngineGroup]:
    assert model.placement is not None
    tensor, pipeline = model.tensor_parallel, model.pipeline_parallel
    for machine, ranks in Counter(model.placement.ranks(tensor, pipeline)).items():
        gpus = ranks if device == "cuda" else 0
        suffix = "" if machine == LOCAL else dns_label(machine)
        yield EngineGroup(model, suffix, model.replicas, device, tensor, pipeline, ranks, gpus, machine=machine)


def _gpus(model: ModelConfig, device: str, ranks: int) -> int:
    if device != "cuda":
        return 0
    if model.resources is not None and model.resources.gpus is not None:
        return int(model.resources.gpus)
    return len(set(model.devices)) or ranks
