"""POST /v1/admin/plan: hardware, latency and money for a load that is only imagined; the same plan as `penstock plan`.

Only models that are served here or that the catalogue knows can be named: a request must not make the server read a
path or ask a hub. One plan is made at a time, in a thread.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from penstock.errors import CheckpointError, ConfigError
from penstock.gateway.app.decoding import decode
from penstock.gateway.app.exchange import Exchange
from penstock.protocol.errors import InvalidRequest
from penstock.routing.registry import ModelRegistry
from penstock.sources.resolve import cached

if TYPE_CHECKING:
    from penstock.planning.shape import ModelShape

MOST_DEVICES = 16
Amount = Annotated[float, Meta(gt=0, le=1e12)]
Tokens = Annotated[float, Meta(ge=1, le=1e8)]


class WhatIfRequest(Struct, forbid_unknown_fields=True):
    """POST /v1/admin/plan"""

    users: Amount
    """Users a day."""
    requests_per_user: Amount
    input_tokens: Tokens
    """Prompt tokens that a request adds."""
    output_tokens: Tokens
    model: Annotated[str, Meta(max_length=256)] = ""
    """A model that is served here, or one of the catalogue; by default the first one served."""
    devices: Annotated[list[Annotated[str, Meta(max_length=64)]], Meta(max_length=MOST_DEVICES)] = []
    """Names from the catalogue; by default every GPU."""
    peak_factor: Annotated[float, Meta(ge=1, le=1000)] = 3.0
    curve: Literal["flat", "office", "consumer"] = "consumer"
    turns: Annotated[float, Meta(ge=1, le=1000)] = 1.0
    """Requests of a conversation, each sent with the whole history."""
    cache_hit_rate: Annotated[float, Meta(ge=0, lt=1)] | None = None
    ttft_ms: Annotated[float, Meta(gt=0)] | None = 500.0
    """p95 of the time to the first token; null: any."""
    itl_ms: Annotated[float, Meta(gt=0)] | None = 50.0
    """Mean time between tokens; null: any."""
    utilisation: Annotated[float, Meta(ge=0.01, le=1)] = 0.8
    """Share of a replica's capacity to plan for at the peak."""
    autoscaled: bool = False
    """Choose by the bill of a fleet that follows the day."""


_request = msgspec.json.Decoder(WhatIfRequest)


class WhatIfEndpoints:
    """Plans for other loads and other hardware."""

    def __init__(self, registry: ModelRegistry, body_limit: int) -> None:
        self._registry = registry
        self._body_limit = body_limit
        self._one_at_a_time = asyncio.Lock()

    async def what_if(self, exchange: Exchange) -> None:
        request = decode(_request, await exchange.body(self._body_limit))
        if request.users * request.requests_per_user < 1:
            raise InvalidRequest("A plan needs at least one request a day.", param="requests_per_user")
        source = self._source(request.model)
        async with self._one_at_a_time:
            try:
                plan = await asyncio.to_thread(_plan, request, source)
            except (ConfigError, CheckpointError) as error:
                raise InvalidRequest(f"{error}.", code="cannot_plan") from error
        await exchange.reply_json({"object": "plan", **plan})

    def _source(self, name: str) -> tuple[str, str]:
        """The model's name, and its files if it is served here."""
        served = {known: model for model in self._registry for known in (model.name, *model.aliases)}
        if not name and served:
            name = next(iter(served))
        if not name:
            raise InvalidRequest("This server runs no model of its own; name one of the catalogue.", param="model")
        return name, served[name].source if name in served else ""


def _plan(request: WhatIfRequest, source: tuple[str, str]) -> dict[str, Any]:
    # The planner is loaded with the first plan: gateways start without it.
    from penstock.planning.candidate import Options
    from penstock.planning.capacity import Slo
    from penstock.planning.catalogue import load_catalogue
    from penstock.planning.plan import make_plan
    from penstock.planning.plan_tree import as_tree
    from penstock.planning.provision import Headroom
    from penstock.planning.workload import CURVES, Workload

    known = load_catalogue()
    gpus = [device for device in known.devices.values() if device.kind == "gpu"]
    hardware = [known.device(name) for name in dict.fromkeys(request.devices)] or gpus
    workload = Workload(
        request.users,
        request.requests_per_user,
        request.input_tokens,
        request.output_tokens,
        request.peak_factor,
        CURVES[request.curve],
        request.turns,
        request.cache_hit_rate,
    )
    slo = Slo(_seconds(request.ttft_ms), _seconds(request.itl_ms))
    options = Options(headroom=Headroom(request.utilisation), autoscaled=request.autoscaled)
    return as_tree(make_plan(_shape(*source), hardware, workload, slo, options, catalogue=known))


def _shape(name: str, source: str) -> ModelShape:
    from penstock.planning.config_shape import shape_of_config
    from penstock.planning.model_shape import known_models, model_shape
    from penstock.planning.records import find

    if source:
        return replace(model_shape(cached(source) or source), name=name)
    known = known_models()
    aliases = {alias: model.name for model in known.values() for alias in model.aliases}
    will_do = "one that is served here will do, or one that `penstock plan --models list` shows"
    return shape_of_config(known[find(name, known, aliases, "model", will_do)].config, name)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
