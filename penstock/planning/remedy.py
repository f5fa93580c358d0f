"""What would do for a deployment that does not fit: more devices, fewer bits, or another device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from penstock.errors import ConfigError
from penstock.planning.catalogue import Catalogue, load_catalogue
from penstock.planning.deployment import Deployment, possible_tensor_parallel
from penstock.planning.memory import MemoryPlan, memory_plan
from penstock.planning.numbers import WeightDType

_FEWER_BITS: tuple[WeightDType, ...] = ("fp8", "int8", "int4")


def remedy(plan: MemoryPlan, catalogue: Catalogue | None = None) -> str:
    """One sentence with the smallest changes that fit, each alone; what was tried where none does."""
    deployment = plan.deployment
    name = deployment.device.name
    found = []
    more = next(_larger(deployment), None)
    if more is not None:
        found.append(f"{more.devices} x {name} ({_grid(more)})")
    fewer = next(_narrower(deployment), None)
    if fewer is not None:
        found.append(f"{fewer.weights.name} weights on {_count(fewer)}{name}")
    if not found:
        both = next((wide for narrow in _formats(deployment) for wide in _larger(narrow)), None)
        if both is not None:
            found.append(f"{both.weights.name} weights on {both.devices} x {name} ({_grid(both)})")
    gpus = sorted((catalogue or load_catalogue()).gpus, key=lambda device: device.memory_bytes)
    others = [other for device in gpus if device != deployment.device for other in _with(deployment, device=device)]
    other = next(filter(_fits, others), None)
    if other is not None:
        found.append(f"{_count(other)}{other.device.name}")
    if not found:
        wide = [wide for narrow in others for wide in _larger(narrow)]
        wide += [wide for other in others for narrow in _formats(other) for wide in _larger(narrow)]
        if wide:
            found.append(f"{_bits(wide[0], deployment)}{wide[0].devices} x {wide[0].device.name} ({_grid(wide[0])})")
    if plan.blocks > 0:
        found.insert(0, f"max_model_len {plan.longest:,}")
    if not found:
        return f"no machine of the catalogue holds {deployment.shape.name}, not even with {_FEWER_BITS[-1]} weights"
    return f"{' or '.join(found)} would do"


def _fits(deployment: Deployment) -> bool:
    return memory_plan(deployment).fits


def _with(deployment: Deployment, **changes: object) -> Iterator[Deployment]:
    """The deployment with changes, if that is possible at all."""
    try:
        yield replace(deployment, **changes)  # type: ignore[arg-type]
    except ConfigError:
        return


def _larger(deployment: Deployment) -> Iterator[Deployment]:
    """More devices of the same kind, the fewest first, that fit."""
    if deployment.device.kind == "cpu":
        return
    most = deployment.device.devices_per_node
    for tensor in possible_tensor_parallel(deployment.shape):
        if deployment.devices < tensor <= most:
            for wide in _with(deployment, tensor_parallel=tensor, pipeline_parallel=1):
                if _fits(wide):
                    yield wide


def _formats(deployment: Deployment) -> Iterator[Deployment]:
    for dtype in _FEWER_BITS:
        for narrow in _with(deployment, weight_dtype=dtype):
            if narrow.weights.matrix_bytes < deployment.weights.matrix_bytes:
                yield narrow


def _narrower(deployment: Deployment) -> Iterator[Deployment]:
    yield from (narrow for narrow in _formats(deployment) if _fits(narrow))


def _grid(deployment: Deployment) -> str:
    return f"tensor_parallel {deployment.tensor_parallel}"


def _count(deployment: Deployment) -> str:
    return "one " if deployment.devices == 1 else f"{deployment.devices} x "


def _bits(deployment: Deployment, asked: Deployment) -> str:
    name = deployment.weights.name
    return "" if deployment.weight_dtype == asked.weight_dtype else f"{name} weights on "
