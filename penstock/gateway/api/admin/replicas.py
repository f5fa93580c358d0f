"""/v1/admin/replicas, /v1/admin/autoscale, /v1/admin/models/{model}/scale, /autoscale, /restart, /drain and /notice,
/v1/admin/drain: the engines behind models.

The supervisor carries out the operations, so they need a server started by `penstock serve`; each replies when done.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from penstock.backends.base import EngineClient
from penstock.backends.remote.load import ServerLoad
from penstock.engine.request import EngineInfo
from penstock.gateway.api.admin.supervisor import Supervisor
from penstock.gateway.app.decoding import decode
from penstock.gateway.app.exchange import Exchange
from penstock.protocol.control import Drain, Notice, Restart, Scale, SetLimits, Stop
from penstock.protocol.errors import InvalidRequest
from penstock.routing.place import NOWHERE, ReplicaPlace
from penstock.routing.registry import ModelRegistry, ServedModel
from penstock.routing.remotes import RemoteMember, RemoteModel
from penstock.routing.replicas import ReplicaSet


class ScaleRequest(Struct, forbid_unknown_fields=True):
    """POST /v1/admin/models/{model}/scale"""

    replicas: Annotated[int, Meta(ge=1, le=256)]
    pool: Annotated[str, Meta(max_length=64)] | None = None
    """Which pool, if the model has pools."""


class AutoscaleRequest(Struct, forbid_unknown_fields=True):
    """POST /v1/admin/models/{model}/autoscale"""

    min: Annotated[int, Meta(ge=0, le=256)] | None = None
    max: Annotated[int, Meta(ge=1, le=256)] | None = None
    pool: Annotated[str, Meta(max_length=64)] | None = None
    """Which pool, if pools of the model are scaled."""


class NoticeRequest(Struct, forbid_unknown_fields=True):
    """POST /v1/admin/models/{model}/notice"""

    replica: Annotated[str, Meta(max_length=64)] | None = None
    """Which one goes away; by default all of them."""
    seconds: Annotated[float, Meta(ge=0, le=86400)] = 120.0
    """When."""


class RestartRequest(Struct, forbid_unknown_fields=True):
    """POST /v1/admin/models/{model}/restart"""

    replica: Annotated[str, Meta(max_length=64)] | None = None
    """Which one; by default all of them, one after the other."""


class DrainRequest(Struct, forbid_unknown_fields=True):
    """POST /v1/admin/models/{model}/drain"""

    replica: Annotated[str, Meta(max_length=64)]


_scale = msgspec.json.Decoder(ScaleRequest)
_autoscale = msgspec.json.Decoder(AutoscaleRequest)
_notice = msgspec.json.Decoder(NoticeRequest)
_restart = msgspec.json.Decoder(RestartRequest)
_drain = msgspec.json.Decoder(DrainRequest)


class ReplicaEndpoints:
    """The engines behind models."""

    def __init__(self, registry: ModelRegistry, supervisor: Supervisor, body_limit: int) -> None:
        self._registry = registry
        self._supervisor = supervisor
        self._body_limit = body_limit

    async def list_replicas(self, exchange: Exchange) -> None:
        found = [entry for model in self._registry for entry in describe(model)]
        found += [entry for remote in self._registry.remotes.values() for entry in describe_remote(remote)]
        await exchange.reply_json({"object": "list", "data": found, "autoscale": self._scaled()})

    async def list_autoscale(self, exchange: Exchange) -> None:
        await exchange.reply_json({"object": "list", "data": self._scaled()})

    async def set_autoscale(self, exchange: Exchange) -> None:
        request = decode(_autoscale, await exchange.body(self._body_limit))
        model = self._model(exchange, "/autoscale")
        if request.min is None and request.max is None:
            raise InvalidRequest("Give `min`, `max` or both.", param="min")
        await self._supervisor.ask(
            lambda number: SetLimits(number, model.name, request.min, request.max, request.pool or "")
        )
        reply = {"id": model.name, "object": "model", "min": request.min, "max": request.max}
        await exchange.reply_json(reply | ({"pool": request.pool} if request.pool else {}))

    async def notice_replica(self, exchange: Exchange) -> None:
        request = decode(_notice, await exchange.body(self._body_limit) or b"{}")
        model = self._model(exchange, "/notice")
        if model.time_slice:
            raise InvalidRequest(f"`{model.name}` takes turns (time_slice): it has one replica.", param="model")
        await self._supervisor.ask(lambda number: Notice(number, model.name, request.replica or "", request.seconds))
        await _reply(exchange, model)

    def _scaled(self) -> list[dict[str, Any]]:
        """The models that are scaled automatically: their limits, their replicas, and the last decision."""
        return [
            {"object": "autoscale", **msgspec.structs.asdict(scaling), "id": scaling.model or name}
            for name, scaling in self._supervisor.scaling.items()
        ]

    async def scale_model(self, exchange: Exchange) -> None:
        request = decode(_scale, await exchange.body(self._body_limit))
        model = self._model(exchange, "/scale")
        if model.time_slice:
            raise InvalidRequest(f"`{model.name}` takes turns (time_slice): it has one replica.", param="model")
        await self._supervisor.ask(lambda number: Scale(number, model.name, request.replicas, request.pool or ""))
        await _reply(exchange, model)

    async def restart_model(self, exchange: Exchange) -> None:
        request = decode(_restart, await exchange.body(self._body_limit) or b"{}")
        model = self._model(exchange, "/restart")
        await self._supervisor.ask(lambda number: Restart(number, model.name, request.replica or ""))
        await _reply(exchange, model)

    async def drain_replica(self, exchange: Exchange) -> None:
        request = decode(_drain, await exchange.body(self._body_limit))
        model = self._model(exchange, "/drain")
        await self._supervisor.ask(lambda number: Drain(number, model.name, request.replica))
        await _reply(exchange, model)

    async def drain_server(self, exchange: Exchange) -> None:
        await self._supervisor.ask(lambda number: Stop(number))
        await exchange.reply_json({"object": "server", "state": "draining"}, 202)

    def _model(self, exchange: Exchange, verb: str) -> ServedModel:
        model = self._registry.route(exchange.path.removeprefix("/v1/admin/models/").removesuffix(verb)).model
        if model.adapter:
            raise InvalidRequest(f"`{model.name}` is an adapter; its base is `{model.base}`.", param="model")
        return model


async def _reply(exchange: Exchange, model: ServedModel) -> None:
    await exchange.reply_json({"id": model.name, "object": "model", "replicas": describe(model)})


def describe(model: ServedModel) -> list[dict[str, Any]]:
    """The replicas of a model, as this gateway sees them."""
    backend = model.backend
    breakers = {}
    retiring = set()
    places: dict[str, ReplicaPlace] = {}
    if isinstance(backend, ReplicaSet):
        breakers = {member.name: member.breaker.state for member in backend.members}
        retiring = {member.name for member in backend.members if member.retiring}
        places = {member.name: member.place for member in backend.members}
    return [
        {
            "id": f"{model.name}/{replica.name}",
            "object": "replica",
            "model": model.name,
            "replica": replica.name,
            "remote": False,
            "ready": replica.ready,
            "state": replica.state if replica.ready else "away",
            "leaving": replica.name in retiring,
            "breaker": breakers.get(replica.name, "closed"),
            "in_flight": replica.in_flight,
            "running": replica.load.running,
            "waiting": replica.load.waiting,
            "stalled_s": round(replica.stalled_s, 3),
            "instance": replica.info.instance if replica.info is not None else None,
            "device": replica.info.device if replica.info is not None else None,
            "role": replica.info.role if replica.info is not None else None,
            **_where(places.get(replica.name, NOWHERE)),
            "round_trip_ms": _milliseconds(replica.round_trip.seconds if isinstance(replica, EngineClient) else None),
            "memory": None if replica.info is None else _memory(replica.info),
            "startup_s": None if replica.info is None else replica.info.startup,
        }
        for replica in backend.replicas
    ]


def _where(place: ReplicaPlace) -> dict[str, str | None]:
    return {name: getattr(place, name) or None for name in ("pool", "region", "zone", "machine")}


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)


def _memory(info: EngineInfo) -> dict[str, Any]:
    """What an engine holds in memory on each of its devices, and the room that its KV cache has."""
    return {
        "weights_bytes": info.weight_bytes or None,
        "kv_cache_bytes": info.kv_bytes or None,
        "kv_cache_tokens": info.num_blocks * info.block_size,
        "sequences": info.max_running,
        "devices": info.ranks,
        "dtype": info.dtype,
        "product": info.product or None,
    }


def describe_remote(model: RemoteModel) -> list[dict[str, Any]]:
    """The servers that run a model elsewhere. `running` and `waiting`: of all clients, where a server tells."""
    return [_describe_member(model, member) for member in model.members]


def _describe_member(model: RemoteModel, member: RemoteMember) -> dict[str, Any]:
    server, load = member.server, member.server.load or ServerLoad()
    return {
        "id": f"{model.name}/{server.name}",
        "object": "replica",
        "model": model.name,
        "replica": server.name,
        "remote": True,
        "dialect": model.dialect,
        "ready": member.reachable,
        "state": "awake" if member.reachable else "away",
        "leaving": False,
        "breaker": member.breaker.state,
        "in_flight": server.in_flight,
        "running": server.in_flight if load.running is None else load.running,
        "waiting": load.waiting or 0,
        "kv_usage": load.kv_usage,
        "loaded": load.loaded,
        "saturated": model.saturated(member),
        "limits": {"remaining": server.limits.remaining, "wait_s": round(server.wait_s(), 3)},
        "stalled_s": 0.0,
        "instance": None,
        "device": server.upstream.url,
        "role": "both",
        **_where(ReplicaPlace(region=member.region)),
        "round_trip_ms": _milliseconds(server.round_trip.seconds),
        "memory": None,
        "startup_s": None,
    }
