"""GET /v1/admin/plan: headroom, the date when a model is full, and the cost of the next replica.

The figures are those of `penstock.planning.headroom` on the load that all gateway processes of this server measured.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.backends.base import Backend
from penstock.config.autoscale import AutoscaleConfig
from penstock.config.routing import AdmissionConfig
from penstock.gateway.app.decoding import decode_query
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.workers.group import WorkerGroup
from penstock.planning.catalogue import Device, devices
from penstock.planning.headroom import FleetSize, ServerPlan, mean, plan_server
from penstock.planning.product_name import by_product_name
from penstock.planning.scaling_preview import preview
from penstock.routing.registry import ModelRegistry, ServedModel
from penstock.telemetry.load_history import ModelHistory

SHOWN = 120
"""Points of the recent hours in a reply."""
DIGITS = 6
"""Significant digits of figures in a reply."""


class PlanQuery(msgspec.Struct, forbid_unknown_fields=True):
    model: str = ""
    """Only this model; by default all."""


@dataclass(frozen=True, slots=True)
class _Fleet:
    """What is known of a model's replicas, read on the event loop."""

    model: str
    size: FleetSize
    device: str
    price_source: str
    autoscale: AutoscaleConfig | None


class PlanEndpoints:
    """Plans for the running server."""

    def __init__(
        self,
        registry: ModelRegistry,
        workers: WorkerGroup,
        admission: AdmissionConfig,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._registry = registry
        self._workers = workers
        self._admission = admission
        self._clock = clock

    async def show_plan(self, exchange: Exchange) -> None:
        asked = decode_query(PlanQuery, exchange.scope).model
        models = list(self._registry)
        if asked:
            named = self._registry.route(asked).model
            models = [model for model in models if model.name == named.base_name]
        fleets = [self._fleet(model) for model in models]
        histories = await self._workers.load_history()
        now = self._clock()
        # Some milliseconds of arithmetic per model: not on the event loop.
        plans = await asyncio.to_thread(
            lambda: [_describe(fleet, histories.get(fleet.model, ModelHistory()), now) for fleet in fleets]
        )
        await exchange.reply_json({"object": "list", "data": plans, "devices": [_offer(one) for one in devices()]})

    def _fleet(self, model: ServedModel) -> _Fleet:
        replicas = _serving(model.backend.replicas)
        count = max(len(replicas), 1)
        slots = [self._admission.slots or (one.info.max_running if one.info else 0) for one in replicas]
        memory = [one.load.total_blocks * one.info.block_size if one.info else 0 for one in replicas]
        price, price_source = _price(model, replicas)
        info = next((one.info for one in replicas if one.info is not None), None)
        size = FleetSize(
            replicas=len(replicas),
            slots=sum(slots) // count if all(slots) else 0,
            kv_tokens=int(sum(memory) // count * self._admission.kv_share) if all(memory) else 0,
            price_per_hour=price,
            shares_machine=info is not None and info.device.startswith("cpu"),
        )
        device = (info.product or info.device) if info is not None else ""
        return _Fleet(model.name, size, device, price_source, model.autoscale)


def _offer(device: Device) -> dict[str, Any]:
    """A device of the catalogue, for the choice of one."""
    return {
        "id": device.name,
        "title": device.title,
        "kind": device.kind,
        "memory_bytes": device.memory_bytes,
        "price_per_hour": device.prices.on_demand,
    }


def _serving(replicas: Sequence[Backend]) -> list[Backend]:
    """Those that take whole requests; prefill replicas do so only while no other is up."""
    up = [replica for replica in replicas if replica.ready]
    return [replica for replica in up if replica.info is None or replica.info.role != "prefill"] or up


def _price(model: ServedModel, replicas: Sequence[Backend]) -> tuple[float | None, str]:
    """Dollars per hour of one replica, and where the figure is from."""
    if model.cost_per_hour:
        return model.cost_per_hour, "configuration"
    info = next((one.info for one in replicas if one.info is not None and one.info.product), None)
    device = by_product_name(info.product, devices()) if info is not None else None
    if info is None or device is None or device.prices.on_demand is None:
        return None, ""
    count = f"{info.ranks} x " if info.ranks > 1 else ""
    return device.prices.on_demand * info.ranks, f"catalogue: {count}{device.name}, on demand"


def _describe(fleet: _Fleet, history: ModelHistory, now: float) -> dict[str, Any]:
    plan = plan_server(history.minutes, history.hours, fleet.size, now)
    config = fleet.autoscale or AutoscaleConfig(max=max(4, 2 * fleet.size.replicas))
    decision = preview(history.minutes, fleet.size, config, now)
    size = fleet.size
    described: dict[str, Any] = _rounded(
        {
            "id": fleet.model,
            "object": "model.plan",
            "at": now,
            "device": fleet.device,
            "slots": size.slots or None,
            "kv_tokens": size.kv_tokens or None,
            "price_per_hour": size.price_per_hour,
            "price_source": fleet.price_source,
            **msgspec.to_builtins(plan),
            "autoscaler": {
                "enabled": fleet.autoscale is not None,
                "min": config.min,
                "max": config.max,
                "replicas": decision.desired if decision is not None else None,
                "reason": decision.reason if decision is not None else None,
                "detail": decision.detail if decision is not None else "nothing was measured yet",
            },
            "history": _points(history, plan),
        }
    )
    return described


def _points(history: ModelHistory, plan: ServerPlan) -> list[dict[str, Any]]:
    """The history for a chart: the hours before the minutes, and the minutes in groups."""
    minutes = history.minutes
    begin = minutes[0].at if minutes else float("inf")
    size = max(-(-len(minutes) // SHOWN), 1)
    shown = [point for point in history.hours if point.at + point.seconds <= begin]
    shown += [mean(minutes[i : i + size]) for i in range(0, len(minutes), size)]
    capacity = plan.headroom.capacity_requests if plan.headroom is not None else None
    each = capacity.likely / plan.replicas if capacity is not None and plan.replicas else None
    return [
        msgspec.to_builtins(point) | {"capacity_requests": None if each is None else each * point.replicas}
        for point in shown
    ]


def _rounded(value: Any) -> Any:
    """The same tree with its figures to a few digits; times keep theirs."""
    match value:
        case dict():
            return {
                key: round(inner, 3) if key == "at" and isinstance(inner, float) else _rounded(inner)
                for key, inner in value.items()
            }
        case list() | tuple():
            return [_rounded(inner) for inner in value]
        case float():
            return float(f"{value:.{DIGITS}g}")
        case _:
            return value
